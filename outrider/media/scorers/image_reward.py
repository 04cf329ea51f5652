"""ImageReward (https://arxiv.org/abs/2304.05977) as a scorer of frames. The package `image-reward` is not required."""

from typing import Any

import torch
from torch import Tensor

from outrider.errors import OutriderError


class ImageRewardScorer:
    """Scores each frame with a loaded ImageReward model. The scores have no limits; 0 is an average picture.

    Args:
        model: what `ImageReward.load("ImageReward-v1.0")` returns, or another object with its
            method `score(prompt, images) -> list of floats`, or a float for one image.
    """

    def __init__(self, model: Any) -> None:
        if not callable(getattr(model, "score", None)):
            raise OutriderError(f"{type(model).__name__} has no method score; give what ImageReward.load returns")
        self.score_range: tuple[float, float] | None = None
        self._model = model

    def score(self, prompt: str, content: Tensor) -> Tensor:
        """Return a score for each frame of `content`, (frames, 3, rows, columns), from 0 to 1."""
        from PIL import Image

        pixels = (content.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        scores = self._model.score(prompt, list(map(Image.fromarray, pixels)))
        return torch.as_tensor(scores, dtype=torch.float32).reshape(-1)
