"""Tests of the equations of speculative decoding, against sums over all outcomes and published values."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import OutriderError
from outrider.drafting.plan.speedup import decode_limit, expected_tau, speedup

RATE = st.floats(0, 1)


@given(st.lists(RATE, max_size=6))
def test_expected_tau_equals_the_mean_over_outcomes(acceptance):
    mean = 0.0
    reached = 1.0
    for accepted, rate in enumerate(acceptance):
        mean += reached * (1 - rate) * (accepted + 1)
        reached *= rate
    mean += reached * (len(acceptance) + 1)
    assert expected_tau(acceptance) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("alpha", "k", "factor"), [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)]
)
def test_speedup_equals_the_paper(alpha, k, factor):
    """Leviathan et al. 2023, table 1: drafting costs nothing."""
    assert speedup(expected_tau([alpha] * k), k=k, draft=0.0) == pytest.approx(factor, abs=0.005)


def test_speedup_of_plain_decoding_is_one():
    assert speedup(expected_tau([]), k=0, draft=0.3, verify=0.9, host=0.1) == pytest.approx(1)


@given(st.floats(0.01, 0.99), st.floats(0, 1.5))
def test_speculation_pays_if_acceptance_exceeds_the_draft_cost(alpha, cost):
    """Corollary 3.9 of the same paper."""
    best = max(speedup(expected_tau([alpha] * k), k=k, draft=cost) for k in range(1, 17))
    assert (best > 1) == (alpha > cost) or math.isclose(alpha, cost, rel_tol=1e-9)


def test_decode_limit():
    assert decode_limit(35e6, 35e9) == 1000


@pytest.mark.parametrize(
    "call",
    [
        lambda: expected_tau([0.5, 1.5]),
        lambda: expected_tau([math.nan]),
        lambda: expected_tau([-0.1] * 3),
        lambda: speedup(2.0, k=3, draft=-0.1),
        lambda: speedup(2.0, k=0, draft=1.0, verify=0.0),
        lambda: decode_limit(0, 1e9),
        lambda: decode_limit(1e6, -1.0),
    ],
)
def test_errors_of_invalid_arguments(call):
    with pytest.raises(OutriderError):
        call()
