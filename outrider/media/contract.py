"""The protocols of models: block generators, a streaming decoder, a scorer and a router.

The protocols are the same for video and audio. A block is a latent of a fixed shape. The decoder turns it into content:
frames of a video, or samples of a recording. The scorer gives one score for each unit of content: a frame, or a window.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class BlockGenerator(Protocol):
    """A target or a drafter: it makes a block from noise, given the clean blocks in its cache.

    The engine calls `commit` for block 0, 1, ... in this order, and `generate` for the block after the committed ones.
    """

    @property
    def blocks(self) -> int:
        """The most blocks of one output."""

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of the latent of a block. Target and drafter have the same."""

    def open(self, prompt: str) -> Any:
        """Return the cache of a new output."""

    def generate(self, block: int, noise: Tensor, cache: Any) -> Tensor:
        """Return the clean latent of a block, in several passes. The cache stays as it is.

        Args:
            block: its number, which is the number of blocks in the cache.
            noise: of the shape of a latent, from a normal distribution.
            cache: the clean blocks before it.
        """

    def commit(self, latent: Tensor, cache: Any) -> None:
        """Write the next clean block into the cache, in one pass. Who made the block does not matter."""


@runtime_checkable
class StreamDecoder(Protocol):
    """Turns latents into content, block after block, with a state."""

    def reset(self) -> None:
        """Start a new output."""

    def decode(self, latent: Tensor) -> Tensor:
        """Return the content of the next block. The first dimension is time."""

    def snapshot(self) -> Any:
        """Return the state. Later calls of `decode` do not change what is returned."""

    def restore(self, state: Any) -> None:
        """Put the state of a snapshot back, as if nothing had been decoded since."""


@runtime_checkable
class Scorer(Protocol):
    """Says how good content is for a prompt."""

    @property
    def score_range(self) -> tuple[float, float] | None:
        """The least and the greatest score; None if scores have no limits."""

    def score(self, prompt: str, content: Tensor) -> Tensor:
        """Return a score for each unit of the content of a block, as a vector. A higher score is better.

        An exception or a score that is not a finite number rejects the block.
        """


class Choice(Enum):
    """A router's choice for a block, before there is a draft."""

    TARGET = "target"  # the target makes the block
    DRAFT = "draft"  # the drafter makes the block, and it is accepted without a score
    SCORE = "score"  # the drafter makes the block, and the router judges its scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The block that is next, and what happened so far."""

    block: int
    blocks: int  # of the output
    by_target: int  # blocks that the target has made
    seed: int  # of the output


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgment:
    """A router's opinion of a draft."""

    score: float
    accepted: bool


@runtime_checkable
class Router(Protocol):
    """Decides who makes each block. It holds no state of an output, so one router may serve many outputs."""

    @property
    def name(self) -> str:
        """The name in tables and results."""

    @property
    def threshold(self) -> float | None:
        """The least score of an accepted draft; None if scores play no part."""

    @property
    def quality(self) -> float | None:
        """The measured score of its outputs as a share of target-only's; None if it was not measured."""

    def choose(self, position: Position) -> Choice:
        """Return what to do for the next block."""

    def judge(self, scores: Tensor) -> Judgment:
        """Return the score of a draft and whether it is accepted. Called after `Choice.SCORE`.

        Args:
            scores: of each unit, finite and not empty.
        """
