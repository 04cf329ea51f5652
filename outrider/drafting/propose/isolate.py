"""Contain exceptions of a proposer, so that they cost draft tokens and nothing else."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from outrider.core import tree
from outrider.core.proposer import Proposer, ProposerSetup, check_budget
from outrider.core.types import Batch, Draft, Request, Round, SequenceState
from outrider.drafting.propose.combine import Switch, num_sources

_log = logging.getLogger("outrider")
_MAX_STREAK = 3  # failures in quick succession after which the proposer is switched off
_FIRST_PAUSE = 64  # rounds of the first pause; each further one is twice as long
_MAX_PAUSE = 4096
_RECOVERY_ROUNDS = 16  # rounds without a failure that end a streak


class IsolatedProposer:
    """A guard around another proposer. A round in which the proposer raises is decoded without a draft.

    After an exception the state of the proposer is unknown. So before its next use, all slots are released and admitted
    again, with the tokens that each sequence has by then. Hidden states of these tokens are lost. If the proposer needs
    them, sequences that were running get no more draft tokens.
    """

    def __init__(self, inner: Proposer, setup: ProposerSetup, *, name: str) -> None:
        """Guard `inner`. Log messages call it `name`."""
        self.inner = inner
        self.needs = inner.needs
        self.name = name
        self.num_sources = num_sources(inner)
        self.failures = 0
        self._device = setup.device
        self._requests: dict[int, Request] = {}  # by slot
        self._seqs: dict[int, SequenceState] = {}  # by slot; only sequences that have been in a round
        self._admitted: set[int] = set()  # slots that the inner proposer has admitted
        self._excluded: set[int] = set()  # slots whose hidden states are lost
        self._broken = False  # whether the proposer has raised and was not reset since
        self._streak = 0  # failures in quick succession
        self._good_rounds = 0  # since the last failure
        self._rounds_off = 0  # rounds that the current pause still takes
        self._next_pause = _FIRST_PAUSE

    @property
    def disabled(self) -> bool:
        """Whether the proposer is switched off at present."""
        return self._rounds_off > 0

    def admit(self, slot: int, request: Request) -> None:
        self._requests[slot] = request
        if not self._broken:
            self._admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        self._seqs |= {seq.slot: seq for seq in batch.seqs}
        none = tree.empty(len(batch.seqs), self._device)
        self._rounds_off = max(self._rounds_off - 1, 0)
        if self.disabled or (self._broken and not self._reset()):
            return none
        if self._excluded:
            pairs = zip(batch.seqs, batch.draft_budget, strict=True)
            budget = tuple(0 if seq.slot in self._excluded else count for seq, count in pairs)
            batch = batch.limited(budget)
        drafts: list[Draft] = []

        def propose() -> None:
            draft = self.inner.propose(batch)
            check_budget(batch, draft)
            drafts.append(draft)

        self._try(propose)
        return drafts[0] if drafts else none

    def commit(self, round: Round) -> None:
        if self._broken:
            return
        if self._try(partial(self.inner.commit, round)):
            self._good_rounds += 1
            if self._good_rounds >= _RECOVERY_ROUNDS:
                self._streak = 0
                self._next_pause = _FIRST_PAUSE

    def release(self, slot: int) -> None:
        self._requests.pop(slot, None)
        self._seqs.pop(slot, None)
        self._excluded.discard(slot)
        if not self._broken:
            self._admitted.discard(slot)
            self._try(partial(self.inner.release, slot))

    def _reset(self) -> bool:
        """Release all slots and admit them again. Return False if that raises, too."""
        self._broken = False
        while self._admitted and not self._broken:
            self._try(partial(self.inner.release, self._admitted.pop()))
        for slot, request in self._requests.items():
            seq = self._seqs.get(slot)
            if seq is not None and seq.num_cached_tokens and self.needs.layers:
                self._excluded.add(slot)
            if not self._broken:
                self._admit(slot, request if seq is None else replace(request, prompt_token_ids=tuple(seq.token_ids)))
        return not self._broken

    def _admit(self, slot: int, request: Request) -> None:
        self._admitted.add(slot)
        self._try(partial(self.inner.admit, slot, request))

    def _try(self, call: Callable[[], None]) -> bool:
        """Call the proposer. Return whether it succeeded."""
        try:
            call()
        except Exception as error:
            self._count_failure(error)
            return False
        return True

    def _count_failure(self, error: Exception) -> None:
        self.failures += 1
        self._broken = True
        self._good_rounds = 0
        self._streak += 1
        if self.failures == 1:
            _log.error("proposer %s failed; its sequences use plain decoding for now", self.name, exc_info=error)
        if self._streak >= _MAX_STREAK:
            self._rounds_off = self._next_pause
            self._next_pause = min(2 * self._next_pause, _MAX_PAUSE)
            _log.warning(
                "proposer %s is switched off for %d rounds after %d failures",
                self.name,
                self._rounds_off,
                self.failures,
            )


def isolate(
    proposer: Proposer, setup: ProposerSetup, *, names: tuple[str, ...]
) -> tuple[Proposer, tuple[IsolatedProposer, ...]]:
    """Guard each alternative of a proposer, with the `names` of the alternatives.

    Returns:
        The guarded proposer, and the guard of each alternative.
    """
    parts = proposer.parts if isinstance(proposer, Switch) else (proposer,)
    guards = tuple(IsolatedProposer(part, setup, name=name) for part, name in zip(parts, names, strict=True))
    return (Switch(setup, guards) if isinstance(proposer, Switch) else guards[0]), guards
