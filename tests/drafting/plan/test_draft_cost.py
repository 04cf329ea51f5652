"""Tests of the time of drafting: its fixed part is told apart from the part of a draft token."""

import pytest

from outrider.drafting.plan.draft_cost import DraftCost


def learned(cost, depths, *, per_round, per_token):
    for depth in depths:
        cost.learn(depth, per_round + per_token * depth if depth else 0.2, 4)
    return cost


def test_fixed_part_and_part_of_a_token_are_told_apart():
    cost = learned(DraftCost(), [1, 2, 4, 3, 1, 5] * 20, per_round=4.0, per_token=1.5)
    assert cost.of(3) == pytest.approx(4.0 + 3 * 1.5, rel=0.05)
    assert cost.per_token == pytest.approx(1.5, abs=0.25)


def test_calibrated_pass_holds_if_all_drafts_are_equally_deep():
    """Four draft tokens that take 8 passes: each takes one, and the rest is the fixed part."""
    cost = learned(DraftCost(), [4] * 50, per_round=4.0, per_token=1.0)
    assert cost.of(4) == pytest.approx(8.0, rel=0.05)
    assert 0.9 < cost.per_token < 1.6


def test_cost_is_never_negative():
    cost = learned(DraftCost(), [0, 8, 0, 8] * 10, per_round=-3.0, per_token=0.5)
    assert cost.per_round >= 0
    assert cost.per_token >= 0.25
