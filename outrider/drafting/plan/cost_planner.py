"""The planner behind `k="auto"`. It chooses the draft length that promises the most tokens per second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from outrider.core import tree
from outrider.core.planner import limit_budgets
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, DraftBudget
from outrider.drafting.plan.gains import Gains
from outrider.drafting.plan.pass_cost import Clock, CostModel
from outrider.drafting.plan.prefills import Prefills
from outrider.drafting.plan.pricing import DraftPricing, Thresholds
from outrider.drafting.plan.proposer_stats import ProposerStats
from outrider.drafting.plan.round_load import RoundLoad
from outrider.drafting.plan.trials import TRIAL_DRAFT_LENGTH, Trials
from outrider.drafting.plan.unverified import UnverifiedDrafts
from outrider.drafting.plan.window import FIXED_DRAFT_LENGTH, Mode, PlanWindow, needs_fixed_length

_PROBE_SHARE = 0.003  # share of the time for probes
_PROBE_WEIGHT = 8  # rounds that a probe counts as, since nothing else tells plain decoding from drafting
_MIN_PROBE_GAIN = 0.05  # the least gain that decides how often to probe


class _DraftLimits(NamedTuple):
    """What limits the drafts in a window of rounds."""

    draft_length: int = 0  # most draft tokens per sequence
    thresholds: Thresholds = Thresholds()


class CostPlanner:
    """Chooses the draft length that promises the most tokens per second.

    It uses measured costs of a round (`CostModel`), corrected by the times of real rounds, and the
    observed acceptance of each alternative of the proposer (`ProposerStats`).

    If a proposer estimates acceptance probabilities, its draft is trimmed where one more token
    would cost more time than it saves, over all sequences together. Any other proposer gets one k
    for all sequences, from the acceptance at each position.

    The planner is a state machine. Each decision opens a `PlanWindow`, whose `Mode` is the state:

    - SPECULATE: an alternative drafts for all sequences. Left when its gain falls below `Gains.required`.
    - PLAIN: plain decoding. Left when an alternative promises enough, or when a trial is due.
    - TRIAL: an alternative drafts for a few sequences, to learn its acceptance. `Trials` limits the time of trials
      that fail.
    - PROBE: two rounds without draft tokens while speculating. The second one measures what plain decoding costs.

    In the first round of a PLAIN window, a proposer without a draft model drafts for all sequences.
    The drafts are not verified, but compared with the text that follows (`UnverifiedDrafts`).
    """

    def __init__(
        self,
        *costs: CostModel,
        max_draft_tokens: int = 32,
        replay: bool = False,
        model_sources: int = -1,
        padded: bool = False,
    ) -> None:
        """Plan with the `costs` of each alternative of the proposer, up to `max_draft_tokens` per sequence.

        `model_sources` are the bits of `Draft.source` that stand for draft models. The other bits
        stand for lookups.

        With `replay`, the same seed must give the same text although the text depends on the draft.
        A batch that has a request with its own seed then always gets the same draft length. With
        `padded`, a pass of the target takes as long as if all sequences had the longest draft.
        """
        self._replay = replay
        self._model_sources = model_sources
        self.proposers = tuple(ProposerStats(each, max_draft_tokens=max_draft_tokens, padded=padded) for each in costs)
        self._has_lookup = any(each.draft is None for each in costs)
        self._clock = Clock(costs[0])  # the target is the same for all
        self._pricing = DraftPricing(self._clock, padded=padded)
        self._gains = Gains(self.proposers, self._clock)
        self._prefills = Prefills(self._clock)
        self._trials = Trials(self.proposers, self._clock, self._gains, self._prefills)
        self._window = PlanWindow(
            RoundLoad(seqs=0, total_seqs=0, prompt_tokens=0, cached=0, remaining_tokens=0, at_start=True)
        )
        self._limits = _DraftLimits()  # in the current window
        self._unverified_alternative = -1  # the one whose drafts of the next round are not verified; -1: none
        self._unverified: UnverifiedDrafts | None = None  # of the current window
        self._stats = Stats()  # at the end of the last window
        self._rounds_since_plain = inf
        self.spent_seconds = 0.0  # of the rounds that this planner has planned
        self.plain_seconds = 0.0  # what plain decoding would have taken for the same tokens

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        if self._window.can_skip_planning(batch, stats.rounds):
            self._window.rounds += 1
            return batch.limited((0,) * len(batch.seqs))
        if any(needs_fixed_length(seq, self._replay) for seq in batch.seqs):
            self._window = PlanWindow(RoundLoad.of(batch))
            return batch.limited(limit_budgets(FIXED_DRAFT_LENGTH, batch))
        load = RoundLoad.of(batch)
        fixed = any(seq.request.alternative is not None for seq in batch.seqs)
        if not self._window.continues(batch, load, stats.rounds) or fixed != self._window.has_fixed_alternatives:
            self._close_window(stats.total)
            self._open_window(batch, load, stats.rounds, fixed=fixed)
        window = self._window
        if window.warms_up:
            window.measure_from(stats.rounds)
            self._stats = stats.total
        window.rounds += 1
        if self._unverified_alternative >= 0:
            return self._unverified_batch(batch, load)
        budget = self._draft_budgets(batch)
        if window.rounds == 1 and window.alternative >= 0:
            proposer = self.proposers[window.alternative]
            window.prefill_seconds += self._prefills.begin(proposer, batch, budget)
        if fixed:
            budget = window.assign_budgets(batch, budget)
        else:
            window.drafting_seqs += sum(map(bool, budget))
        return _planned(batch, budget, self._limits.thresholds, max(window.alternative, 0))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        window = self._window
        if self._unverified_alternative >= 0:
            return self._keep_unverified(batch, draft)
        if not draft.size and not draft.num_prefilling:
            return draft
        window.depth += self._model_depth(draft)
        prefilling = 0 if window.has_fixed_alternatives else draft.num_prefilling
        window.drafting_seqs -= prefilling
        window.prefilling_seqs += prefilling
        if window.alternative >= 0 and any(draft.width):
            self.proposers[window.alternative].estimates_acceptance = draft.accept_prob is not None
        draft = self._cut(draft)
        window.draft_tokens += self._pricing.pass_tokens(draft.width)
        return draft

    def _cut(self, draft: Draft) -> Draft:
        """Cut draft tokens that cost more time than they save."""
        # A cut of sampled tokens would depend on tokens further down the path, which biases the output. Their draft was
        # already limited by `min_draft_probs` while it grew.
        if draft.accept_prob is None or draft.q is not None or not any(draft.width):
            return draft
        # The few sequences of a trial do not pay for a padded pass over all.
        if self._window.trial_seqs and not self.proposers[self._window.alternative].trims(self._window.load.seqs):
            return draft
        return tree.cut(draft, self._pricing.profitable_widths(draft.accept_prob, self._window.load))

    def _model_depth(self, draft: Draft) -> int:
        """Return how many passes of a draft model the deepest draft took: one for each of its draft tokens."""
        if draft.source is None:
            return max(draft.depth)
        return max(map(self._model_passes, draft.depth, draft.source))

    def _model_passes(self, depth: int, sources: Sequence[int]) -> int:
        """Return the passes of a draft model for a draft whose nodes have these `sources`."""
        return min(depth, sum(bool(bits & self._model_sources) for bits in sources))

    def expected_seconds(self, seqs: int, k: float, *, cached: float) -> float:
        """Return the expected time of a round with k draft tokens per sequence, without drafting."""
        return self._clock.verify(seqs, k, cached=cached)

    def state(self) -> dict[str, Any]:
        """Return what the planner has learned of the proposers, as JSON values.

        The state leaves out what belongs to a machine or to the texts of a process: pass costs, their corrections by
        the times of real rounds (`Clock`), the current window and the budget for trials. So a restored planner may
        plan other drafts than the original one: it learns the corrections again, and has the free trials of a new
        engine.
        """
        return {"proposers": [proposer.state() for proposer in self.proposers]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`. Raises KeyError, TypeError or ValueError for other values."""
        for proposer, learned in zip(self.proposers, state["proposers"], strict=True):
            proposer.restore(learned)

    # Windows: close one and learn from it, decide, open the next one.

    def _close_window(self, stats: Stats) -> None:
        self._learn(stats)
        if self._unverified and (outcome := self._unverified.outcome()):
            self.proposers[self._unverified.alternative].learn(outcome, self._window.load.cached)
        self._unverified = None
        for i, proposer in enumerate(self.proposers):
            proposer.count_rounds(self._window.rounds, used=i == self._window.alternative)

    def _open_window(self, batch: Batch, load: RoundLoad, rounds: int, *, fixed: bool) -> None:
        if not fixed and self._window.is_resting(rounds):
            self._window = self._window.next_plain(load)
        else:
            self._decide(batch, load)
        self._window.has_fixed_alternatives = fixed
        self._window.seqs = batch.seqs
        self._unverified_alternative = -1 if fixed else self._next_unverified(load)

    def _decide(self, batch: Batch, load: RoundLoad) -> None:
        """Choose the alternative of the next window, and the limits of its drafts."""
        self._prefills.see(batch.seqs)
        known = self._prefills.prefilled | self._prefills.excluded
        previous = self._window
        alternative = self._choose_alternative(batch, load) if load.seqs else -1
        same = alternative == previous.alternative
        if not same:
            self._trials.budget.switch_alternative()
        ids = frozenset(seq.request.id for seq in batch.seqs)
        self._prefills.keep(ids if same else frozenset())
        trial_seqs = 0
        self._limits = _DraftLimits()
        if alternative >= 0:
            proposer = self.proposers[alternative]
            if not proposer.trial_passes_left and self._trials.must_repeat(alternative, load, previous, known):
                proposer.start_trial(new_texts=True)
            self._trials.draft_allowed(ids)
            in_trial = proposer.trial_passes_left > 0
            trial_seqs = proposer.trial_seqs if in_trial else 0
            self._limits = _DraftLimits(
                draft_length=self._draft_length(alternative, load),
                thresholds=self._pricing.thresholds(proposer, load, in_trial=in_trial),
            )
        self._window = previous.next(
            load, alternative, trial_seqs, has_lookup=self._has_lookup, round=self._stats.rounds
        )
        if self._window.mode is Mode.SPECULATE and not load.prompt_tokens:
            # The more speculation gains, the more a probe costs and the less depends on it.
            gain = max(self._gains.expected(alternative, load) - 1, _MIN_PROBE_GAIN)
            if self._rounds_since_plain * _PROBE_SHARE > gain:
                self._window.start_probe()

    def _draft_budgets(self, batch: Batch) -> tuple[int, ...]:
        """Return the draft budget of each sequence in the current window."""
        k = 0 if self._window.mode is Mode.PROBE else self._limits.draft_length
        budget = self._prefills.limit(batch, limit_budgets(k, batch))
        seqs = self._window.trial_seqs
        return self._trials.limit(batch, budget, seqs) if seqs else budget

    # Unverified drafts during plain decoding.

    def _next_unverified(self, load: RoundLoad) -> int:
        """Return the alternative whose drafts of the next round are compared with the text; -1: none."""
        if self._window.mode is not Mode.PLAIN or not load.seqs or load.prompt_tokens:
            return -1
        lookups = [i for i, proposer in enumerate(self.proposers) if proposer.costs.draft is None]
        return min(lookups, key=lambda i: self.proposers[i].unverified_rounds, default=-1)

    def _unverified_batch(self, batch: Batch, load: RoundLoad) -> Batch:
        """Return the batch of a round whose drafts are not verified."""
        proposer = self.proposers[self._unverified_alternative]
        proposer.unverified_rounds += 1
        k = proposer.max_draft_tokens if proposer.estimates_acceptance else TRIAL_DRAFT_LENGTH
        thresholds = self._pricing.thresholds(proposer, load, in_trial=False)
        return _planned(batch, limit_budgets(k, batch), thresholds, self._unverified_alternative)

    def _keep_unverified(self, batch: Batch, draft: Draft) -> Draft:
        """Keep drafts for a comparison with the text. Return empty ones, which the target verifies."""
        if draft.q is None and any(draft.width):
            self._unverified = UnverifiedDrafts(self._unverified_alternative, batch, self._cut(draft))
        self._unverified_alternative = -1
        return tree.empty(len(batch.seqs), draft.tokens.device)

    # The choice of an alternative.

    def _choose_alternative(self, batch: Batch, load: RoundLoad) -> int:
        """Return the alternative with the highest gain, or one whose trial is due; -1: none pays."""
        # After a trial the draft model has not prefilled the other sequences, so speculation starts
        # anew.
        after_trial = 0 < self._window.trial_seqs < load.seqs
        current = -1 if after_trial else self._window.alternative
        gains = [self._gains.expected(alternative, load) for alternative in range(len(self.proposers))]
        best = max(range(len(gains)), key=gains.__getitem__)
        trial = self._trials.next(load, self._window, gains[current] if current >= 0 else 1.0)
        self._prefills.excluded = frozenset()
        if trial is not None:
            chosen = trial
        elif self._pays(best, gains[best], batch, load, in_use=best == current):
            chosen = best
            if after_trial and best == self._window.alternative:
                self.proposers[best].widen_trial(load.seqs)
        else:
            chosen = -1
        self._pricing.set_speed(load, self._gains.steady(chosen, load) if chosen >= 0 else 1.0)
        return chosen

    def _pays(self, alternative: int, gain: float, batch: Batch, load: RoundLoad, *, in_use: bool) -> bool:
        """Return whether to speculate, and exclude requests that are not worth a prefill of the draft model."""
        new_texts = self._trials.has_new_texts
        # The beginning of a text tells little about the rest of it.
        holds = in_use and load.at_start and not new_texts
        counts_as_in_use = in_use and not (load.at_start and new_texts)
        if not holds and gain < self._gains.required(alternative, in_use=counts_as_in_use):
            return False
        return self._prefills.exclude(
            self.proposers[alternative],
            gain,
            batch,
            load,
            prefilled=self._prefills.prefilled if alternative == self._window.alternative else frozenset(),
            margin=1 if in_use else 2,  # the gain counts half before many sequences have drafted
        )

    def _draft_length(self, alternative: int, load: RoundLoad) -> int:
        """Return the most draft tokens per sequence."""
        proposer = self.proposers[alternative]
        if proposer.trims(load.seqs):
            if proposer.has_estimate:
                return self._gains.best_length(alternative, load)
            return min(proposer.max_draft_tokens, 2 * TRIAL_DRAFT_LENGTH)
        if proposer.trial_passes_left:
            return min(max(self._gains.best_length(alternative, load), 2), TRIAL_DRAFT_LENGTH)
        k = self._gains.lasting_length(alternative, load)
        return self._pricing.length_with_prompts(proposer, load, k) if load.prompt_tokens else k

    # Learning.

    def _learn(self, stats: Stats) -> None:
        """Learn pass times and acceptance from the rounds of the window."""
        before = self._stats
        self._stats = stats
        window = self._window
        load = window.load
        if not window.rounds or stats.rounds != before.rounds + window.rounds:
            return  # the engine is new, or another planner has planned rounds in between
        target_seconds = stats.target_seconds - before.target_seconds
        host_seconds = stats.host_seconds - before.host_seconds
        seconds = target_seconds + host_seconds
        self._clock.learn(
            load.seqs + load.prompt_tokens + window.draft_tokens / window.rounds,
            max(load.seqs, 1),
            load.cached,
            seconds / window.rounds,
            drafted=bool(window.draft_tokens),
            experts=(stats.experts - before.experts) / window.rounds,
            rounds=_PROBE_WEIGHT if window.is_probe else window.rounds,
        )
        self._rounds_since_plain = self._rounds_since_plain + window.rounds if window.draft_tokens else 0
        draft_seconds = stats.draft_seconds - before.draft_seconds
        self._account_time(window, seconds, draft_seconds, stats.output_tokens - before.output_tokens)
        self._gains.forget()
        if window.drafting_seqs and load.seqs:
            outcome = window.outcome(before, stats)
            self.proposers[window.alternative].learn(outcome, load.cached, at_start=load.at_start)

    def _account_time(self, window: PlanWindow, seconds: float, draft_seconds: float, output_tokens: int) -> None:
        """Compare the time of a window with what plain decoding would have taken for its tokens."""
        load = window.load
        spent = seconds + draft_seconds
        saved = 0.0
        if window.alternative >= 0 and not window.has_fixed_alternatives:
            saved = self._saved_seconds(window, draft_seconds, output_tokens)
            self._trials.budget.add_savings(saved)
            plain = self._plain_seconds(load, output_tokens)
            # Prompts take the same time with and without drafts, and their estimate is too rough to compare with.
            decoding = plain - saved if load.prompt_tokens else spent
            proposer = self.proposers[window.alternative]
            proposer.add_time(spent=decoding, plain=plain, saved=saved, passes=window.drafting_seqs)
        self._trials.budget.add_time(spent, has_saved=self._trials.has_saved_time)
        self.spent_seconds += spent
        has_prompts = load.prompt_tokens or not load.seqs
        self.plain_seconds += spent + saved if has_prompts else self._plain_seconds(load, output_tokens)

    def _plain_seconds(self, load: RoundLoad, output_tokens: int) -> float:
        """Return the time of plain decoding for so many tokens of all sequences."""
        return self._clock.at(load.seqs, seqs=load.seqs, cached=load.cached) * output_tokens / load.seqs

    def _saved_seconds(self, window: PlanWindow, draft_seconds: float, output_tokens: int) -> float:
        """Return the time that the drafts of a window have saved. It is negative if they cost more than they saved.

        Pass times are expected ones. Measured ones vary by more than a few draft tokens cost.
        """
        load = window.load
        seqs, cached = load.seqs, load.cached
        k = window.draft_tokens / window.rounds / seqs
        with_drafts = self._clock.verify(seqs, k, cached=cached, feed=load.prompt_tokens)
        without = self._clock.at(seqs + load.prompt_tokens, seqs=seqs, cached=cached)
        extra_tokens = output_tokens - seqs * window.rounds
        plain = self._plain_seconds(load, extra_tokens)
        return plain - (with_drafts - without) * window.rounds - draft_seconds


def _planned(batch: Batch, tokens: tuple[int, ...], thresholds: Thresholds, alternative: int) -> Batch:
    """Return the batch with what the planner has decided."""
    return batch.with_budget(
        DraftBudget(
            tokens,
            batch.budget.with_forced,
            thresholds.min_path_prob,
            thresholds.min_draft_probs,
            alternative=alternative,
        )
    )
