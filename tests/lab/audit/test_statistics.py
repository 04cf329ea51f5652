"""Tests of the G-test and the Wilson interval against tables and simulation."""

import math

import pytest
import torch

from outrider.errors import OutriderError
from outrider.lab.audit.statistics import chi_square_tail, g_test, wilson


@pytest.mark.parametrize(
    ("value", "dof", "tail"),
    [(3.841459, 1, 0.05), (11.070498, 5, 0.05), (23.209251, 10, 0.01), (149.449253, 100, 0.001), (0.0, 3, 1.0)],
)
def test_chi_square_tail_equals_tables(value, dof, tail):
    assert chi_square_tail(value, dof) == pytest.approx(tail, rel=1e-5)


def test_g_statistic_computed_by_hand():
    # The counts are 80 and 10, and 3 to 1 is expected. Williams' correction is 1 + (16 / 3 - 1) / (6 * 90).
    result = g_test([80, 10], [0.75, 0.25])
    statistic = 2 * (80 * math.log(80 / 67.5) + 10 * math.log(10 / 22.5))
    assert result.statistic == pytest.approx(statistic)
    assert result.statistic == pytest.approx(10.9652, abs=1e-3)
    assert result.dof == 1
    assert result.p_value == pytest.approx(chi_square_tail(statistic / (1 + (16 / 3 - 1) / 540), 1))


def test_cells_with_few_expected_observations_are_pooled():
    expected = [0.5, 0.3, 0.1, 0.06, 0.04]
    assert g_test([50, 30, 10, 6, 4], expected).dof == 4 - 1  # 0.04 is pooled with 0.06, the smallest other cell
    assert g_test([25, 15, 5, 3, 2], expected).dof == 4 - 1  # 0.06 and 0.04 are pooled
    assert g_test([5, 3, 1, 1, 0], expected).dof == 2 - 1
    assert g_test([3, 0, 0, 0, 0], expected).p_value == 1.0  # there are too few observations for a test
    assert g_test([0, 0], [0.5, 0.5]).p_value == 1.0


def test_outcome_of_probability_zero_fails():
    result = g_test([500, 500, 1], [0.5, 0.5, 0.0])
    assert result.p_value == 0.0
    assert math.isinf(result.statistic)
    assert g_test([500, 500, 0], [0.5, 0.5, 0.0]).p_value > 0.9


@pytest.mark.parametrize("cells", [8, 20, 60])
def test_right_distribution_is_rejected_at_the_stated_rate(cells):
    generator = torch.Generator().manual_seed(cells)
    probs = torch.rand(cells, generator=generator, dtype=torch.float64) ** 3
    probs /= probs.sum()
    samples = torch.multinomial(probs.expand(2000, -1), 800, replacement=True, generator=generator)
    counts = torch.stack([outcomes.bincount(minlength=cells) for outcomes in samples]).tolist()
    p_values = torch.tensor([g_test(count, probs.tolist()).p_value for count in counts])
    for level in (0.5, 0.1, 0.01):
        deviation = math.sqrt(level * (1 - level) / len(counts))
        assert abs(float((p_values < level).double().mean()) - level) < 4 * deviation


def test_wrong_distribution_is_rejected():
    generator = torch.Generator().manual_seed(0)
    probs = torch.tensor([0.45, 0.35, 0.2])
    counts = torch.multinomial(probs, 4000, replacement=True, generator=generator).bincount().tolist()
    assert g_test(counts, [0.45, 0.35, 0.2]).p_value > 0.01
    assert g_test(counts, [0.4, 0.4, 0.2]).p_value < 1e-6


@pytest.mark.parametrize(
    ("observed", "expected"),
    [([1, 2], [1.0]), ([1, 2], [0.5, 0.6]), ([1, 2], [1.5, -0.5]), ([-1, 2], [0.5, 0.5]), ([1], [math.nan])],
)
def test_errors_of_invalid_distributions(observed, expected):
    with pytest.raises(OutriderError, match="probabilities"):
        g_test(observed, expected)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (0, 0, 0.0, 1.0),
        (1, 1000, 0.00018, 0.00564),
    ],
)
def test_wilson_equals_tables(successes, trials, low, high):
    interval = wilson(successes, trials)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)


def test_wilson_error_of_more_successes_than_trials():
    with pytest.raises(OutriderError, match=r"3 successes in 2 trials .* is invalid"):
        wilson(3, 2)
