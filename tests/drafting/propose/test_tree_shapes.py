"""Tree shapes, compared with all possible trees."""

import itertools
import random

import pytest

from outrider.drafting.propose.draft_model import tree_shapes


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


def test_best_first_of_a_finite_tree():
    assert tree_shapes.best_first(lambda path: (0.5,) if len(path) < 2 else (), 9).parent == (-1, 0)
    assert tree_shapes.best_first(lambda _: (), 9) == tree_shapes.TreeShape(parent=(), rank=(), accept_prob=())
    assert tree_shapes.best_first(lambda _: (0.5,), 0).parent == ()


def test_best_first_of_positions_that_ignore_earlier_tokens():
    rng = random.Random(8)
    for _ in range(20):
        marginals = [falling_probs(rng, 4) for _ in range(3)]
        prefixes = [path for size in (1, 2, 3) for path in itertools.product(range(4), repeat=size)]
        probs = sorted((prefix_prob(path, marginals) for path in prefixes), reverse=True)
        for nodes in (1, 7, 30, 84, 100):
            shape = tree_shapes.best_first(lambda path, m=marginals: m[len(path)] if len(path) < 3 else (), nodes)
            assert list(shape.accept_prob) == pytest.approx(probs[:nodes])
            assert [prefix_prob(path, marginals) for path in paths_of(shape)] == pytest.approx(list(shape.accept_prob))
            assert len(set(paths_of(shape))) == min(nodes, 84)


def prefix_prob(path, marginals) -> float:
    prob = 1.0
    for depth, rank in enumerate(path):
        prob *= marginals[depth][rank]
    return prob


def test_pruning_threshold_is_the_probability_of_the_last_node_within_the_budget():
    descendants = tree_shapes.best_first(lambda _: (0.6, 0.2), 20).accept_prob
    grown = tree_shapes.best_first(lambda _: (0.6, 0.2), 7)
    assert tree_shapes.pruning_threshold((), (0.6, 0.2), descendants, 7) == pytest.approx(grown.accept_prob[-1])
    assert tree_shapes.pruning_threshold((0.5, 0.4), (), descendants, 2) == 0.4
    assert tree_shapes.pruning_threshold((0.5, 0.4), (), descendants, 3) == 0.0
    assert tree_shapes.pruning_threshold((0.5, 0.1), (0.3,), (0.9,), 2) == 0.3
    assert tree_shapes.pruning_threshold((0.5, 0.1), (0.3,), (0.9,), 3) == pytest.approx(0.27)
