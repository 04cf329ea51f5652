"""Why the sampling tests fail: the known defects whose distributions fit the counts of all tests."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.audit.server.distribution import Sampled
from outrider.lab.audit.server.hypotheses import EXACT, Hypothesis
from outrider.lab.audit.statistics import power

_INCLUDED = 0.999  # power from which a test is sure to find a defect


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A known defect, and how well it explains the counts."""

    cause: str
    gain: float  # log-likelihood of the counts, above that of the model's own distribution, in nats
    smallest_p_value: float
    rejected_by: list[str]  # tests whose counts it does not explain

    @property
    def order(self) -> tuple[int, float]:
        """The best explanation is the smallest."""
        return len(self.rejected_by), -self.gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why the tests fail, as in the JSON document."""

    causes: list[Cause]  # defects that explain all tests, best first; the counts cannot tell them apart
    closest: Cause | None  # the likeliest defect, for servers that no defect explains


def diagnose(tests: Sequence[Sampled], defects: Sequence[Hypothesis], *, level: float) -> Diagnosis:
    """Return the known defects whose distributions fit the counts, and the closest one if none fits.

    A defect explains a server if no test rejects its distribution.
    """
    for test in tests:
        test.tree.prepare(defects, test.case.params)
    exact = sum(test.log_likelihood(EXACT) for test in tests)
    best: dict[str, Cause] = {}
    for defect in defects:
        results = [test.compare(defect) for test in tests]
        rejected = [test.case.name for test, result in zip(tests, results, strict=True) if result.p_value < level]
        found = Cause(
            cause=defect.cause,
            gain=sum(test.log_likelihood(defect) for test in tests) - exact,
            smallest_p_value=min((result.p_value for result in results), default=1.0),
            rejected_by=rejected,
        )
        known = best.get(defect.cause)
        if known is None or found.order < known.order:
            best[defect.cause] = found
    ranked = sorted(best.values(), key=lambda each: each.order)
    causes = [each for each in ranked if not each.rejected_by]
    return Diagnosis(causes=causes, closest=ranked[0] if ranked and not causes else None)


def powers(tests: Sequence[Sampled], defects: Sequence[Hypothesis], *, level: float) -> dict[str, float]:
    """Return the probability that the tests together find each known defect, for the most harmless of its variants."""
    for test in tests:
        test.tree.prepare(defects, test.case.params)
    found: dict[str, list[float]] = defaultdict(list)
    for defect in defects:
        missed = 1.0
        for test in tests:
            missed *= 1 - _power(test, defect, level)
        found[defect.cause].append(1 - missed)
    return {cause: min(values) for cause, values in found.items()}


def is_sure(value: float) -> bool:
    """Return whether a power is as good as certain."""
    return value >= _INCLUDED


def _power(test: Sampled, defect: Hypothesis, level: float) -> float:
    distribution = test.tree.distribution(EXACT, test.case.params)
    other = test.tree.distribution(defect, test.case.params)
    impossible = sum(prob for outcome, prob in other.items() if prob > 0 and not distribution.get(outcome))
    if impossible > 1e-9:  # one such outcome is enough
        return 1 - (1 - impossible) ** test.samples
    distance = sum((other.get(outcome, 0.0) - prob) ** 2 / prob for outcome, prob in distribution.items() if prob > 0)
    dof = test.compare(EXACT).dof
    if not dof or distance < 1e-12 or not math.isfinite(distance):
        return 0.0
    return power(dof, test.samples * distance, level, allowed=test.samples * test.tolerance)
