"""Prefix reuse and diversity of answers, on small examples and against a direct computation."""

import random
from itertools import combinations
from statistics import mean

import pytest

from outrider.train.rl.overlap import Overlap, distinct_answers, prefix_diversity, prefix_reuse


def common(one, other):
    return max(i for i in range(min(len(one), len(other)) + 1) if one[:i] == other[:i])


def test_prefix_reuse_takes_the_nearest_previous_answer():
    previous = [(1, 2, 9), (1, 2, 3, 4), (7,)]
    answers = [(1, 2, 3, 5), (1, 2, 3, 4), (7, 8), (5, 5), (1, 2), ()]
    assert prefix_reuse(answers, previous) == [3 / 4, 1.0, 1 / 2, 0.0, 1.0]
    assert prefix_reuse(answers, []) == []
    assert prefix_reuse([], previous) == []
    assert prefix_reuse([(1, 2)], [()]) == [0.0]


def test_diversity():
    same, first, last = [(1, 2, 3)] * 3, [(1, 2), (3, 2), (5, 2)], [(1, 2, 3, 4), (1, 2, 3, 5)]
    assert [distinct_answers(each) for each in (same, first, last, [(1,)], [])] == [1 / 3, 1.0, 1.0, 1.0, None]
    assert [prefix_diversity(each) for each in (same, first, last, [(1,)], [])] == [0.0, 1.0, 1 / 4, None, None]
    assert prefix_diversity([(1, 2), (1, 2, 3, 4)]) == 1 / 2  # the beginning of a longer answer is not the same answer
    assert prefix_diversity([(), ()]) == 0.0
    assert prefix_diversity([(), (1,)]) == 1.0


def test_figures_equal_a_direct_computation():
    chance = random.Random(0)
    for _ in range(50):
        drawn = [tuple(chance.choices((0, 1), k=chance.randint(1, 8))) for _ in range(24)]
        answers = drawn[:12]
        previous = drawn[12:]
        expected = [max(common(each, other) for other in previous) / len(each) for each in answers]
        assert prefix_reuse(answers, previous) == expected
        pairs = [1 - common(a, b) / max(len(a), len(b)) for a, b in combinations(answers, 2)]
        assert prefix_diversity(answers) == pytest.approx(mean(pairs))


def test_figures_of_a_step():
    groups = {"seen": [(1, 2), (1, 3), (1, 2)], "new": [(4, 4), (5, 5)]}
    overlap = Overlap.of(groups, {"seen": [(1, 2)], "other": [(4, 4)]})
    assert overlap.prefix_reuse == pytest.approx((1 + 1 / 2 + 1) / 3)  # the problem that was not seen does not count
    assert overlap.distinct_answers == pytest.approx((2 / 3 + 1) / 2)
    assert overlap.prefix_diversity == pytest.approx((mean([1 / 2, 1 / 2, 0]) + 1) / 2)
    assert Overlap.of(groups, {}).prefix_reuse is None
    assert Overlap.of({}, {}) == Overlap.of({"failed": []}, {"failed": []}) == Overlap()
