"""Decides from measured figures whether to speculate, and with which proposer and draft length.

The functions are pure, so that every recommendation can be tested on made-up figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from outrider.core.params import AUTO
from outrider.tune.figures import Case, Plain

WORTHWHILE = 1.02  # overall speedup below which plain decoding is recommended
_AUTO_SHARE = 0.97  # k auto is preferred from this share of the best overall speedup on, because it adapts
_DEFAULT_K = 4  # the fixed k if nothing better is known
_CLOSE = 0.05  # relative difference below which two speedups without intervals are close


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The recommended variant at one temperature, by batch size."""

    speedups: tuple[tuple[int, float], ...]  # (batch, overall speedup), ascending
    stops_paying_at_batch: int | None  # smallest batch from which it does not pay; None: it pays at the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The recommendation for the first batch and the first temperature, and what it depends on."""

    plain: Plain
    best: Case  # the fastest case overall, whether it is worthwhile or not
    worth: bool  # whether to use it
    adaptive: bool  # k auto was preferred to a slightly faster fixed k
    fixed_k: int  # for engines without k auto
    runner_up: Case | None  # the best case of another proposer
    close: bool  # whether the intervals of the two overlap
    batches: Batches
    others: tuple[tuple[Plain, Case], ...]  # the best case at every other batch and temperature
    break_even_tau: float  # tokens per pass from which a round pays

    @property
    def decoding(self) -> bool:
        """Whether decoding takes more time than prefill."""
        return self.plain.prefill_share <= 0.5

    @property
    def max_speedup(self) -> float | None:
        """Overall speedup if decoding took no time (Amdahl 1967). None: prefill takes no time."""
        return 1 / self.plain.prefill_share if self.plain.prefill_share else None

    @property
    def proposer(self) -> str:
        """The proposer to use, or "none" if speculation does not pay."""
        return self.best.variant.proposer if self.worth else "none"

    @property
    def k(self) -> int | str:
        """Draft tokens per round, or auto. 0 if speculation does not pay."""
        return self.best.variant.k if self.worth else 0


def advise(plains: Sequence[Plain], cases: Sequence[Case]) -> Advice:
    """Return the recommendation for the first batch and the first temperature.

    It is the case with the highest overall speedup, prefill included, if that is a significant gain. k auto is
    preferred if it is nearly as fast, because it stops drafting where drafting does not pay.
    """
    plain = plains[0]
    candidates = _cases_at(cases, plain)
    fastest = max(candidates, key=_overall)
    auto = _best(
        case for case in candidates if case.variant.k == AUTO and case.variant.proposer == fastest.variant.proposer
    )
    adaptive = auto is not None and auto is not fastest and _overall(auto) >= _AUTO_SHARE * _overall(fastest)
    best = auto if adaptive and auto is not None else fastest
    runner_up = _best(case for case in candidates if case.variant.proposer != best.variant.proposer)
    return Advice(
        plain=plain,
        best=best,
        worth=_is_worthwhile(best),
        adaptive=adaptive,
        fixed_k=_fixed_k(best, candidates),
        runner_up=runner_up,
        close=runner_up is not None and _is_close(best, runner_up),
        batches=_batches(best, cases),
        others=tuple((other, max(_cases_at(cases, other), key=_overall)) for other in plains[1:]),
        break_even_tau=best.break_even_tau(plain),
    )


def _is_worthwhile(case: Case) -> bool:
    """Return whether a case gains, significantly so if an interval is known."""
    return _overall(case) >= WORTHWHILE and (case.overall.low is None or case.overall.sure)


def _fixed_k(best: Case, candidates: Sequence[Case]) -> int:
    """Return the fastest fixed k of the same proposer, or else the mean draft length of k auto."""
    if not isinstance(best.variant.k, str):
        return best.variant.k
    fixed = _best(
        case for case in candidates if case.variant.proposer == best.variant.proposer and case.variant.k != AUTO
    )
    if fixed is not None and not isinstance(fixed.variant.k, str):
        return fixed.variant.k
    return ceil(best.nodes) or _DEFAULT_K


def _batches(best: Case, cases: Sequence[Case]) -> Batches:
    key = (best.variant.proposer, best.variant.k, best.variant.temperature)
    speedups = sorted(
        (case.variant.batch, _overall(case))
        for case in cases
        if (case.variant.proposer, case.variant.k, case.variant.temperature) == key
    )
    stops = None
    for batch, speedup in reversed(speedups):
        if speedup >= WORTHWHILE:
            break
        stops = batch
    return Batches(speedups=tuple(speedups), stops_paying_at_batch=stops)


def _is_close(case: Case, other: Case) -> bool:
    """Return whether the intervals of two cases overlap. Without intervals, compare the speedups."""
    bounds = (case.overall.low, case.overall.high, other.overall.low, other.overall.high)
    if None in bounds:
        return abs(_overall(case) / _overall(other) - 1) < _CLOSE
    low, high, other_low, other_high = (bound for bound in bounds if bound is not None)
    return low <= other_high and other_low <= high


def _cases_at(cases: Sequence[Case], plain: Plain) -> list[Case]:
    """Return the cases with the batch and the temperature of `plain`."""
    key = (plain.variant.batch, plain.variant.temperature)
    return [case for case in cases if (case.variant.batch, case.variant.temperature) == key]


def _best(cases: Iterable[Case]) -> Case | None:
    return max(cases, key=_overall, default=None)


def _overall(case: Case) -> float:
    return case.overall.value
