"""Tests of significance against tables, against simulation, and at their edges."""

import math

import pytest
import torch

from outrider.audit.statistics import chi_square_tail, g_test, wilson
from outrider.errors import OutriderError


@pytest.mark.parametrize(
    ("value", "dof", "tail"),
    [(3.841459, 1, 0.05), (11.070498, 5, 0.05), (23.209251, 10, 0.01), (149.449253, 100, 0.001), (0.0, 3, 1.0)],
)
def test_chi_square_tail_agrees_with_tables(value, dof, tail):
    assert chi_square_tail(value, dof) == pytest.approx(tail, rel=1e-5)


def test_g_is_the_log_likelihood_ratio():
    # 80 and 10 where 3 to 1 was expected; with two cells Williams' correction is 1 + (16 / 3 - 1) / (6 * 90).
    found = g_test([80, 10], [0.75, 0.25])
    statistic = 2 * (80 * math.log(80 / 67.5) + 10 * math.log(10 / 22.5))
    assert found.statistic == pytest.approx(statistic)
    assert found.statistic == pytest.approx(10.9652, abs=1e-3)
    assert found.dof == 1
    assert found.p_value == pytest.approx(chi_square_tail(statistic / (1 + (16 / 3 - 1) / 540), 1))


def test_cells_that_expect_too_little_are_pooled():
    law = [0.5, 0.3, 0.1, 0.06, 0.04]
    assert g_test([50, 30, 10, 6, 4], law).dof == 4 - 1  # 0.04 joins 0.06, the smallest of the others
    assert g_test([25, 15, 5, 3, 2], law).dof == 4 - 1  # 0.06 and 0.04 make one cell
    assert g_test([5, 3, 1, 1, 0], law).dof == 2 - 1
    assert g_test([3, 0, 0, 0, 0], law).p_value == 1.0  # too few observations to say anything
    assert g_test([0, 0], [0.5, 0.5]).p_value == 1.0


def test_the_impossible_is_never_forgiven():
    found = g_test([500, 500, 1], [0.5, 0.5, 0.0])
    assert found.p_value == 0.0
    assert math.isinf(found.statistic)
    assert g_test([500, 500, 0], [0.5, 0.5, 0.0]).p_value > 0.9


@pytest.mark.parametrize("cells", [8, 20, 60])
def test_a_true_law_is_rejected_as_often_as_promised(cells):
    generator = torch.Generator().manual_seed(cells)
    law = torch.rand(cells, generator=generator, dtype=torch.float64) ** 3
    law /= law.sum()
    drawn = torch.multinomial(law.expand(2000, -1), 800, replacement=True, generator=generator)
    counts = torch.stack([row.bincount(minlength=cells) for row in drawn]).tolist()
    tails = torch.tensor([g_test(count, law.tolist()).p_value for count in counts])
    for level in (0.5, 0.1, 0.01):
        spread = math.sqrt(level * (1 - level) / len(counts))
        assert abs(float((tails < level).double().mean()) - level) < 4 * spread


def test_a_wrong_law_is_rejected():
    generator = torch.Generator().manual_seed(0)
    true = torch.tensor([0.45, 0.35, 0.2])
    counts = torch.multinomial(true, 4000, replacement=True, generator=generator).bincount().tolist()
    assert g_test(counts, [0.45, 0.35, 0.2]).p_value > 0.01
    assert g_test(counts, [0.4, 0.4, 0.2]).p_value < 1e-6


@pytest.mark.parametrize(
    ("observed", "expected"),
    [([1, 2], [1.0]), ([1, 2], [0.5, 0.6]), ([1, 2], [1.5, -0.5]), ([-1, 2], [0.5, 0.5]), ([1], [math.nan])],
)
def test_what_is_no_law_is_refused(observed, expected):
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
def test_wilson_agrees_with_tables(successes, trials, low, high):
    found = wilson(successes, trials)
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_wilson_refuses_what_is_no_rate():
    with pytest.raises(OutriderError, match="no rate"):
        wilson(3, 2)
