"""Tree shapes, compared with all possible trees."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.errors import OutriderError
from outrider.propose.draft_model import tree_shapes


def every_tree(nodes: int, depth: int, breadth: int) -> set[frozenset[tuple[int, ...]]]:
    """Return all trees of so many nodes.

    A tree is the set of its nodes' paths of ranks. It contains the parent and the earlier siblings of each node.
    """
    if not nodes:
        return {frozenset()}
    trees = set()
    for smaller in every_tree(nodes - 1, depth, breadth):
        for parent in (*smaller, ()):
            rank = sum(path[:-1] == parent and len(path) == len(parent) + 1 for path in smaller)
            if rank < breadth and len(parent) < depth:
                trees.add(smaller | {(*parent, rank)})
    return trees


def expected_accepted(paths, child_probs) -> float:
    """Return the expected accepted tokens of a tree. `child_probs` returns the probabilities of a node's children."""
    total = 0.0
    for path in paths:
        prob = 1.0
        for i in range(len(path)):
            prob *= child_probs(path[:i])[path[i]]
        total += prob
    return total


def paths_of(shape: tree_shapes.TreeShape) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(shape.parent, shape.rank, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


def falling_probs(rng: random.Random, size: int, total: float = 1.0) -> list[float]:
    """Return `size` random probabilities in falling order, whose sum is `total`."""
    values = sorted((rng.random() for _ in range(size)), reverse=True)
    return [total * value / sum(values) for value in values]


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 2), (4, 4), (5, 2), (6, 3), (6, 6)])
def test_sequoia_is_the_best_of_all_trees(nodes, depth):
    rng = random.Random(nodes * 10 + depth)
    trees = set().union(*(every_tree(n, depth, 3) for n in range(nodes + 1)))
    for _ in range(20):
        acceptance = [rng.random() for _ in range(3)]  # a later child may be accepted more often than an earlier one
        probs = tree_shapes.child_probs(acceptance)
        best = max(expected_accepted(paths, lambda _, probs=probs: probs) for paths in trees)
        shape = tree_shapes.sequoia(acceptance, nodes=nodes, depth=depth)
        assert shape.expected_accepted == pytest.approx(best)
        assert len(shape.parent) <= nodes
        assert shape.depth <= depth
        assert expected_accepted(paths_of(shape), lambda _, probs=probs: probs) == pytest.approx(best)
        assert frozenset(paths_of(shape)) in trees


def test_sequoia_of_known_cases():
    # 0.8 + 0.64 + 0.512; a second child of the root would add only 0.1.
    assert tree_shapes.sequoia([0.8, 0.5], nodes=3, depth=9).parent == (-1, 0, 1)
    assert tree_shapes.sequoia([0.5, 0.9], nodes=2, depth=9).parent == (-1, -1)
    assert tree_shapes.sequoia([0.5], nodes=9, depth=2).parent == (-1, 0)
    # A child that is never accepted is left out.
    assert tree_shapes.sequoia([1.0, 1.0], nodes=4, depth=2).parent == (-1, 0)


def test_child_probs_of_known_rates():
    assert tree_shapes.child_probs([0.5, 0.5, 1.0]) == (0.5, 0.25, 0.25)
    assert tree_shapes.child_probs([]) == ()


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_best_first_is_the_best_of_all_trees(nodes):
    rng = random.Random(nodes)
    trees = every_tree(nodes, nodes, 3)
    for _ in range(20):
        known: dict[tuple[int, ...], list[float]] = {}

        def child_probs(path, known=known):
            return known.setdefault(path, falling_probs(rng, 3, rng.random()))

        shape = tree_shapes.best_first(child_probs, nodes)
        best = max(expected_accepted(paths, child_probs) for paths in trees)
        assert shape.expected_accepted == pytest.approx(best)
        assert expected_accepted(paths_of(shape), child_probs) == pytest.approx(best)
        assert list(shape.accept_prob) == sorted(shape.accept_prob, reverse=True)


def test_best_first_equals_sequoia_if_all_nodes_have_the_same_children():
    rng = random.Random(3)
    for _ in range(30):
        probs = falling_probs(rng, 4, rng.random())
        none_before = 1.0
        rates = []
        for prob in probs:
            rates.append(prob / none_before)
            none_before -= prob
        for nodes in (1, 5, 16):
            shape = tree_shapes.best_first(lambda _, probs=probs: probs, nodes)
            sequoia = tree_shapes.sequoia(rates, nodes=nodes, depth=nodes)
            assert shape.expected_accepted == pytest.approx(sequoia.expected_accepted)


def test_best_first_of_a_finite_tree():
    assert tree_shapes.best_first(lambda path: (0.5,) if len(path) < 2 else (), 9).parent == (-1, 0)
    assert tree_shapes.best_first(lambda _: (), 9) == tree_shapes.TreeShape(parent=(), rank=(), accept_prob=())
    assert tree_shapes.best_first(lambda _: (0.5,), 0).parent == ()


def test_independent_positions_give_the_likeliest_prefixes():
    rng = random.Random(8)
    for _ in range(20):
        marginals = [falling_probs(rng, 4) for _ in range(3)]
        prefixes = [path for size in (1, 2, 3) for path in itertools.product(range(4), repeat=size)]
        probs = sorted((prefix_prob(path, marginals) for path in prefixes), reverse=True)
        for nodes in (1, 7, 30, 84, 100):
            shape = tree_shapes.independent_positions(marginals, nodes)
            assert list(shape.accept_prob) == pytest.approx(probs[:nodes])
            assert [prefix_prob(path, marginals) for path in paths_of(shape)] == pytest.approx(list(shape.accept_prob))
            assert len(set(paths_of(shape))) == min(nodes, 84)


def prefix_prob(path, marginals) -> float:
    prob = 1.0
    for depth, rank in enumerate(path):
        prob *= marginals[depth][rank]
    return prob


def test_best_size_is_the_cheapest_of_all_sizes():
    rng = random.Random(4)
    for _ in range(20):
        acceptance = [rng.random() for _ in range(3)]
        draft = rng.random() / 4
        base = rng.random()
        per_token = rng.random() / 8

        def verify(n, base=base, per_token=per_token):
            return base + per_token * n

        size = tree_shapes.best_size(acceptance, draft=draft, verify=verify, nodes=7, depth=5)
        options = []
        for depth in range(6):
            for n in range(8):
                if bool(depth) == bool(n):
                    expected = tree_shapes.sequoia(acceptance, nodes=n, depth=depth).expected_accepted
                    options.append((depth * draft + verify(n)) / (1 + expected))
        assert size.seconds == pytest.approx(min(options))
        expected = tree_shapes.sequoia(acceptance, nodes=size.nodes, depth=size.depth).expected_accepted
        assert size.seconds == pytest.approx((size.depth * draft + verify(size.nodes)) / (1 + expected))


def test_best_size_is_zero_if_speculation_does_not_pay():
    size = tree_shapes.best_size([0.3], draft=1.0, verify=lambda n: 1.0 + n, nodes=4, depth=4)
    assert (size.nodes, size.depth, size.seconds) == (0, 0, 1.0)


def test_pruning_threshold_is_the_probability_of_the_last_node_within_the_budget():
    descendants = tree_shapes.best_first(lambda _: (0.6, 0.2), 20).accept_prob
    grown = tree_shapes.best_first(lambda _: (0.6, 0.2), 7)
    assert tree_shapes.pruning_threshold((), (0.6, 0.2), descendants, 7) == pytest.approx(grown.accept_prob[-1])
    assert tree_shapes.pruning_threshold((0.5, 0.4), (), descendants, 2) == 0.4
    assert tree_shapes.pruning_threshold((0.5, 0.4), (), descendants, 3) == 0.0
    assert tree_shapes.pruning_threshold((0.5, 0.1), (0.3,), (0.9,), 2) == 0.3
    assert tree_shapes.pruning_threshold((0.5, 0.1), (0.3,), (0.9,), 3) == pytest.approx(0.27)


def test_impossible_trees_are_rejected():
    with pytest.raises(OutriderError, match="from 0 to 1"):
        tree_shapes.sequoia([1.5], nodes=3, depth=3)
    with pytest.raises(OutriderError, match="at least 0"):
        tree_shapes.sequoia([0.5], nodes=-1, depth=3)
