"""Tests of `Stats` and `StatsAccumulator`."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.stats import Stats, StatsAccumulator


@st.composite
def passes(draw):
    """Return (draft depth, accepted tokens, emitted tokens) of a pass."""
    offered = draw(st.integers(0, 4))
    accepted = draw(st.integers(0, offered))
    return offered, accepted, accepted + 1


PASSES = st.lists(passes(), max_size=6)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


@PROPERTY
@given(PASSES, PASSES, st.booleans())
def test_sum_equals_stats_of_all_passes(one, two, exact):
    both = Stats.of_passes(one + two, prompt=5, exact=exact)
    assert Stats.of_passes(one, prompt=2) + Stats.of_passes(two, prompt=3, exact=exact) == both


@PROPERTY
@given(PASSES, PASSES, PASSES)
def test_addition_is_associative_and_commutative(one, two, three):
    a, b, c = (Stats.of_passes(passes) for passes in (one, two, three))
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Stats() == a
    assert sum([a, b, c], Stats()) == a + b + c


@PROPERTY
@given(PASSES)
def test_counts_of_passes_are_consistent(counts):
    stats = Stats.of_passes(counts)
    assert stats.output_tokens == sum(stats.accepted) + stats.passes
    assert stats.draft_tokens == sum(stats.offered)
    assert len(stats.offered) == len(stats.reached) == len(stats.accepted) == len(stats.acceptance)
    for offered, reached, accepted in zip(stats.offered, stats.reached, stats.accepted, strict=True):
        assert accepted <= reached <= offered
    for accepted, next_reached in zip(stats.accepted, stats.reached[1:], strict=False):
        assert next_reached <= accepted
    assert all(0 <= rate <= 1 for rate in stats.acceptance)


@PROPERTY
@given(st.lists(PASSES, max_size=4), st.booleans())
def test_accumulator_equals_the_sum_of_its_rounds(rounds, exact):
    expected = Stats(exact=exact)
    accumulator = StatsAccumulator(exact=exact)
    for counts in rounds:
        accumulator.add(counts, drafted=7, prompt=2)
        accumulator.add_round(draft=0.25, target=0.5, host=0.125)
        stats = Stats.of_passes(counts, drafted=7, prompt=2, exact=exact)
        expected += replace(stats, rounds=1, draft_seconds=0.25, target_seconds=0.5, host_seconds=0.125)
        assert accumulator.total == expected


def test_one_inexact_round_makes_the_sum_inexact():
    exact, inexact = Stats(), Stats(exact=False)
    assert (exact + exact).exact
    assert not (exact + inexact).exact
    assert not (inexact + exact).exact
    assert not (inexact + inexact + exact).exact


def test_acceptance_is_conditional_on_accepted_ancestors():
    stats = Stats.of_passes([(3, 3, 4), (3, 1, 2), (2, 2, 3), (1, 0, 1), (0, 0, 1)])
    assert stats.offered == (4, 3, 2)
    assert stats.reached == (4, 3, 1)
    assert stats.accepted == (3, 2, 1)
    assert stats.acceptance == pytest.approx((3 / 4, 2 / 3, 1))
    assert stats.tau == pytest.approx(11 / 5)


def test_acceptance_of_a_position_that_was_not_reached_is_zero():
    stats = Stats.of_passes([(2, 0, 1)])
    assert stats.reached == (1, 0)
    assert stats.acceptance == (0.0, 0.0)


def test_empty_stats_do_not_divide_by_zero():
    stats = Stats()
    assert stats.tau == 0
    assert stats.acceptance == ()
    assert stats.seconds == 0
    assert stats.as_dict()["target_ms"] is None


def test_times_that_were_not_measured_are_none():
    report = Stats.of_passes([(2, 1, 2)]).as_dict()
    assert [report[name] for name in ("draft_ms", "target_ms", "host_ms")] == [None] * 3
    assert Stats(rounds=2, target_seconds=0.01).as_dict()["draft_ms"] == 0


def test_times_of_as_dict_are_per_round():
    stats = Stats(rounds=4, passes=8, output_tokens=24, draft_seconds=0.004, target_seconds=0.02, host_seconds=0.002)
    report = stats.as_dict()
    assert report["draft_ms"] == pytest.approx(1)
    assert report["target_ms"] == pytest.approx(5)
    assert report["host_ms"] == pytest.approx(0.5)
    assert report["tau"] == 3
    assert report["exact"] is True
    assert stats.seconds == pytest.approx(0.026)


def test_seconds_add_up():
    a, b = Stats(rounds=1, draft_seconds=1.0, host_seconds=0.5), Stats(rounds=2, target_seconds=2.0)
    total = a + b
    assert (total.rounds, total.draft_seconds, total.target_seconds, total.host_seconds) == (3, 1.0, 2.0, 0.5)
