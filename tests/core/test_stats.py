"""Stats add up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from outrider.core.stats import Stats, StatsAccumulator


@some.composite
def passes(draw):
    """(deepest guess, accepted, emitted): what a pass can be."""
    offered = draw(some.integers(0, 4))
    accepted = draw(some.integers(0, offered))
    return offered, accepted, accepted + 1


MANY = some.lists(passes(), max_size=6)
LAWS = settings(deadline=None, derandomize=True, max_examples=50)


@LAWS
@given(MANY, MANY, some.booleans())
def test_stats_of_a_whole_are_the_sum_of_its_parts(left, right, exact):
    whole = Stats.of_passes(left + right, prompt=5, exact=exact)
    assert Stats.of_passes(left, prompt=2) + Stats.of_passes(right, prompt=3, exact=exact) == whole


@LAWS
@given(MANY, MANY, MANY)
def test_addition_is_a_sum(one, two, three):
    a, b, c = (Stats.of_passes(each) for each in (one, two, three))
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Stats() == a
    assert sum([a, b, c], Stats()) == a + b + c


@LAWS
@given(MANY)
def test_every_count_is_one_of_the_passes(triples):
    stats = Stats.of_passes(triples)
    assert stats.output_tokens == sum(stats.accepted) + stats.passes
    assert stats.draft_tokens == sum(stats.offered)
    assert len(stats.offered) == len(stats.reached) == len(stats.accepted) == len(stats.acceptance)
    for offered, reached, accepted in zip(stats.offered, stats.reached, stats.accepted, strict=True):
        assert accepted <= reached <= offered
    for kept, reached in zip(stats.accepted, stats.reached[1:], strict=False):
        assert reached <= kept
    assert all(0 <= share <= 1 for share in stats.acceptance)


@LAWS
@given(some.lists(MANY, max_size=4), some.booleans())
def test_a_tally_says_what_its_rounds_add_up_to(rounds, exact):
    total, tally = Stats(exact=exact), StatsAccumulator(exact=exact)
    for triples in rounds:
        tally.add(triples, drafted=7, prompt=2)
        tally.took(propose=0.25, target=0.5, host=0.125)
        counted = Stats.of_passes(triples, drafted=7, prompt=2, exact=exact)
        total += replace(counted, rounds=1, draft_seconds=0.25, target_seconds=0.5, host_seconds=0.125)
        assert tally.total == total


def test_one_inexact_round_makes_the_sum_inexact():
    exact, inexact = Stats(), Stats(exact=False)
    assert (exact + exact).exact
    assert not (exact + inexact).exact
    assert not (inexact + exact).exact
    assert not (inexact + inexact + exact).exact


def test_acceptance_is_conditional_on_what_came_before():
    stats = Stats.of_passes([(3, 3, 4), (3, 1, 2), (2, 2, 3), (1, 0, 1), (0, 0, 1)])
    assert stats.offered == (4, 3, 2)
    assert stats.reached == (4, 3, 1)
    assert stats.accepted == (3, 2, 1)
    assert stats.acceptance == pytest.approx((3 / 4, 2 / 3, 1))
    assert stats.tau == pytest.approx(11 / 5)


def test_a_position_nobody_reached_has_no_acceptance():
    stats = Stats.of_passes([(2, 0, 1)])
    assert stats.reached == (1, 0)
    assert stats.acceptance == (0.0, 0.0)


def test_nothing_divides_by_nothing():
    stats = Stats()
    assert stats.tau == 0
    assert stats.acceptance == ()
    assert stats.seconds == 0
    assert stats.as_dict()["target_ms"] == 0


def test_a_report_is_per_round():
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
