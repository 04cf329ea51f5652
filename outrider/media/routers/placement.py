"""Routers that need no score: they fix in advance which blocks the target makes."""

import random
from collections.abc import Iterable

from torch import Tensor

from outrider.errors import OutriderError
from outrider.media.contract import Choice, Judgment, Position


class _Placement:
    """The base of these routers."""

    threshold: float | None = None

    def __init__(self, name: str, quality: float | None) -> None:
        self.name = name
        self.quality = quality

    def choose(self, position: Position) -> Choice:
        return Choice.TARGET if self._by_target(position) else Choice.DRAFT

    def judge(self, scores: Tensor) -> Judgment:
        """Never called, because `choose` never asks for a score."""
        raise NotImplementedError(f"{self.name} does not judge scores")

    def _by_target(self, position: Position) -> bool:
        raise NotImplementedError


class TargetOnly(_Placement):
    """The target makes all blocks."""

    def __init__(self) -> None:
        super().__init__("target-only", 1.0)

    def _by_target(self, position: Position) -> bool:
        return True


class DrafterOnly(_Placement):
    """The drafter makes all blocks."""

    def __init__(self, *, quality: float | None = None) -> None:
        super().__init__("drafter-only", quality)

    def _by_target(self, position: Position) -> bool:
        return False


class Stride(_Placement):
    """The target makes every k-th block, so at most k - 1 drafted blocks follow each other.

    Args:
        k: distance between blocks of the target.
        force_first: the target makes blocks 0, k, 2k, ...; otherwise k - 1, 2k - 1, ...
        quality: the measured score of its outputs as a share of target-only's, if it is known.

    Raises:
        OutriderError: k is below 1.
    """

    def __init__(self, k: int, *, force_first: bool = True, quality: float | None = None) -> None:
        if k < 1:
            raise OutriderError(f"k of the stride is {k}; use at least 1")
        super().__init__(f"stride {k}{'' if force_first else ', not forced'}", quality)
        self._k = k
        self._offset = 0 if force_first else k - 1

    def _by_target(self, position: Position) -> bool:
        return position.block % self._k == self._offset


class FixedBlocks(_Placement):
    """The target makes the blocks of a list.

    Args:
        blocks: their numbers, from 0.
        name: in tables and results.
        quality: the measured score of its outputs as a share of target-only's, if it is known.
    """

    def __init__(self, blocks: Iterable[int], *, name: str | None = None, quality: float | None = None) -> None:
        self.blocks = frozenset(blocks)
        if any(block < 0 for block in self.blocks):
            raise OutriderError(f"block {min(self.blocks)} does not exist; number the blocks from 0")
        super().__init__(name or f"target makes {', '.join(map(str, sorted(self.blocks)))}", quality)

    def _by_target(self, position: Position) -> bool:
        return position.block in self.blocks


class RandomGate(_Placement):
    """A draft is accepted with a fixed probability. This is the control that a quality gate has to beat.

    Args:
        rate: probability that the drafter makes a block. With `force_first` it holds for the other blocks.
        force_first: the target always makes block 0.
        quality: the measured score of its outputs as a share of target-only's, if it is known.

    Raises:
        OutriderError: the rate is not from 0 to 1.
    """

    def __init__(self, rate: float, *, force_first: bool = True, quality: float | None = None) -> None:
        if not 0 <= rate <= 1:
            raise OutriderError(f"rate of random acceptance is {rate}; use a number from 0 to 1")
        super().__init__(f"random {rate:.2f}{'' if force_first else ', not forced'}", quality)
        self._rate = rate
        self._force_first = force_first

    def _by_target(self, position: Position) -> bool:
        if self._force_first and position.block == 0:
            return True
        return random.Random(f"{position.seed}/{position.block}").random() >= self._rate
