"""Why the sampling tests fail: the known defects whose distributions fit the counts of all tests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from outrider.lab.audit.server.distribution import Sampled
from outrider.lab.audit.server.hypotheses import EXACT, Hypothesis
from outrider.lab.audit.statistics import power

_INCLUDED = 0.999  # power from which a test is sure to find a defect


def diagnose(tests: Sequence[Sampled], defects: Sequence[Hypothesis], *, level: float) -> dict[str, Any]:
    """Compare the counts with the distribution of every known defect.

    A defect explains a server if no test rejects its distribution. Its gain is how much more likely the counts are than
    under the distribution of the model, in nats.

    Returns:
        `causes`: the defects that explain all tests, best first. Several of them cannot be told apart from the counts.
        `closest`: the likeliest defect, for servers that no defect explains.
    """
    for test in tests:
        test.tree.prepare(defects, test.case.params)
    exact = sum(test.log_likelihood(EXACT) for test in tests)
    best: dict[str, dict[str, Any]] = {}
    for defect in defects:
        results = [test.compare(defect) for test in tests]
        rejected = [test.case.name for test, result in zip(tests, results, strict=True) if result.p_value < level]
        found = {
            "cause": defect.cause,
            "gain": sum(test.log_likelihood(defect) for test in tests) - exact,
            "smallest_p_value": min((result.p_value for result in results), default=1.0),
            "rejected_by": rejected,
        }
        known = best.get(defect.cause)
        if known is None or _order(found) < _order(known):
            best[defect.cause] = found
    ranked = sorted(best.values(), key=_order)
    causes = [each for each in ranked if not each["rejected_by"]]
    return {"causes": causes, "closest": ranked[0] if ranked and not causes else None}


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


def _order(found: dict[str, Any]) -> tuple[int, float]:
    return len(found["rejected_by"]), -found["gain"]
