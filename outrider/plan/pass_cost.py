"""What a round costs on this machine, from measurements: the time of a pass by its columns and by what they read."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One timed pass."""

    tokens: int  # of all rows: each row's feed and guesses
    seqs: int
    cached: int  # tokens that each row had cached
    seconds: float
    scored: bool = True  # all columns; else the last of each row alone, as where a prompt is read


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """t(columns, entries, pairs) = base(columns) + entry * entries + pair * pairs.

    `base` reads the weights and multiplies, interpolated between what was measured; `entries` are cached tokens, read
    once for each row; `pairs` are (column, cached token) pairs, whose products attention takes. Columns that are read
    and not scored take `fed` seconds each: a small model spends most of its time on its output layer.
    """

    tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]  # of a pass over so many columns with nothing cached, never descending
    entry: float  # seconds
    pair: float  # seconds
    fed: float | None = None  # None: what the same columns take that are scored

    def __call__(self, columns: float, *, rows: int, cached: float, feed: float = 0.0) -> float:
        """Seconds of a pass over `columns`, of `rows` rows with `cached` tokens each on average.

        Args:
            columns: that are scored, in all.
            rows: that share them.
            cached: tokens.
            feed: columns besides, of texts that are read.
        """
        least = self.base(columns + feed) if self.fed is None else self.base(columns) + self.fed * feed
        return least + self.deep(columns + feed, rows=rows, cached=cached)

    def deep(self, columns: float, *, rows: int, cached: float) -> float:
        """Seconds of them for what is cached."""
        return (self.entry * rows + self.pair * columns) * cached

    def base(self, columns: float) -> float:
        """Seconds of a pass with nothing cached."""
        at = min(max(bisect_left(self.tokens, columns), 1), len(self.tokens) - 1)
        if not at:
            return self.seconds[0]
        low, high = self.tokens[at - 1], self.tokens[at]
        slope = (self.seconds[at] - self.seconds[at - 1]) / (high - low)
        return self.seconds[at - 1] + slope * max(columns - low, low - self.tokens[0] if at == 1 else 0)

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> PassCost:
        """From samples without a cached text, and some with one of each kind: one column, and many."""
        plain = sorted((s.tokens, s.seconds) for s in samples if s.scored and not s.cached)
        # More columns never take less time; where they seem to, the machine was disturbed.
        seconds = tuple(accumulate((s for _, s in reversed(plain)), min))[::-1]
        base = cls(tokens=tuple(c for c, _ in plain), seconds=seconds, entry=0.0, pair=0.0)
        deep = [(s.seqs * s.cached, s.tokens * s.cached, s.seconds - base.base(s.tokens)) for s in samples if s.cached]
        entry, pair = _least_squares(deep)
        fed = min((s.seconds / s.tokens for s in samples if not s.scored), default=None)
        return cls(tokens=base.tokens, seconds=seconds, entry=entry, pair=pair, fed=fed)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """The parts of a round, measured."""

    target: PassCost
    draft: PassCost | None  # of a draft model's pass; None where guesses cost next to nothing
    host: float = 2e-4  # seconds of all else in a round

    def verify(self, rows: int, k: float, *, cached: float, feed: int = 0) -> float:
        """Expected seconds of a round without its drafting.

        Args:
            rows: that decode.
            k: guesses for each of them, on average.
            cached: tokens that a row has cached, on average.
            feed: columns of prompts that the same pass reads.
        """
        return self.host + self.target(rows * (1 + k) + feed, rows=rows, cached=cached)

    def propose(self, rows: int, k: int, *, cached: float) -> float:
        """Expected seconds of drafting k guesses for each row, one after another."""
        return 0.0 if self.draft is None else k * self.draft(rows, rows=rows, cached=cached)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> CostModel:
        """Raises ValueError, TypeError or KeyError for what `dumps` did not write."""
        read = json.loads(text)
        draft = read["draft"]
        return cls(target=_cost(read["target"]), draft=None if draft is None else _cost(draft), host=read["host"])


class Clock:
    """A cost model refined while running: t = (a + g [guesses]) t(1) + b (base(columns) - base(1)) + c deep(columns).

    What reads the weights, what each column adds and what reads the cached text drift apart as a machine's memory is
    more or less busy; and a round with guesses has work besides its columns. The factors follow the rounds by recursive
    least squares that forgets, and stay near what is usual where rounds say nothing of them.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._one = costs.target.base(1)
        self._least = costs.host + self._one
        self._theta = list(_USUAL)  # a, g, b, c
        self._known = _PRIOR.copy()

    @property
    def extra(self) -> float:
        """Seconds that a round with guesses takes besides its columns."""
        return self._theta[1] * self._least

    def verify(self, rows: int, k: float, *, cached: float, feed: int = 0) -> float:
        """As `CostModel.verify`, as things stand."""
        return self.at(rows * (1 + k) + feed, rows=rows, cached=cached) + (self.extra if k else 0.0)

    def at(self, columns: float, *, rows: int, cached: float) -> float:
        """Expected seconds of a round, without its drafting and `extra`, over `columns` in all."""
        a, _, b, c = self._theta
        wide, deep = self._beyond(columns, rows, cached)
        return a * self._least + b * wide + c * deep

    def learn(self, columns: float, rows: int, cached: float, took: float, *, guesses: bool) -> None:
        """From a round that took so many seconds; an outlier counts as much as twice or half of what was expected."""
        if columns > self._costs.target.tokens[-1]:
            return  # beyond what was measured nobody knows what to expect
        wide, deep = self._beyond(columns, rows, cached)
        terms = np.array((1.0, float(guesses), wide / self._least, deep / self._least))
        expected = float(terms @ self._theta)
        surprise = min(max(took / self._least, expected / 2), 2 * expected) - expected
        believed = (1 - _MEMORY) * _PRIOR  # which comes in again as fast as rounds are forgotten
        self._known = _MEMORY * self._known + believed + np.outer(terms, terms)
        pull = surprise * terms + believed @ np.subtract(_USUAL, self._theta)
        self._theta = np.maximum(self._theta + np.linalg.solve(self._known, pull), _LEAST).tolist()

    def _beyond(self, columns: float, rows: int, cached: float) -> tuple[float, float]:
        """Measured seconds for columns after the first, and for what is cached."""
        target = self._costs.target
        return target.base(columns) - self._one, target.deep(columns, rows=rows, cached=cached)


def _cost(read: dict[str, Any]) -> PassCost:
    return PassCost(**{**read, "tokens": tuple(read["tokens"]), "seconds": tuple(read["seconds"])})


def _least_squares(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b >= 0 that minimise the sum of (a x + b y - z)^2 over points (x, y, z)."""
    xx, xy, yy = (sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    xz, yz = (sum(p[i] * p[2] for p in points) for i in (0, 1))
    if not xx:
        return 0.0, 0.0
    det = xx * yy - xy * xy
    if det > 1e-9 * xx * yy:
        a, b = (xz * yy - yz * xy) / det, (yz * xx - xz * xy) / det
        if a >= 0 and b >= 0:
            return a, b
    return (max(xz / xx, 0.0), 0.0) if xz * xz * yy > yz * yz * xx else (0.0, max(yz / yy, 0.0))


_USUAL = (1.0, 0.0, 1.0, 1.0)  # a, g, b, c
# How far rounds stray from what is expected, and factors from what was measured: a, b and c together, each by itself.
_NOISE, _ALIKE, _ALONE = 0.3, 0.3, 0.2
# What is believed beforehand, in rounds: the inverse of the factors' covariance.
_PRIOR = _NOISE**2 * np.linalg.inv(_ALONE**2 * np.eye(4) + _ALIKE**2 * np.outer(_USUAL, _USUAL))
_MEMORY = 0.97  # weight of a round seen one round earlier
_LEAST = (0.1, 0.0, 0.1, 0.1)
