"""Shapes of trees against all trees there are."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.errors import OutriderError
from outrider.propose.draft_model import tree_shapes


def every_tree(nodes: int, depth: int, breadth: int) -> set[frozenset[tuple[int, ...]]]:
    """All trees of so many nodes: sets of paths of ranks, in which each path's parent and earlier siblings are too."""
    if not nodes:
        return {frozenset()}
    out = set()
    for smaller in every_tree(nodes - 1, depth, breadth):
        for above in (*smaller, ()):
            rank = sum(path[:-1] == above and len(path) == len(above) + 1 for path in smaller)
            if rank < breadth and len(above) < depth:
                out.add(smaller | {(*above, rank)})
    return out


def worth(paths, share) -> float:
    """Expected guesses kept, where `share` says what each step of a path is worth."""
    total = 0.0
    for path in paths:
        chance = 1.0
        for i in range(len(path)):
            chance *= share(path[:i])[path[i]]
        total += chance
    return total


def paths_of(shape: tree_shapes.Shape) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for above, rank in zip(shape.parent, shape.rank, strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), rank))
    return paths


def falling(chance: random.Random, size: int, most: float = 1.0) -> list[float]:
    values = sorted((chance.random() for _ in range(size)), reverse=True)
    return [most * value / sum(values) for value in values]


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (3, 2), (4, 4), (5, 2), (6, 3), (6, 6)])
def test_sequoia_is_the_best_of_all_trees(nodes, depth):
    chance = random.Random(nodes * 10 + depth)
    trees = set().union(*(every_tree(n, depth, 3) for n in range(nodes + 1)))
    for _ in range(20):
        acceptance = [chance.random() for _ in range(3)]  # a later child may be kept more often than an earlier one
        share = tree_shapes.shares(acceptance)
        best = max(worth(paths, lambda _, share=share: share) for paths in trees)
        shape = tree_shapes.sequoia(acceptance, nodes=nodes, depth=depth)
        assert shape.kept == pytest.approx(best)
        assert len(shape.parent) <= nodes
        assert shape.depth <= depth
        assert worth(paths_of(shape), lambda _, share=share: share) == pytest.approx(best)
        assert frozenset(paths_of(shape)) in trees


def test_sequoia_by_hand():
    shape = tree_shapes.sequoia([0.8, 0.5], nodes=3, depth=9)
    assert shape.parent == (-1, 0, 1)  # 0.8 + 0.64 + 0.512, and a second child of the root would bring 0.1
    assert tree_shapes.sequoia([0.5, 0.9], nodes=2, depth=9).parent == (-1, -1)
    assert tree_shapes.sequoia([0.5], nodes=9, depth=2).parent == (-1, 0)
    assert tree_shapes.sequoia([1.0, 1.0], nodes=4, depth=2).parent == (
        -1,
        0,
    )  # nobody needs a child that is never kept


def test_shares_of_rates():
    assert tree_shapes.shares([0.5, 0.5, 1.0]) == (0.5, 0.25, 0.25)
    assert tree_shapes.shares([]) == ()


@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_best_first_is_the_best_of_all_trees(nodes):
    chance = random.Random(nodes)
    trees = every_tree(nodes, nodes, 3)
    for _ in range(20):
        known: dict[tuple[int, ...], list[float]] = {}

        def share(path, known=known):
            return known.setdefault(path, falling(chance, 3, chance.random()))

        shape = tree_shapes.best_first(share, nodes)
        best = max(worth(paths, share) for paths in trees)
        assert shape.kept == pytest.approx(best)
        assert worth(paths_of(shape), share) == pytest.approx(best)
        assert list(shape.accept_prob) == sorted(shape.accept_prob, reverse=True)


def test_best_first_is_sequoia_where_every_node_is_alike():
    chance = random.Random(3)
    for _ in range(30):
        share = falling(chance, 4, chance.random())
        left, rates = 1.0, []
        for each in share:
            rates.append(each / left)
            left -= each
        for nodes in (1, 5, 16):
            grown = tree_shapes.best_first(lambda _, share=share: share, nodes)
            assert grown.kept == pytest.approx(tree_shapes.sequoia(rates, nodes=nodes, depth=nodes).kept)


def test_best_first_stops_where_there_is_no_more():
    assert tree_shapes.best_first(lambda path: (0.5,) if len(path) < 2 else (), 9).parent == (-1, 0)
    assert tree_shapes.best_first(lambda _: (), 9) == tree_shapes.Shape(parent=(), rank=(), accept_prob=())
    assert tree_shapes.best_first(lambda _: (0.5,), 0).parent == ()


def test_factorised_is_the_best_prefixes():
    chance = random.Random(8)
    for _ in range(20):
        marginals = [falling(chance, 4) for _ in range(3)]
        prefixes = [path for size in (1, 2, 3) for path in itertools.product(range(4), repeat=size)]
        values = sorted((worth_of(path, marginals) for path in prefixes), reverse=True)
        for nodes in (1, 7, 30, 84, 100):
            shape = tree_shapes.factorised(marginals, nodes)
            assert list(shape.accept_prob) == pytest.approx(values[:nodes])
            assert [worth_of(path, marginals) for path in paths_of(shape)] == pytest.approx(list(shape.accept_prob))
            assert len(set(paths_of(shape))) == min(nodes, 84)


def worth_of(path, marginals) -> float:
    chance = 1.0
    for depth, rank in enumerate(path):
        chance *= marginals[depth][rank]
    return chance


def test_size_is_the_cheapest_of_all():
    chance = random.Random(4)
    for _ in range(20):
        acceptance, draft = [chance.random() for _ in range(3)], chance.random() / 4
        base, step = chance.random(), chance.random() / 8

        def verify(n, base=base, step=step):
            return base + step * n

        found = tree_shapes.best_size(acceptance, draft=draft, verify=verify, nodes=7, depth=5)
        options = [
            (depth * draft + verify(n)) / (1 + tree_shapes.sequoia(acceptance, nodes=n, depth=depth).kept)
            for depth in range(6)
            for n in range(8)
            if bool(depth) == bool(n)
        ]
        assert found.seconds == pytest.approx(min(options))
        kept = tree_shapes.sequoia(acceptance, nodes=found.nodes, depth=found.depth).kept
        assert found.seconds == pytest.approx((found.depth * draft + verify(found.nodes)) / (1 + kept))


def test_size_is_nothing_where_nothing_pays():
    found = tree_shapes.best_size([0.3], draft=1.0, verify=lambda n: 1.0 + n, nodes=4, depth=4)
    assert (found.nodes, found.depth, found.seconds) == (0, 0, 1.0)


def test_bar_is_the_chance_of_the_last_node_that_fits():
    ahead = tree_shapes.best_first(lambda _: (0.6, 0.2), 20).accept_prob
    grown = tree_shapes.best_first(lambda _: (0.6, 0.2), 7)
    assert tree_shapes.bar((), (0.6, 0.2), ahead, 7) == pytest.approx(grown.accept_prob[-1])
    assert tree_shapes.bar((0.5, 0.4), (), ahead, 2) == 0.4
    assert tree_shapes.bar((0.5, 0.4), (), ahead, 3) == 0.0
    assert tree_shapes.bar((0.5, 0.1), (0.3,), (0.9,), 2) == 0.3
    assert tree_shapes.bar((0.5, 0.1), (0.3,), (0.9,), 3) == pytest.approx(0.27)


def test_impossible_trees_are_refused():
    with pytest.raises(OutriderError, match="from 0 to 1"):
        tree_shapes.sequoia([1.5], nodes=3, depth=3)
    with pytest.raises(OutriderError, match="at least 0"):
        tree_shapes.sequoia([0.5], nodes=-1, depth=3)
