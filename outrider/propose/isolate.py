"""A proposer that may fail: what it raises costs its guesses, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outrider.core import tree
from outrider.core.types import Batch, Draft, Request, Round, SequenceState
from outrider.propose.base import Proposer, ProposerSetup, check_budget
from outrider.propose.combine import Switch, noise_streams

_log = logging.getLogger("outrider")
_PATIENCE = 3  # failures, each soon after the one before, until it stays off
_OFF, _OFF_MOST = 64, 4096  # rounds that it stays off then; twice as many each time
_SOUND = 16  # rounds without a failure after which those before are forgiven


class IsolatedProposer:
    """Another proposer; a round for which it raises is decoded without guesses.

    Between two calls nobody can know what state it was left in, so before it is asked again every slot is released and
    admitted anew, with what the row's text is by then. What the target's pass showed of that text is gone: where a
    proposer reads layers, rows that were under way have no more guesses.
    """

    def __init__(self, inner: Proposer, setup: ProposerSetup, *, name: str) -> None:
        """Guard `inner`, which logs call `name`."""
        self.inner, self.needs, self.name = inner, inner.needs, name
        self.voices = noise_streams(inner)
        self.failures = 0  # in all
        self._device = setup.device
        self._requests: dict[int, Request] = {}  # by slot
        self._rows: dict[int, SequenceState] = {}  # by slot, of those that have been in a round
        self._held: set[int] = set()  # slots that the inner one has admitted
        self._lost: set[int] = set()  # slots whose rows have no more guesses
        self._broken = False  # it has raised, and was not made sound again
        self._streak = self._sound = 0  # failures with nothing sound in between; rounds since the last one
        self._off, self._pause = 0, _OFF  # rounds that it still stays off, and how long the next time

    @property
    def disabled(self) -> bool:
        """Whether it is not asked at present."""
        return self._off > 0

    def admit(self, slot: int, request: Request) -> None:
        self._requests[slot] = request
        if not self._broken:
            self._admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        self._rows |= {row.slot: row for row in batch.seqs}
        none = tree.empty(len(batch.seqs), self._device)
        self._off = max(self._off - 1, 0)
        if self.disabled or (self._broken and not self._mended()):
            return none
        if self._lost:
            pairs = zip(batch.seqs, batch.draft_budget, strict=True)
            batch = replace(batch, draft_budget=tuple(0 if row.slot in self._lost else most for row, most in pairs))
        found: list[Draft] = []

        def ask() -> None:
            draft = self.inner.propose(batch)
            check_budget(batch, draft)
            found.append(draft)

        self._try(ask)
        return found[0] if found else none

    def commit(self, round: Round) -> None:
        if self._broken:
            return
        if self._try(partial(self.inner.commit, round)):
            self._sound += 1
            if self._sound >= _SOUND:
                self._streak, self._pause = 0, _OFF

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._rows.pop(slot, None)
        self._lost.discard(slot)
        if not self._broken:
            self._held.discard(slot)
            self._try(partial(self.inner.release, slot))

    def _mended(self) -> bool:
        """Begin anew with every slot; false if that raises, too."""
        self._broken = False
        while self._held and not self._broken:
            self._try(partial(self.inner.release, self._held.pop()))
        for slot, request in self._requests.items():
            row = self._rows.get(slot)
            if row is not None and row.num_cached_tokens and self.needs.layers:
                self._lost.add(slot)
            if not self._broken:
                self._admit(slot, request if row is None else replace(request, prompt_token_ids=tuple(row.token_ids)))
        return not self._broken

    def _admit(self, slot: int, request: Request) -> None:
        self._held.add(slot)
        self._try(partial(self.inner.admit, slot, request))

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self._broken, self._sound = True, 0
        self._streak += 1
        if self.failures == 1:
            _log.error("proposer %s failed; its rows are decoded plainly for now", self.name, exc_info=error)
        if self._streak >= _PATIENCE:
            self._off, self._pause = self._pause, min(2 * self._pause, _OFF_MOST)
            _log.warning("proposer %s stays off for %d rounds after %d failures", self.name, self._off, self.failures)


def isolate(
    proposer: Proposer, setup: ProposerSetup, *, names: tuple[str, ...]
) -> tuple[Proposer, tuple[IsolatedProposer, ...]]:
    """The proposer in guards, one for each of its alternatives, whose `names` are given; and these guards."""
    parts = proposer.parts if isinstance(proposer, Switch) else (proposer,)
    guards = tuple(IsolatedProposer(part, setup, name=name) for part, name in zip(parts, names, strict=True))
    return (Switch(setup, guards) if isinstance(proposer, Switch) else guards[0]), guards
