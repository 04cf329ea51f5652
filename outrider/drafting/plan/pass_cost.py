"""The cost model: the time of a forward pass on this machine, by tokens, sequences and cached tokens."""

from __future__ import annotations

import json
import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from outrider.drafting.plan.expert_use import ExpertUse

# The factors a, g, b and c of `Clock`.
_DEFAULTS = (1.0, 0.0, 1.0, 1.0)
_MINIMA = (0.1, 0.0, 0.1, 0.1)
# Standard deviations: of the time of a round, of a common factor of a, b and c, and of each factor
# alone. g varies most, because the work outside of passes differs most between models.
_NOISE, _COMMON, _SINGLE = 0.3, 0.3, (0.2, 0.4, 0.2, 0.2)
# The prior: the inverse covariance of the factors, in rounds.
_PRIOR = (_NOISE**2 * np.linalg.inv(np.diag(np.square(_SINGLE)) + _COMMON**2 * np.outer(_DEFAULTS, _DEFAULTS))).tolist()
_DECAY = 0.97  # weight of a round after one more round


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed pass."""

    tokens: int  # tokens of the pass, of all sequences
    seqs: int
    cached: int  # cached tokens per sequence
    seconds: float
    scored: bool = True  # logits for all tokens; False: for the last of each sequence, as in prefill
    experts: float = 0.0  # distinct experts that the pass used, the mean over layers; 0: not counted
    equal: bool = False  # whether all tokens are equal, so that they use the experts of one token


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """t = base(tokens) + entry * cached entries + pair * (token, cached entry) pairs.

    `base` is the time to read the weights and multiply, interpolated between measurements. It
    depends on the sum of the tokens. In a padded target it depends on the sequences and on the
    tokens of each. `tokens` and `seconds` are then passes over one sequence, `full_tokens` and
    `full_seconds` passes over `slots` sequences. The time of fewer sequences lies between them.

    Cached entries are read once per sequence; attention multiplies each pair. A prompt token without
    logits takes `fed` seconds, because a small model spends most of its time in the output layer.

    In a mixture of experts, `base` includes the experts that the measured tokens used. A pass that
    uses fewer of them takes `expert` seconds less for each.
    """

    tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # of a pass over each of these numbers of tokens with an empty cache, ascending
    entry: float  # seconds per cached entry
    pair: float  # seconds per pair
    fed: float | None = None  # seconds per prompt token; None: as tokens with logits
    window: int | None = None  # cached tokens that a pass reads per sequence, at most; None: all
    shares_cache: bool = False  # whether it reads the KV cache of the target, so that it has no prefill
    experts: tuple[float, ...] = ()  # distinct experts of each measured pass, the mean over layers; (): not counted
    expert: float = 0.0  # seconds for one more distinct expert of each layer
    slots: int = 1  # sequences of the passes of `full_seconds`
    full_tokens: tuple[int, ...] = ()  # of each sequence in these passes, ascending; (): the sum of the tokens counts
    full_seconds: tuple[float, ...] = ()  # of these passes with an empty cache, ascending

    @property
    def most_tokens(self) -> int:
        """The most tokens of a measured pass."""
        return max(self.tokens[-1], self.slots * max(self.full_tokens, default=0))

    def __call__(self, tokens: float, *, seqs: float, cached: float, feed: float = 0.0) -> float:
        """Return the seconds of a pass.

        Args:
            tokens: tokens with logits.
            seqs: mean number of sequences.
            cached: mean cached tokens per sequence.
            feed: prompt tokens without logits.
        """
        if self.fed is None:
            base = self.base(tokens + feed, seqs=seqs)
        else:
            base = self.base(tokens, seqs=seqs) + self.fed * feed
        return base + self.deep(tokens + feed, seqs=seqs, cached=cached)

    def deep(self, tokens: float, *, seqs: float, cached: float) -> float:
        """Return the seconds that the cached tokens add."""
        visible = cached if self.window is None else min(cached, self.window)
        return (self.entry * seqs + self.pair * tokens) * visible

    def base(self, tokens: float, *, seqs: float = 1) -> float:
        """Return the seconds of a pass over `tokens` of `seqs` sequences with an empty cache."""
        if not self.full_tokens or seqs <= 1:
            return _interpolate(self.tokens, self.seconds, tokens)
        one = _interpolate(self.tokens, self.seconds, tokens / seqs)
        full = _interpolate(self.full_tokens, self.full_seconds, tokens / seqs)
        return one + (full - one) * min((seqs - 1) / (self.slots - 1), 1.0)

    @classmethod
    def fit(cls, samples: Sequence[Sample], *, padded_slots: int = 1) -> PassCost:
        """Fit the model to samples with an empty cache, and some with cached tokens: for one token and for many.

        In a padded target of several slots, passes over all slots are apart from those over one sequence. Before two of
        each are measured, the sum of the tokens is the best guess.
        """
        empty = [s for s in samples if s.scored and not s.cached and not s.equal]
        first = sorted({s.tokens: s for s in empty}.values(), key=lambda s: s.tokens)
        full = sorted((s for s in empty if 1 < padded_slots == s.seqs), key=lambda s: s.tokens)
        single = sorted((s for s in empty if s.seqs == 1), key=lambda s: s.tokens)
        if min(len(full), len(single)) > 1:
            first = single
        else:
            full = []
        base = cls(
            tokens=tuple(s.tokens for s in first),
            seconds=_rising(first),
            entry=0.0,
            pair=0.0,
            slots=padded_slots,
            full_tokens=tuple(s.tokens // padded_slots for s in full),
            full_seconds=_rising(full),
        )
        deep = [
            (s.seqs * s.cached, s.tokens * s.cached, s.seconds - base.base(s.tokens, seqs=s.seqs))
            for s in samples
            if s.cached
        ]
        counts = tuple(s.experts for s in first) if all(s.experts for s in first) else ()
        entry, pair = _least_squares(deep)
        fed = min((s.seconds / s.tokens for s in samples if not s.scored), default=None)
        expert = _expert_seconds(first, [s for s in samples if s.equal]) if counts else 0.0
        return replace(base, entry=entry, pair=pair, fed=fed, experts=counts, expert=expert)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The measured costs of the parts of a round."""

    target: PassCost
    draft: PassCost | None  # a pass of the draft model; None: drafting costs almost nothing
    host: float = 2e-4  # seconds per round outside of the passes

    def verify(self, seqs: int, k: float, *, cached: float, feed: int = 0) -> float:
        """Return the expected seconds of a round without drafting.

        Args:
            seqs: decoding sequences.
            k: mean draft tokens per sequence.
            cached: mean cached tokens per sequence.
            feed: prompt tokens in the same pass.
        """
        return self.host + self.target(seqs * (1 + k) + feed, seqs=seqs, cached=cached)

    def propose(self, seqs: int, k: int, *, cached: float) -> float:
        """Return the expected seconds of drafting k tokens for each sequence, one after another."""
        return 0.0 if self.draft is None else k * self.draft(seqs, seqs=seqs, cached=cached)

    def dumps(self) -> str:
        """Return the costs as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> CostModel:
        """Parse a result of `dumps`. Raises ValueError, TypeError or KeyError for other texts."""
        document = json.loads(text)
        draft = document["draft"]
        return cls(
            target=_pass_cost(document["target"]),
            draft=None if draft is None else _pass_cost(draft),
            host=document["host"],
        )


class Clock:
    """Corrects a cost model with the times of real rounds, and with the experts that they used.

    t = (a + g [draft tokens]) t(1) + b (text(tokens) - base(1)) + c deep(tokens)
    text(tokens) = base(tokens) - expert (experts of random tokens - experts of text)

    The factors a, b and c change with the load of the machine, and g is the work outside of the
    pass in a round with draft tokens. They are fitted by recursive least squares with forgetting.
    They stay near their defaults where the rounds do not determine them.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._use = ExpertUse(costs.target.tokens, costs.target.experts)
        self._one_token = costs.target.base(1)
        self._one_token_round = costs.host + self._one_token
        self._factors = list(_DEFAULTS)  # a, g, b, c
        self._information = list(map(list, _PRIOR))  # inverse covariance of the factors, in rounds
        self._known: dict[tuple[float, int, float], float] = {}  # results of `at` with these factors

    @property
    def extra(self) -> float:
        """Seconds that a round with draft tokens takes in addition to its tokens."""
        return self._factors[1] * self._one_token_round

    def verify(self, seqs: int, k: float, *, cached: float, feed: int = 0) -> float:
        """Return `CostModel.verify` with the current factors."""
        return self.at(seqs * (1 + k) + feed, seqs=seqs, cached=cached) + (self.extra if k else 0.0)

    def at(self, tokens: float, *, seqs: int, cached: float) -> float:
        """Return the expected seconds of a round over `tokens`, without drafting and `extra`."""
        key = (tokens, seqs, cached)
        if key not in self._known:
            a, _, b, c = self._factors
            wide, deep = self._added_seconds(tokens, seqs, cached)
            self._known[key] = a * self._one_token_round + b * wide + c * deep
        return self._known[key]

    def experts(self, tokens: float) -> float:
        """Return the expected distinct experts of a pass over `tokens` of text; 0: the target has none."""
        return self._use.of_text(tokens)

    def learn(
        self,
        tokens: float,
        seqs: int,
        cached: float,
        took: float,
        *,
        drafted: bool,
        experts: float = 0.0,
        rounds: int = 1,
    ) -> None:
        """Learn from `rounds` similar rounds that took `took` seconds each.

        Their passes used `experts` distinct experts (0: not counted). Outliers are clipped to half and
        twice the expected time.
        """
        self._known.clear()
        if tokens > self._costs.target.most_tokens:
            return  # there is no measurement to compare with
        if experts:
            self._use.learn(tokens, experts)
        unit = self._one_token_round
        wide, deep = self._added_seconds(tokens, seqs, cached)
        terms = [1.0, float(drafted), wide / unit, deep / unit]
        expected = sum(map(operator.mul, terms, self._factors))
        error = min(max(took / unit, expected / 2), 2 * expected) - expected
        weight = 1 / max(expected, 1.0)  # the noise of a long round grows with its time
        terms = [weight * term for term in terms]
        away = list(map(operator.sub, _DEFAULTS, self._factors))
        gradient = []
        for i, (row, prior) in enumerate(zip(self._information, _PRIOR, strict=True)):
            # The prior returns as fast as rounds are forgotten.
            for j in range(4):
                row[j] = _DECAY * row[j] + (1 - _DECAY) * prior[j] + rounds * terms[i] * terms[j]
            gradient.append(rounds * weight * error * terms[i] + (1 - _DECAY) * sum(map(operator.mul, prior, away)))
        step = _solve(self._information, gradient)
        self._factors = list(map(max, map(operator.add, self._factors, step), _MINIMA))

    def _added_seconds(self, tokens: float, seqs: int, cached: float) -> tuple[float, float]:
        """Return the measured seconds of the tokens after the first, and of the cached tokens."""
        target = self._costs.target
        wide = target.base(tokens, seqs=seqs) - self._one_token
        if target.expert:
            saved = target.expert * (self._use.of_random(tokens) - self._use.of_text(tokens))
            wide = max(wide - saved, 0.0)
        return wide, target.deep(tokens, seqs=seqs, cached=cached)


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solve a small symmetric positive definite system by Gaussian elimination. It is faster than a call of numpy."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            for j in range(i, size + 1):
                row[j] -= factor * pivot[j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution


def _pass_cost(fields: dict[str, Any]) -> PassCost:
    """Return the `PassCost` of a JSON object."""
    lists = {name: tuple(fields[name]) for name in ("tokens", "seconds", "experts", "full_tokens", "full_seconds")}
    return PassCost(**{**fields, **lists})


def _interpolate(counts: Sequence[int], seconds: Sequence[float], count: float) -> float:
    """Return the seconds at `count` from those at ascending `counts`. The line of the last two continues after them."""
    at = min(max(bisect_left(counts, count), 1), len(counts) - 1)
    if not at:
        return seconds[0]
    low, high = counts[at - 1], counts[at]
    slope = (seconds[at] - seconds[at - 1]) / (high - low)
    return seconds[at - 1] + slope * max(count - low, 0.0)


def _rising(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Return the seconds of samples with ascending tokens. One that takes longer than more tokens was disturbed."""
    return tuple(accumulate((sample.seconds for sample in reversed(samples)), min))[::-1]


def _expert_seconds(random: Sequence[Sample], equal: Sequence[Sample]) -> float:
    """Return the seconds of one more distinct expert, from pairs of passes over random and over equal tokens.

    It is the median over the passes, and at most the share of an expert in the time of a pass over
    one token.
    """
    by_tokens = {sample.tokens: sample for sample in random}
    pairs = [(by_tokens[sample.tokens], sample) for sample in equal]
    rates = [(a.seconds - b.seconds) / (a.experts - b.experts) for a, b in pairs if a.experts > b.experts]
    return min(max(median(rates), 0.0), random[0].seconds / random[0].experts) if rates else 0.0


def _least_squares(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return a, b >= 0 that minimize the sum of (a x + b y - z)^2 over points (x, y, z)."""

    def moment(i: int, j: int) -> float:
        return sum(point[i] * point[j] for point in points)

    xx, xy, yy = moment(0, 0), moment(0, 1), moment(1, 1)
    xz, yz = moment(0, 2), moment(1, 2)
    if not xx:
        return 0.0, 0.0
    det = xx * yy - xy * xy
    if det > 1e-9 * xx * yy:
        a, b = (xz * yy - yz * xy) / det, (yz * xx - xz * xy) / det
        if a >= 0 and b >= 0:
            return a, b
    return (max(xz / xx, 0.0), 0.0) if xz * xz * yy > yz * yz * xx else (0.0, max(yz / yy, 0.0))
