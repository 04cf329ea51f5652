"""Trials: an alternative that is not in use drafts for a few sequences, to learn its acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from outrider.core.types import Batch
from outrider.drafting.plan.gains import START_GAIN, Gains
from outrider.drafting.plan.pass_cost import Clock
from outrider.drafting.plan.prefills import Prefills
from outrider.drafting.plan.proposer_stats import ROUNDS_BEFORE_TRIAL, TRIAL_PASSES, TRIAL_SEQS, ProposerStats
from outrider.drafting.plan.round_load import RoundLoad
from outrider.drafting.plan.window import PlanWindow

TRIAL_DRAFT_LENGTH = 4  # draft tokens in a trial of a proposer without acceptance probabilities


class Trials:
    """Decides which alternative has a trial, and when, within a budget of time."""

    def __init__(self, proposers: Sequence[ProposerStats], clock: Clock, gains: Gains, prefills: Prefills) -> None:
        self._proposers = proposers
        self._clock = clock
        self._gains = gains
        self._prefills = prefills
        self._drafted: frozenset[int] = frozenset()  # all requests when draft tokens were last allowed
        self._in_trial: set[int] = set()  # requests of the last trial
        self.budget = TrialBudget()

    @property
    def has_new_texts(self) -> bool:
        """Whether most sequences have come since draft tokens were last allowed."""
        return self._mostly_new(self._drafted)

    @property
    def has_saved_time(self) -> bool:
        """Whether any alternative has saved time so far, over whole texts."""
        return any(proposer.saved_seconds > 0 and (proposer.text_gain or inf) > 1 for proposer in self._proposers)

    def draft_allowed(self, ids: frozenset[int]) -> None:
        """Note that requests may draft."""
        self._drafted = ids

    def next(self, load: RoundLoad, window: PlanWindow, gain: float) -> int | None:
        """Return the alternative whose trial goes on or starts now, or None.

        Args:
            load: of the next round.
            window: the one that has ended.
            gain: the speedup without the trial.
        """
        for alternative, proposer in enumerate(self._proposers):
            # A window in which the draft model only prefills tells nothing about acceptance.
            only_prefilled = window.prefilling_seqs and not window.drafting_seqs
            if alternative != window.alternative or not only_prefilled:
                passes = max(window.rounds, 1) * min(proposer.trial_seqs, load.seqs)
                proposer.count_trial_passes(passes, load, self._clock)
        running = [alternative for alternative, proposer in enumerate(self._proposers) if proposer.trial_passes_left]
        due = running or [each for each in range(len(self._proposers)) if self._is_due(each, load, gain)]
        if not due:
            return None
        chosen = max(due, key=lambda alternative: self._proposers[alternative].idle_rounds)
        if not running:
            self._proposers[chosen].start_trial(new_texts=self.has_new_texts)
            self.budget.count_trial()
        return chosen

    def must_repeat(self, alternative: int, load: RoundLoad, window: PlanWindow, known: frozenset[int]) -> bool:
        """Return whether the draft model in use needs a new trial, because most requests are new to it.

        Their texts may differ in kind. No trial is needed if the speedup over whole texts, which
        includes prefills, is high enough. `known` are the requests that have been prefilled, or
        were not worth it.
        """
        proposer = self._proposers[alternative]
        if (proposer.text_gain or 0.0) >= START_GAIN:
            return False
        uses_model = proposer.costs.draft is not None and load.seqs > TRIAL_SEQS
        in_use = alternative == window.alternative and not window.trial_seqs
        return uses_model and in_use and self._mostly_new(known)

    def limit(self, batch: Batch, budget: tuple[int, ...], seqs: int) -> tuple[int, ...]:
        """Keep the budget of the `seqs` sequences of a trial. It prefers those that the draft model has prefilled."""
        candidates = [b for b in range(len(budget)) if budget[b]]
        candidates.sort(key=lambda b: (batch.seqs[b].request.id not in self._in_trial, batch.start[b]))
        chosen = set(candidates[:seqs])
        self._in_trial = {batch.seqs[b].request.id for b in chosen}
        return tuple(count if b in chosen else 0 for b, count in enumerate(budget))

    def _mostly_new(self, known: frozenset[int]) -> bool:
        seqs = self._prefills.seqs
        return sum(seq.request.id not in known for seq in seqs) > len(seqs) / 2

    def _is_due(self, alternative: int, load: RoundLoad, gain: float) -> bool:
        """Return whether an alternative may pay, and the trial fits into the budget even if it fails."""
        proposer = self._proposers[alternative]
        new_texts = self.has_new_texts
        if proposer.idle_rounds < ROUNDS_BEFORE_TRIAL and not (self._drafted and new_texts):
            return False
        if load.at_start and proposer.text_gain is not None:  # it has decided already
            return False
        optimistic_gain = proposer.optimistic_gain(load.total_seqs, load.cached, self._clock)
        if optimistic_gain < self._gains.required(alternative, in_use=False):
            return False
        trial_load = replace(load, seqs=min(load.seqs, TRIAL_SEQS))
        if not self._prefills.repays(proposer, optimistic_gain, trial_load):
            return False
        plain = self._clock.at(load.seqs, seqs=load.seqs, cached=load.cached)
        cost = self._failure_seconds(proposer, load, plain, gain)
        return self.budget.allows(cost, plain=plain, new_texts=new_texts, has_saved=self.has_saved_time)

    def _failure_seconds(self, proposer: ProposerStats, load: RoundLoad, plain: float, gain: float) -> float:
        """Return the time that a failed trial costs, where a plain round takes `plain` and the speedup is `gain`."""
        seqs = min(load.seqs, TRIAL_SEQS)
        verify = self._clock.verify(load.seqs, seqs * TRIAL_DRAFT_LENGTH / load.seqs, cached=load.cached)
        length = load.cached + load.prompt_tokens / load.total_seqs  # mean tokens per sequence
        # The draft model has prefilled what came before its last trial, unless the requests are
        # new.
        unfed = length if self.has_new_texts else min(length, proposer.idle_rounds)
        draft = TRIAL_DRAFT_LENGTH * seqs * proposer.draft_seconds(seqs, load.cached)
        lost = plain * max(gain - 1, 0.0)
        return proposer.prefill_seconds(seqs, unfed) + TRIAL_PASSES / seqs * (verify - plain + draft + lost)


_SHARE_SAVED = 0.01  # share of the time for trials, once speculation has saved time
_SHARE_NEVER_SAVED = 0.004  # the same before that
_MAX_ROUNDS_BEFORE_TRIAL = 512  # longest time without a trial
_FREE_TRIALS = 3  # trials of a new engine that need no budget


class TrialBudget:
    """The seconds that the next trial may cost."""

    def __init__(self) -> None:
        self._seconds = inf
        self._savings = 0.0  # seconds that the alternative in use has saved since it was chosen
        self._trials = 0

    def count_trial(self) -> None:
        """Count a trial that starts."""
        self._trials += 1

    def switch_alternative(self) -> None:
        """Start anew for another alternative, or none. Losses of the previous one are charged."""
        self._seconds += min(self._savings, 0.0)
        self._savings = 0.0

    def add_savings(self, seconds: float) -> None:
        """Add the time that the alternative in use has saved, or lost."""
        self._savings += seconds

    def add_time(self, seconds: float, *, has_saved: bool) -> None:
        """Grow the budget by a share of the time. `has_saved`: whether speculation has saved time before."""
        self._seconds += self._share(has_saved) * seconds

    def allows(self, cost: float, *, plain: float, new_texts: bool, has_saved: bool) -> bool:
        """Return whether a trial of `cost` seconds may start.

        A further trial on the same requests (not `new_texts`) needs twice the budget. A new engine
        has some free trials, because the beginning of a text is often hard to draft. The budget
        never exceeds two trials, and a trial waits for at most `_MAX_ROUNDS_BEFORE_TRIAL` rounds of
        `plain` seconds.
        """
        is_free = self._trials < _FREE_TRIALS
        maximum = (_FREE_TRIALS if is_free else 2) * cost
        minimum = cost - self._share(has_saved) * _MAX_ROUNDS_BEFORE_TRIAL * plain
        self._seconds = min(max(self._seconds, minimum), maximum)
        needed = cost if is_free or new_texts else 2 * cost
        return self._seconds + min(self._savings, 0.0) >= needed

    @staticmethod
    def _share(has_saved: bool) -> float:
        return _SHARE_SAVED if has_saved else _SHARE_NEVER_SAVED
