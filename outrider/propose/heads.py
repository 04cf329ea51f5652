"""Trained drafts guess: chains as a draft model's, and trees (Li et al. 2024, EAGLE-2)."""

from __future__ import annotations

from dataclasses import replace

from outrider.heads.target import HeadTarget
from outrider.propose.base import Setup
from outrider.propose.model import ModelProposer
from outrider.propose.model_tree import TreeProposer
from outrider.types import Batch, Needs, Round


class HeadProposer(ModelProposer):
    """A chain of guesses from the target's states."""

    def __init__(self, setup: Setup, head: HeadTarget) -> None:
        super().__init__(setup, head)
        self._head = head
        self.needs = Needs(layers=head.description.taps.layers)

    def commit(self, round: Round) -> None:
        self._head.note(round)
        super().commit(round)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, self._head.reach))


class HeadTreeProposer(TreeProposer):
    """A tree of guesses from the target's states."""

    def __init__(self, setup: Setup, head: HeadTarget) -> None:
        super().__init__(setup, head, reach=head.reach)
        self._head = head
        self.needs = Needs(layers=head.description.taps.layers)

    def commit(self, round: Round) -> None:
        self._head.note(round)
        super().commit(round)

    def _catch_up(self, batch: Batch) -> tuple[Batch | None, list[int]]:
        return super()._catch_up(within(batch, self._head, max(batch.budget)))


def within(batch: Batch, head: HeadTarget, reach: int) -> Batch:
    """No row with more guesses than `reach`, and none where the target has yet to read what led to the last token."""
    if head.description.at_once:  # all guesses are made in one pass, so to do without the later ones spares nothing
        batch = replace(batch, worth=())
    ready = (start and len(feed) == 1 for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(batch, budget=tuple(min(b, reach) if r else 0 for b, r in zip(batch.budget, ready, strict=True)))
