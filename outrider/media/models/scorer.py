"""How well frames match a caption: a probability for each frame, from an image and a text embedding.

The models are trained with a sigmoid for each pair, as in SigLIP
(https://arxiv.org/abs/2303.15343).
"""

import torch
from torch import Tensor, nn

from outrider.media.models.captions import LANGUAGE
from outrider.media.models.config import ScorerConfig
from outrider.media.models.language import Language


class CaptionTower(nn.Module):
    """Embeds captions. A subclass embeds parts of content; a pair matches if the embeddings' product is high."""

    def __init__(self, config: ScorerConfig, language: Language) -> None:
        super().__init__()
        self.config = config
        self.language = language
        self.words = nn.Embedding(language.num_words, 16)
        self.text = nn.Sequential(
            nn.Linear(16 * language.num_tokens, 96), nn.SiLU(), nn.Linear(96, config.embedding + 1)
        )

    def embed_captions(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return (n, embedding) and the offsets, (n,), of ids (n, words)."""
        out = self.text(self.words(tokens).flatten(-2))
        return out[..., :-1], out[..., -1]

    def parts(self, content: Tensor) -> Tensor:
        """Return the parts of content that are scored one by one, first dimension n."""
        raise NotImplementedError

    def embed(self, parts: Tensor) -> Tensor:
        """Return (n, embedding) of parts."""
        raise NotImplementedError


class MatchModel(CaptionTower):
    """Embeds frames and captions."""

    def __init__(self, config: ScorerConfig) -> None:
        super().__init__(config, LANGUAGE)
        width = config.width
        self.image = nn.Sequential(
            nn.Conv2d(3 * config.frames, width, 5, stride=2, padding=2),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * width, 3 * width, 3, padding=1),
            nn.SiLU(),
        )
        self.image_out = nn.Linear(6 * width, config.embedding)

    def parts(self, content: Tensor) -> Tensor:
        """Return each frame of (frames, 3, rows, columns), with the frames before it that the model sees."""
        return stack_frames(content, self.config.frames)

    def embed(self, parts: Tensor) -> Tensor:
        """Return (n, embedding) of (n, 3 x frames at once, rows, columns)."""
        features = self.image(parts)
        pooled = torch.cat([features.mean((-2, -1)), features.amax((-2, -1))], dim=-1)
        embedding: Tensor = self.image_out(pooled)
        return embedding

    def forward(self, frames: Tensor, tokens: Tensor) -> Tensor:
        """Return the logit of each pair, (n,)."""
        embedding, offset = self.embed_captions(tokens)
        return (self.embed(frames) * embedding).sum(-1) + offset


class MatchScorer:
    """Scores the frames or windows of content."""

    def __init__(self, model: CaptionTower) -> None:
        self.score_range: tuple[float, float] | None = (0.0, 1.0)
        self._model = model
        self._caption = ""
        self._embedding: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def score(self, prompt: str, content: Tensor) -> Tensor:
        """Return a probability for each part of `content`, (frames, 3, rows, columns) or (samples,)."""
        if prompt != self._caption or self._embedding is None:
            self._embedding = self._model.embed_captions(torch.tensor([self._model.language.tokens(prompt)]))
            self._caption = prompt
        embedding, offset = self._embedding
        parts = self._model.parts(content)
        return torch.sigmoid((self._model.embed(parts) * embedding).sum(-1) + offset)


def stack_frames(frames: Tensor, count: int) -> Tensor:
    """Return each frame with the `count` - 1 frames before it as further channels. The first frame is repeated.

    Args:
        frames: (..., frames, channels, rows, columns).
        count: frames at once.
    """
    if count == 1:
        return frames
    first = frames[..., :1, :, :, :]
    parts = [
        torch.cat([first] * back + [frames[..., : frames.shape[-4] - back, :, :, :]], dim=-4) for back in range(count)
    ]
    return torch.cat(parts, dim=-3)
