"""Decides from measured figures whether to speculate, and with which proposer and draft length.

The functions are pure, so that every recommendation can be tested on made-up figures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from outrider.core.params import AUTO
from outrider.lab.tune.candidate import WORTHWHILE, Candidate, fastest, fastest_first, group
from outrider.lab.tune.figures import Case, Estimate, Plain

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
    """The recommendation for the first batch and one or several temperatures, and what it depends on."""

    plain: Plain  # at the first temperature
    choice: Candidate  # the fastest one, whether it is worthwhile or not
    cases: tuple[Case, ...]  # of the choice, by temperature
    adaptive: bool  # k auto was preferred to a slightly faster fixed k
    fixed_k: int  # for engines without k auto
    runner_up: Candidate | None  # the best one of another proposer
    close: bool  # whether the intervals of the two overlap
    batches: Batches
    others: tuple[tuple[Plain, Case], ...]  # the best case at every other batch and temperature
    break_even_tau: float  # tokens per pass from which a round pays

    @property
    def best(self) -> Case:
        """The choice at the first temperature."""
        return self.cases[0]

    @property
    def worth(self) -> bool:
        """Whether to use the choice."""
        return self.choice.worthwhile

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
        return self.best.proposer if self.worth else "none"

    @property
    def draft_quantize(self) -> str | None:
        """Weights of its draft, where several were compared."""
        return self.best.draft_quantize if self.worth else None

    @property
    def k(self) -> int | str:
        """Draft tokens per round, or auto. 0 if speculation does not pay."""
        return self.best.k if self.worth else 0


def advise(plains: Sequence[Plain], cases: Sequence[Case], *, every_temperature: bool = False) -> Advice:
    """Return the recommendation for the first batch and the first temperature, or for all temperatures together.

    It is the candidate with the highest overall speedup, prefill included, if that is a significant gain. k auto is
    preferred if it is nearly as fast, because it stops drafting where drafting does not pay. For several temperatures
    the geometric mean counts, and a candidate whose interval is entirely below 1 at any of them is left out.
    """
    plain = plains[0]
    batch = plain.batch
    chosen_for = [each for each in plains if each.batch == batch] if every_temperature else [plain]
    candidates = group((case, case.overall) for each in chosen_for for case in _cases_at(cases, each))
    choice = _choose([each for each in candidates if not each.loses_at])
    if choice is None or not choice.worthwhile:
        choice = _choose(candidates)
    assert choice is not None  # something was measured
    adaptive = choice.k == AUTO and any(
        each.overall.value > choice.overall.value and not each.loses_at for each in _same_draft(candidates, choice)
    )
    chosen_cases = tuple(_case(cases, each, choice) for each in chosen_for)
    runner_up = next(iter(fastest_first(each for each in candidates if each.proposer != choice.proposer)), None)
    return Advice(
        plain=plain,
        choice=choice,
        cases=chosen_cases,
        adaptive=adaptive,
        fixed_k=_fixed_k(choice, candidates, nodes=chosen_cases[0].nodes),
        runner_up=runner_up,
        close=runner_up is not None and _is_close(choice.overall, runner_up.overall),
        batches=_batches(chosen_cases[0], cases),
        others=tuple(
            (other, max(_cases_at(cases, other), key=_overall)) for other in plains if other not in chosen_for
        ),
        break_even_tau=chosen_cases[0].break_even_tau(plain),
    )


def _choose(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate, or the one of the same proposer with k auto if it is nearly as fast."""
    best = fastest(candidates)
    if best is None:
        return None
    auto = fastest(each for each in _same_draft(candidates, best) if each.k == AUTO)
    return auto if auto is not None and auto.overall.value >= _AUTO_SHARE * best.overall.value else best


def _same_draft(candidates: Sequence[Candidate], choice: Candidate) -> list[Candidate]:
    """Return the candidates that differ from the choice in k alone."""
    return [each for each in candidates if replace(each.choice, k=choice.k) == choice.choice]


def _fixed_k(choice: Candidate, candidates: Sequence[Candidate], *, nodes: float) -> int:
    """Return the fastest fixed k of the same proposer, or else the mean draft length of k auto."""
    if not isinstance(choice.k, str):
        return choice.k
    fixed = fastest(each for each in _same_draft(candidates, choice) if each.k != AUTO)
    if fixed is not None and not isinstance(fixed.k, str):
        return fixed.k
    return ceil(nodes) or _DEFAULT_K


def _batches(best: Case, cases: Sequence[Case]) -> Batches:
    speedups = sorted(
        (case.batch, _overall(case))
        for case in cases
        if (case.choice, case.temperature) == (best.choice, best.temperature)
    )
    stops = None
    for batch, speedup in reversed(speedups):
        if speedup >= WORTHWHILE:
            break
        stops = batch
    return Batches(speedups=tuple(speedups), stops_paying_at_batch=stops)


def _is_close(estimate: Estimate, other: Estimate) -> bool:
    """Return whether two intervals overlap. Without intervals, compare the values."""
    bounds = (estimate.low, estimate.high, other.low, other.high)
    if None in bounds:
        return abs(estimate.value / other.value - 1) < _CLOSE
    low, high, other_low, other_high = (bound for bound in bounds if bound is not None)
    return low <= other_high and other_low <= high


def _case(cases: Sequence[Case], plain: Plain, choice: Candidate) -> Case:
    """Return the case of a candidate with the batch and the temperature of `plain`."""
    return next(case for case in _cases_at(cases, plain) if case.choice == choice.choice)


def _cases_at(cases: Sequence[Case], plain: Plain) -> list[Case]:
    """Return the cases with the batch and the temperature of `plain`."""
    key = (plain.batch, plain.temperature)
    return [case for case in cases if (case.batch, case.temperature) == key]


def _overall(case: Case) -> float:
    return case.overall.value
