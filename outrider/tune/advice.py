"""From figures to an answer: whether to speculate, with whom and how far, and what would change that.

Pure functions of what was measured, so that every answer can be tried on made-up figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from outrider.core.params import AUTO
from outrider.tune.figures import Case, Plain

WORTHWHILE = 1.02  # overall speedup below which plain decoding is advised
_NEARLY = 0.97  # of the best overall speedup: from there on k auto is preferred, which stops by itself
_GUESSES = 4  # where a fixed k is asked for and nothing better is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """How the advice fares at one temperature as batches grow."""

    speedups: tuple[tuple[int, float], ...]  # overall, by batch, ascending
    stops_paying_at_batch: int | None  # the batch from which it no longer pays; None: it still does at the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The answer for one place, the first batch and the first temperature, and what it depends on."""

    plain: Plain  # there
    best: Case  # the fastest overall there, worthwhile or not
    worth: bool  # whether it should be used
    adaptive: bool  # k auto was taken although a fixed k was a little faster
    fixed_k: int  # for engines that have no auto
    runner_up: Case | None  # the best of another proposer there
    close: bool  # whether the two intervals overlap
    batches: Batches
    others: tuple[tuple[Plain, Case], ...]  # the best at every other place
    break_even_tau: float  # tokens that a pass must emit for it to pay

    @property
    def decoding(self) -> bool:
        """Whether more time goes to decoding than to reading prompts."""
        return self.plain.prefill_share <= 0.5

    @property
    def max_speedup(self) -> float | None:
        """Overall speedup if decoding took no time at all (Amdahl 1967); None where prompts take none."""
        return 1 / self.plain.prefill_share if self.plain.prefill_share else None

    @property
    def proposer(self) -> str:
        """What to run; none where nothing pays."""
        return self.best.variant.proposer if self.worth else "none"

    @property
    def k(self) -> int | str:
        """Guesses a round, or auto; 0 where nothing pays."""
        return self.best.variant.k if self.worth else 0


def advise(plains: Sequence[Plain], cases: Sequence[Case]) -> Advice:
    """The answer for the first place.

    It is the fastest overall, the reading of prompts included, if that is a gain and surely one; k auto if it is nearly
    as fast, because it stops guessing where guesses stop paying.
    """
    home = plains[0]
    here = _at(cases, home)
    fastest = max(here, key=_overall)
    auto = _best(case for case in here if case.variant.k == AUTO and case.variant.proposer == fastest.variant.proposer)
    adaptive = auto is not None and auto is not fastest and _overall(auto) >= _NEARLY * _overall(fastest)
    best = auto if adaptive and auto is not None else fastest
    rival = _best(case for case in here if case.variant.proposer != best.variant.proposer)
    return Advice(
        plain=home,
        best=best,
        worth=_worth(best),
        adaptive=adaptive,
        fixed_k=_fixed(best, here),
        runner_up=rival,
        close=rival is not None and _overlap(best, rival),
        batches=_batches(best, cases),
        others=tuple((plain, max(_at(cases, plain), key=_overall)) for plain in plains[1:]),
        break_even_tau=best.break_even_tau(home),
    )


def _worth(case: Case) -> bool:
    """A gain, and surely one where anything is known of that."""
    return _overall(case) >= WORTHWHILE and (case.overall.low is None or case.overall.sure)


def _fixed(best: Case, here: Sequence[Case]) -> int:
    """The fastest fixed k of the same proposer, else about as many guesses as auto made."""
    if not isinstance(best.variant.k, str):
        return best.variant.k
    same = _best(case for case in here if case.variant.proposer == best.variant.proposer and case.variant.k != AUTO)
    if same is not None and not isinstance(same.variant.k, str):
        return same.variant.k
    return ceil(best.nodes) or _GUESSES


def _batches(best: Case, cases: Sequence[Case]) -> Batches:
    alike = (best.variant.proposer, best.variant.k, best.variant.temperature)
    along = sorted(
        (case.variant.batch, _overall(case))
        for case in cases
        if (case.variant.proposer, case.variant.k, case.variant.temperature) == alike
    )
    stops = None
    for batch, speedup in reversed(along):
        if speedup >= WORTHWHILE:
            break
        stops = batch
    return Batches(speedups=tuple(along), stops_paying_at_batch=stops)


def _overlap(one: Case, other: Case) -> bool:
    """Whether the figures do not tell two ways apart; without intervals they are close within 5%."""
    bounds = (one.overall.low, one.overall.high, other.overall.low, other.overall.high)
    if None in bounds:
        return abs(_overall(one) / _overall(other) - 1) < 0.05
    low, high, other_low, other_high = (bound for bound in bounds if bound is not None)
    return low <= other_high and other_low <= high


def _at(cases: Sequence[Case], plain: Plain) -> list[Case]:
    place = (plain.variant.batch, plain.variant.temperature)
    return [case for case in cases if (case.variant.batch, case.variant.temperature) == place]


def _best(cases: Iterable[Case]) -> Case | None:
    return max(cases, key=_overall, default=None)


def _overall(case: Case) -> float:
    return case.overall.value
