"""Statistics of one proposer for the planner: its acceptance, and the cost of its rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from outrider.drafting.plan.draft_cost import DraftCost
from outrider.drafting.plan.pass_cost import Clock, CostModel
from outrider.drafting.plan.round_load import RoundLoad

# Prior acceptance, and its weight in draft tokens. Position 0 is measured soon, so its prior weighs
# less.
_FIRST_PRIOR = 0.6
_FIRST_PRIOR_WEIGHT = 1.0
_PRIOR = 0.8
_PRIOR_WEIGHT = 4.0
_MIN_PATH_PROB = 0.01  # draft tokens below this acceptance probability are never worth it
_MAX_POSITIONS = 16  # longest draft of a proposer without acceptance probabilities
_TOKEN_DECAY = 0.98  # of acceptance counts, per draft token
_PASS_DECAY = 0.97  # of means, per pass
_SINGLE_GAIN = 1.03  # factor by which single draft tokens must be faster than longer drafts
_MIN_PASSES = 3.0  # passes from which a mean is used
_MIN_NODES = 0.5  # draft tokens per pass, of a padded batch, below which the acceptance by position says little
_NEW_BELOW = 39.0  # decayed draft tokens at position 0, which is about 75 draft tokens
_NEW_PASSES = 32  # passes after which a proposer is not new, even if few draft tokens were worth verifying
_START_WEIGHT = 0.25  # weight of a pass at the beginning of a text
_TEXT_DECAY = 0.995  # of the sums over whole texts, per pass
_TEXT_PASSES = 50.0  # passes from which these sums are used
ROUNDS_BEFORE_TRIAL = 32  # rounds without use before a trial
TRIAL_SEQS = 2
TRIAL_PASSES = 8
_HOPELESS = 0.8  # speedup in a trial below which it ends early
_CARRIED_PASSES = 8.0  # weight of earlier means when a trial starts
_CARRIED_PASSES_NEW_TEXTS = 2.0  # the same if most texts are new
_WIDEN_BY = 4  # factor of the sequences when a trial is widened
_WIDE_TRIAL_ROUNDS = 4
_STATE_FIELDS = ("estimates_acceptance", "idle_rounds", "_tried", "_reached", "_accepted")
_MAX_STATE_VALUE = 1e15  # larger values in a plan file are damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of a proposer in some rounds, as sums over them."""

    rounds: int
    seqs: int  # sequences with a draft budget
    output_tokens: int
    nodes: int  # verified draft tokens
    reached: tuple[int, ...]  # as in `Stats`
    accepted: tuple[int, ...]
    depth: int  # depth of the deepest draft of a draft model in each round
    draft_seconds: float | None  # without prefills of the draft model; None: not measured


class ProposerStats:
    """Acceptance, tokens and drafting time of recent rounds of one alternative."""

    def __init__(self, costs: CostModel, *, max_draft_tokens: int, padded: bool = False) -> None:
        """Track a proposer with these pass costs and up to `max_draft_tokens` per sequence.

        `padded`: whether all sequences of a pass take the time of the longest draft.
        """
        self.costs = costs
        self._padded = padded
        self.max_draft_tokens = max_draft_tokens
        self.estimates_acceptance = False  # whether its last draft had acceptance probabilities
        self.idle_rounds = ROUNDS_BEFORE_TRIAL  # the first trial is due at once
        self.trial_passes_left = 0  # 0: no trial
        self.trial_seqs = TRIAL_SEQS
        self.saved_seconds = 0.0  # sum over all its rounds
        # Decayed sums over its rounds.
        self._passes = 0.0
        self._spent_seconds = 0.0
        self._plain_seconds = 0.0  # that plain decoding would have taken for the same tokens
        self.unverified_rounds = 0  # rounds whose drafts were compared with the text, but not verified
        self._tried = 0  # passes that may have had draft tokens
        # Decayed counts by position, as in `Stats`.
        later_positions = min(max_draft_tokens, _MAX_POSITIONS) - 1
        self._reached = [_FIRST_PRIOR_WEIGHT, *[_PRIOR_WEIGHT] * later_positions]
        self._accepted = [_FIRST_PRIOR_WEIGHT * _FIRST_PRIOR, *[_PRIOR_WEIGHT * _PRIOR] * later_positions]
        self._means = _Means()
        self._recent = _Means()  # since the last trial began
        self._draft_cost = DraftCost()  # in `_draft_unit`s

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance by position, of draft tokens whose ancestors were accepted."""
        return tuple(accepted / reached for accepted, reached in zip(self._accepted, self._reached, strict=True))

    @property
    def nodes(self) -> float:
        """Recent mean of verified draft tokens per pass."""
        return self._means.nodes

    @property
    def has_estimate(self) -> bool:
        """Whether the means cover enough passes."""
        return self._means.seen >= _MIN_PASSES

    @property
    def is_new(self) -> bool:
        """Whether it has drafted in few passes, and few draft tokens have been verified."""
        return self._reached[0] < _NEW_BELOW and self._tried < _NEW_PASSES

    def trims(self, seqs: int) -> bool:
        """Return whether each sequence gets a draft length of its own, from acceptance probabilities.

        In a padded pass over several sequences, it saves no time if a draft model stops early in one of them.
        """
        in_step = self._padded and seqs > 1 and self.costs.draft is not None
        return self.estimates_acceptance and not in_step

    @property
    def text_gain(self) -> float | None:
        """The speedup over whole texts, with prefills of the draft model. None: too few passes."""
        return self._plain_seconds / self._spent_seconds if self._passes >= _TEXT_PASSES else None

    def count_rounds(self, rounds: int, *, used: bool) -> None:
        """Count rounds in which this alternative was the one that drafts, or was idle."""
        self.idle_rounds = 0 if used else self.idle_rounds + rounds

    def add_time(self, *, spent: float, plain: float, saved: float, passes: int) -> None:
        """Count the seconds of rounds, and the seconds that plain decoding would have taken for their tokens.

        `saved` is the difference as the costs expect it, which varies less than the measured one.
        """
        self.saved_seconds += saved
        decay = _TEXT_DECAY**passes
        self._passes = self._passes * decay + passes
        self._spent_seconds = self._spent_seconds * decay + spent
        self._plain_seconds = self._plain_seconds * decay + plain

    def best_length(self, seqs: int, cached: float, clock: Clock) -> tuple[int, float]:
        """Return the best limit of the draft length, and the expected speedup over plain decoding.

        A proposer that estimates acceptance trims its drafts. Its limit is `max_draft_tokens`, and its speedup is the
        measured one: the lower one of the long-term mean and the mean since the last trial, so that neither a lucky
        trial nor an easy earlier text is enough. The acceptance by position gives the limit instead

        - if the proposer estimates nothing, or has drafted in few passes,
        - in a padded pass over several sequences, where all get the same limit,
        - for a new proposer, if it promises more: estimates that are not trained yet may be too high,
        - for a draft model, if single tokens promise more: where its tokens are expensive or its estimates tell
          little, as at temperature 1, longer drafts can lose. The acceptance of first tokens does not depend on where
          drafts stop.

        `clock` knows the pass times of the target.
        """
        if not (self.estimates_acceptance and self.has_estimate):
            return self._best_fixed_length(seqs, cached, clock)
        means = [means for means in (self._means, self._recent) if means.seen >= _MIN_PASSES]
        measured = min(self._gain_of(each, seqs, cached, clock) for each in means)
        if not self.trims(seqs):
            length, gain = self._best_fixed_length(seqs, cached, clock)
            return length, gain if self.nodes >= _MIN_NODES else min(gain, measured)
        trimmed = self.max_draft_tokens, measured
        if self.is_new:
            fixed = self._best_fixed_length(seqs, cached, clock)
            return fixed if fixed[0] and fixed[1] > trimmed[1] else trimmed
        if self.costs.draft is None:
            return trimmed
        single = self._best_fixed_length(seqs, cached, clock, longest=1)
        return single if single[0] and single[1] > _SINGLE_GAIN * trimmed[1] else trimmed

    def _best_fixed_length(
        self, seqs: int, cached: float, clock: Clock, *, longest: int = _MAX_POSITIONS
    ) -> tuple[int, float]:
        """Return the best draft length for all sequences, from the acceptance by position, and its speedup."""
        plain = clock.verify(seqs, 0, cached=cached)
        unit = self._draft_unit(seqs, cached)
        if self.costs.draft is None:  # a lookup takes the same time for any draft length
            fixed, per_token = self._means.drafted * unit, 0.0
        else:
            fixed, per_token = self._draft_cost.per_round * unit, self._draft_cost.per_token * unit
        best = (0, 1.0)
        tau = path_prob = 1.0
        for k, rate in enumerate(self.acceptance[:longest], 1):
            path_prob *= rate
            if path_prob < _MIN_PATH_PROB:
                break
            tau += path_prob
            verify = clock.verify(seqs, k, cached=cached)
            gain = tau * plain / (verify + fixed + k * per_token)
            if gain > best[1]:
                best = k, gain
        return best

    def optimistic_gain(self, seqs: int, cached: float, clock: Clock) -> float:
        """Return the speedup if the first draft tokens were always accepted. Below 1, a trial cannot succeed."""
        plain = clock.verify(seqs, 0, cached=cached)
        step = self._pass_seconds(seqs, cached)
        fixed = self._draft_cost.per_round * step
        return max((1 + k) * plain / (clock.verify(seqs, k, cached=cached) + fixed + k * step) for k in (1, 2, 4))

    def draft_seconds(self, seqs: int, cached: float) -> float:
        """Return the drafting time of one more draft token, per sequence."""
        return self._draft_cost.per_token * self._pass_seconds(seqs, cached) / seqs

    def prefill_seconds(self, seqs: int, cached: float) -> float:
        """Return the time in which a draft model prefills `seqs` sequences of `cached` tokens."""
        if self.costs.draft is None or self.costs.draft.shares_cache:
            return 0.0
        window = self.costs.draft.window
        read = cached if window is None else min(cached, window)
        feed = seqs * max(read - 1, 0.0)
        return self.costs.draft(seqs, seqs=seqs, cached=read / 2, feed=feed)

    def learn(self, outcome: Outcome, cached: float, *, at_start: bool = False) -> None:
        """Learn from rounds in which this alternative drafted.

        The beginning of a text is often harder to draft than the rest, so its rounds (`at_start`)
        weigh less.
        """
        weight = _START_WEIGHT if at_start and self.has_estimate else 1.0
        self._tried += outcome.seqs
        for i, reached, accepted in zip(range(len(self._reached)), outcome.reached, outcome.accepted, strict=False):
            decay = _TOKEN_DECAY ** (weight * reached)
            self._reached[i] = self._reached[i] * decay + weight * reached
            self._accepted[i] = self._accepted[i] * decay + weight * accepted
        depth = outcome.depth / outcome.rounds
        if outcome.draft_seconds is None:
            for means in (self._means, self._recent):
                means.learn(outcome, means.drafted, weight)
            return
        # A draft token takes a pass of the draft model. Bound the time, since a round may include a
        # prefill.
        low, high = (depth, 1 + 2 * max(self._draft_cost.of(depth), depth)) if self.costs.draft else (0.0, inf)
        unit = self._draft_unit(max(round(outcome.seqs / outcome.rounds), 1), cached)
        drafted = min(max(outcome.draft_seconds / outcome.rounds / unit, low), high)
        for means in (self._means, self._recent):
            means.learn(outcome, drafted, weight)
        if self.costs.draft is not None:
            self._draft_cost.learn(depth, drafted, outcome.rounds)

    def start_trial(self, *, new_texts: bool = False) -> None:
        """Measure again on a few sequences. Earlier means weigh less, and even less for `new_texts`."""
        self.trial_passes_left = TRIAL_PASSES
        self.trial_seqs = TRIAL_SEQS
        self._recent = _Means()
        self._means.seen = min(self._means.seen, _CARRIED_PASSES_NEW_TEXTS if new_texts else _CARRIED_PASSES)

    def count_trial_passes(self, passes: int, load: RoundLoad, clock: Clock) -> None:
        """Count passes of a trial. It ends early if the acceptance so far is hopeless."""
        if not self.trial_passes_left:
            return
        self.trial_passes_left = max(self.trial_passes_left - passes, 0)
        if self._recent.seen >= _MIN_PASSES and self._gain_of(self._recent, load.seqs, load.cached, clock) < _HOPELESS:
            self.trial_passes_left = 0

    def widen_trial(self, seqs: int) -> bool:
        """Repeat a successful trial with more sequences, if a draft model would have to prefill many more."""
        if self.costs.draft is None or seqs <= _WIDEN_BY * self.trial_seqs:
            return False
        self.trial_seqs *= _WIDEN_BY
        self.trial_passes_left = _WIDE_TRIAL_ROUNDS * self.trial_seqs
        return True

    def state(self) -> dict[str, Any]:
        """Return what has been learned, as JSON values. Costs are not part of it."""
        fields = {name.strip("_"): getattr(self, name) for name in _STATE_FIELDS}
        cost = {"round_cost": self._draft_cost.per_round, "token_cost": self._draft_cost.per_token}
        return fields | cost | {name: getattr(self._means, name) for name in _Means.__slots__}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state`. Raises KeyError, TypeError or ValueError for other values."""
        fields = {name: state[name.strip("_")] for name in _STATE_FIELDS}
        means = _Means(**{name: state[name] for name in _Means.__slots__})
        if any(type(value) is not type(getattr(self, name)) for name, value in fields.items()):
            raise TypeError("a value has another type")
        draft_cost = DraftCost(state["round_cost"], state["token_cost"])
        rates = list(zip(fields["_reached"], fields["_accepted"], strict=True))
        numbers = [number for pair in rates for number in pair]
        numbers += [
            fields["idle_rounds"],
            fields["_tried"],
            draft_cost.per_round,
            draft_cost.per_token,
            *asdict(means).values(),
        ]
        if not all(type(number) in (int, float) and 0 <= number <= _MAX_STATE_VALUE for number in numbers):
            raise ValueError("a number is out of range")
        if len(rates) != len(self._reached) or not all(accepted <= reached and reached for reached, accepted in rates):
            raise ValueError("the acceptance has another number of positions, or is not a rate")
        self._means = means
        self._draft_cost = draft_cost
        for name, value in fields.items():
            setattr(self, name, value)

    def _gain_of(self, means: _Means, seqs: int, cached: float, clock: Clock) -> float:
        """Return the speedup over plain decoding of rounds with these means."""
        seconds = clock.verify(seqs, means.nodes, cached=cached) + means.drafted * self._draft_unit(seqs, cached)
        return means.tau * clock.verify(seqs, 0, cached=cached) / seconds

    def _pass_seconds(self, seqs: int, cached: float) -> float:
        return 0.0 if self.costs.draft is None else self.costs.draft(seqs, seqs=seqs, cached=cached)

    def _draft_unit(self, seqs: int, cached: float) -> float:
        """Return the unit of drafting time: a pass of the draft model, or a second per sequence."""
        return self._pass_seconds(seqs, cached) or float(seqs)


@dataclass(slots=True)
class _Means:
    """Decayed means over passes."""

    seen: float = 0.0  # number of passes, decayed
    tau: float = 1 + _PRIOR  # output tokens per pass
    nodes: float = 1.0  # draft tokens per pass
    drafted: float = 0.0  # drafting time per round, in `_draft_unit`s

    def learn(self, outcome: Outcome, drafted: float, weight: float) -> None:
        """Add an outcome, whose rounds spent `drafted` units of time on drafting each."""
        passes = weight * outcome.seqs
        before = self.seen * _PASS_DECAY**passes
        self.seen = before + passes
        self.tau = (self.tau * before + weight * outcome.output_tokens) / self.seen
        self.nodes = (self.nodes * before + weight * outcome.nodes) / self.seen
        self.drafted = (self.drafted * before + drafted * passes) / self.seen
