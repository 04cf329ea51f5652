"""The results of the engine: content, and for each block its maker, score and times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from torch import Tensor


class Maker(StrEnum):
    """Who made a block."""

    TARGET = "target"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Where the time of a block went."""

    draft: float = 0.0  # the drafter's passes, with those that write clean blocks into its cache
    decode: float = 0.0  # of the draft and, after a rejection, of the target's block
    score: float = 0.0
    commit: float = 0.0  # the target's passes that write clean blocks into its cache
    generate: float = 0.0  # the target's denoising passes

    @property
    def total(self) -> float:
        """The sum."""
        return self.draft + self.decode + self.score + self.commit + self.generate

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """A finished block."""

    index: int
    maker: Maker
    drafted: bool  # whether the drafter made a draft, accepted or not
    score: float | None  # the aggregated score of the draft; None if it was not scored
    failure: str | None  # why the draft could not be scored
    seconds: Seconds
    latent: Tensor
    content: Tensor  # the first dimension is time

    def to_json(self) -> dict[str, Any]:
        """Return the record without latents and content."""
        return {
            "index": self.index,
            "maker": self.maker.value,
            "drafted": self.drafted,
            "score": self.score,
            "failure": self.failure,
            "seconds": asdict(self.seconds),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaResult:
    """A finished output. It is never exact: accepted drafts are not the target's own blocks."""

    prompt: str
    seed: int
    router: str
    threshold: float | None
    quality: float | None  # share of target-only's score that was measured for this router; None: not measured
    content: Tensor  # the first dimension is time
    blocks: tuple[BlockResult, ...]
    target_commits: int  # passes that wrote a clean block into the target's cache
    exact: bool = field(default=False, init=False)

    @property
    def accepted_share(self) -> float | None:
        """Accepted drafts as a share of all drafts; None if there was no draft."""
        drafted = [block for block in self.blocks if block.drafted]
        return sum(block.maker == Maker.DRAFTER for block in drafted) / len(drafted) if drafted else None

    @property
    def drafter_share(self) -> float:
        """Blocks of the drafter as a share of all blocks."""
        return sum(block.maker == Maker.DRAFTER for block in self.blocks) / len(self.blocks)

    @property
    def failures(self) -> int:
        """Drafts that were rejected because the scorer failed."""
        return sum(block.failure is not None for block in self.blocks)

    @property
    def seconds(self) -> Seconds:
        """The time of all blocks."""
        return sum((block.seconds for block in self.blocks), Seconds())

    def to_json(self) -> dict[str, Any]:
        """Return the result for a JSON document, without latents and content."""
        return {
            "exact": self.exact,
            "prompt": self.prompt,
            "seed": self.seed,
            "router": self.router,
            "threshold": self.threshold,
            "quality": self.quality,
            "accepted_share": self.accepted_share,
            "drafter_share": self.drafter_share,
            "scorer_failures": self.failures,
            "target_commits": self.target_commits,
            "seconds": asdict(self.seconds),
            "blocks": [block.to_json() for block in self.blocks],
        }
