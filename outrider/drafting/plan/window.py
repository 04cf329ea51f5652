"""A window: consecutive rounds under one decision of the planner, and their outcome."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from outrider.core.stats import Stats
from outrider.core.types import Batch, Draw, SequenceState
from outrider.drafting.plan.proposer_stats import Outcome
from outrider.drafting.plan.round_load import RoundLoad
from outrider.verify.rules import EXACT

FIXED_DRAFT_LENGTH = 4  # where a seed must reproduce the text, or a request names its proposer
_ROUNDS_SPECULATING = 4  # length of a window with draft tokens
_ROUNDS_PLAIN = 32  # length of a window of plain decoding
_ROUNDS_STILL_PLAIN = 64  # the same if the window before it was one
_ROUNDS_BETWEEN_DRAFTS = 16  # the same if a lookup drafts in its first round, to compare the draft with the text
_ROUNDS_AFTER_CHANGE = 8  # the same after sequences have come or gone


class Mode(StrEnum):
    """The state of the planner during a window."""

    PLAIN = "plain"  # plain decoding
    SPECULATE = "speculate"  # an alternative drafts for all sequences
    TRIAL = "trial"  # an alternative drafts for a few sequences
    PROBE = "probe"  # two rounds without draft tokens, of which the second one measures plain decoding


class _Progress(NamedTuple):
    """The rounds and draft tokens of a sequence before a window."""

    rounds: int
    draft_tokens: int


@dataclass(slots=True)
class PlanWindow:
    """Some similar rounds under one decision. A new decision in every round would cost more time than it saves."""

    load: RoundLoad
    alternative: int = -1  # -1: none drafts
    trial_seqs: int = 0  # sequences that draft in a trial; 0: all
    first_round: int = 0
    end_round: int = 0  # the round that needs a new decision
    is_probe: bool = False
    seqs: tuple[SequenceState, ...] = ()  # the batch of the decision
    has_fixed_alternatives: bool = False  # whether some requests name their proposer
    # Sums over the rounds of the window:
    rounds: int = 0
    drafting_seqs: int = 0  # sequences with a draft budget
    prefilling_seqs: int = 0  # of these, sequences without a draft because the draft model was prefilling
    draft_tokens: int = 0  # verified draft tokens
    depth: int = 0  # depth of the deepest draft of a draft model
    prefill_seconds: float = 0.0  # expected time of prefills of the draft model
    # If some requests name their proposer: the other sequences, and their progress before the
    # window.
    unassigned: dict[SequenceState, _Progress] = field(default_factory=dict)

    def next(self, load: RoundLoad, alternative: int, trial_seqs: int, *, has_lookup: bool, round: int) -> PlanWindow:
        """Open the next window after a decision in this round. `has_lookup`: whether an alternative is a lookup."""
        if not load.seqs:  # no sequence decodes, so there was nothing to decide
            length = 1
        elif alternative >= 0:
            length = _ROUNDS_SPECULATING
        elif has_lookup:
            length = _ROUNDS_BETWEEN_DRAFTS
        else:
            still_plain = self.mode is Mode.PLAIN and not self.load.at_start
            length = _ROUNDS_STILL_PLAIN if still_plain else _ROUNDS_PLAIN
        return PlanWindow(load, alternative, trial_seqs, first_round=round, end_round=round + length)

    @property
    def mode(self) -> Mode:
        """The state of the planner."""
        if self.is_probe:
            return Mode.PROBE
        if self.alternative < 0:
            return Mode.PLAIN
        return Mode.TRIAL if self.trial_seqs else Mode.SPECULATE

    def next_plain(self, load: RoundLoad) -> PlanWindow:
        """Return the next window of plain decoding, after sequences have come or gone."""
        rounds = self.first_round + self.rounds
        return PlanWindow(load, first_round=rounds, end_round=min(self.end_round, rounds + _ROUNDS_AFTER_CHANGE))

    def start_probe(self) -> None:
        """Turn the window into two rounds without draft tokens.

        The first one is not measured: draft and verification have put other data into the caches of
        the processor, so it takes longer than plain decoding does.
        """
        self.is_probe = True
        self.end_round = self.first_round + 2

    @property
    def warms_up(self) -> bool:
        """Whether the next round is the second one of a probe."""
        return self.is_probe and self.rounds == 1 and self.end_round - self.first_round == 2

    def measure_from(self, round: int) -> None:
        """Leave the rounds before this one out of the window."""
        self.first_round = round
        self.rounds = 0

    def assign_budgets(self, batch: Batch, budget: tuple[int, ...]) -> tuple[int, ...]:
        """Return budgets in which requests that name their proposer always draft. Track the others separately."""
        budgets = []
        for seq, planned, limit in zip(batch.seqs, budget, batch.draft_budget, strict=True):
            if seq.request.alternative is None:
                self.unassigned.setdefault(seq, _Progress(len(seq.rounds), seq.num_draft_tokens))
                self.drafting_seqs += bool(planned)
                budgets.append(planned)
            elif seq.request.params.k is not None:
                budgets.append(limit)
            else:
                budgets.append(min(FIXED_DRAFT_LENGTH, limit))
        return tuple(budgets)

    def can_skip_planning(self, batch: Batch, rounds: int) -> bool:
        """Return whether the next round is plain decoding of the same batch. It is the fast path of `plan`."""
        return (
            self.is_resting(rounds)
            and batch.seqs == self.seqs
            and len(batch.seqs) + batch.num_waiting == self.load.total_seqs
            and sum(map(len, batch.feed)) == len(batch.seqs)
            and not self.load.prompt_tokens
        )

    def is_resting(self, rounds: int) -> bool:
        """Return whether plain decoding continues, even if sequences come or go."""
        return self.alternative < 0 and not self.has_fixed_alternatives and self._is_valid(rounds)

    def continues(self, batch: Batch, load: RoundLoad, rounds: int) -> bool:
        """Return whether round number `rounds` belongs to this window."""
        if self.load.prompt_tokens or load.prompt_tokens:
            return False
        # A new text may be worth drafting, so plain decoding ends soon after it begins.
        if self.alternative < 0 and batch.seqs != self.seqs:
            return False
        return self.load.same_size(load) and self._is_valid(rounds)

    def _is_valid(self, rounds: int) -> bool:
        """Return whether the window goes on, and no rounds of another planner came between."""
        return rounds == self.first_round + self.rounds < self.end_round

    def outcome(self, before: Stats, after: Stats) -> Outcome:
        """Return the outcome of the drafting sequences of the window."""
        plain_tokens = self.load.seqs * self.rounds - self.drafting_seqs  # one for each sequence without a budget
        if self.unassigned:
            passes = [counts for seq, earlier in self.unassigned.items() for counts in seq.rounds[earlier.rounds :]]
            draft_tokens = sum(seq.num_draft_tokens - earlier.draft_tokens for seq, earlier in self.unassigned.items())
            unassigned = Stats.of_passes(passes, drafted=draft_tokens)
            plain_tokens = unassigned.passes - self.drafting_seqs
            after = replace(unassigned, draft_seconds=after.draft_seconds)
            before = Stats(draft_seconds=before.draft_seconds)
        return Outcome(
            rounds=self.rounds,
            seqs=self.drafting_seqs,
            output_tokens=after.output_tokens - before.output_tokens - plain_tokens,
            nodes=after.draft_tokens - before.draft_tokens,
            depth=self.depth,
            reached=_difference(after.reached, before.reached),
            accepted=_difference(after.accepted, before.accepted),
            draft_seconds=max(after.draft_seconds - before.draft_seconds - self.prefill_seconds, 0.0),
        )


def needs_fixed_length(seq: SequenceState, replay: bool) -> bool:
    """Return whether the text of a request must be reproducible by its seed and depends on the draft length."""
    params = seq.request.params
    if params.seed is None or not params.temperature:
        return False
    return replay if params.verifier is None else EXACT[params.verifier].draw is Draw.SAMPLE


def _difference(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip_longest(after, before, fillvalue=0))
