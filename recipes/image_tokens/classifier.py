"""A small classifier of the images: which size, color and shape it sees."""

import torch
from torch import nn
from torch.nn import functional

from recipes.image_tokens.images import COLORS, SHAPES, SIZES

_KINDS = (len(SIZES), len(COLORS), len(SHAPES))


class Classifier(nn.Module):
    """A convolutional network with one output layer for each word of a caption."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(48, 64, 3, stride=1, padding=1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
        )
        self.heads = nn.ModuleList([nn.Linear(64, kinds) for kinds in _KINDS])

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits [N, kinds] of size, color and shape for images [N, 3, 32, 32]."""
        features = self.body(images - 0.5)
        return [head(features) for head in self.heads]

    def loss(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of captions [N, 3]."""
        parts = [functional.cross_entropy(each, captions[:, i]) for i, each in enumerate(self(images))]
        return torch.stack(parts).mean()

    @torch.no_grad()
    def is_right(self, images: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        """Return [N, 3] bool, whether size, color and shape are those of the captions [N, 3]."""
        return torch.stack([each.argmax(-1) for each in self(images)], 1) == captions
