"""Trees of guesses against the plain way to walk them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from outrider.core import tree
from outrider.core.types import Draft
from outrider.verify.verdict import path_to

SIZES = some.integers(0, 7)


@some.composite
def parents(draw):
    """Rows of one size, each a tree whose parents precede their children."""
    size = draw(SIZES)
    rows = draw(some.integers(1, 4))
    return [[draw(some.integers(-1, node - 1)) for node in range(size)] for _ in range(rows)]


def draft_of(rows):
    parent = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1)
    size = parent.shape[1]
    return Draft(
        tokens=torch.zeros_like(parent),
        parent=parent,
        count=torch.full((len(rows),), size),
        kind=torch.zeros_like(parent),
        q=None,
        width=(size,) * len(rows),
        depth=(size,) * len(rows),
        chain=False,
    )


def climb(parent, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path[::-1]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(parents())
def test_ancestors_depths_and_paths(rows):
    draft = draft_of(rows)
    above, depth = tree.ancestors(draft.parent), tree.depths(draft)
    for b, parent in enumerate(rows):
        for node in range(-1, len(parent)):
            path = climb(parent, node)
            if node >= 0:
                assert above[b, node].nonzero().flatten().tolist() == path
                assert int(depth[b, node]) == len(path)
            found, length = path_to(draft, torch.full((len(rows),), node))
            assert found[b].tolist() == path + [-1] * (len(parent) - len(path))
            assert int(length[b]) == len(path)


@pytest.mark.parametrize("size", range(4))
def test_a_chain_is_a_tree(size):
    tokens = torch.arange(2 * size).view(2, size)
    draft = tree.chain(tokens, (size, size // 2))
    assert draft.parent.tolist() == [list(range(-1, size - 1))] * 2
    assert draft.count.tolist() == [size, size // 2]
    assert tree.valid_nodes(draft).sum(1).tolist() == [size, size // 2]
    assert tree.valid_nodes(draft)[0].all()
    assert torch.equal(tree.depths(draft), tree.ancestors(draft.parent).sum(-1))


def test_a_chain_keeps_the_law_of_each_guess():
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert tree.chain(tokens, (3,)).kind.tolist() == [[0, 0, 0]]
    assert tree.chain(tokens, (3,), kind=torch.tensor([[0, 1, 2]])).kind.tolist() == [[0, 1, 2]]


def test_no_guesses():
    draft = tree.empty(3, torch.device("cpu"))
    assert draft.size == 0
    assert draft.chain
    assert draft.q is None
    assert tree.valid_nodes(draft).shape == (3, 0)
    assert tree.depths(draft).shape == (3, 0)
    assert tree.ancestors(draft.parent).shape == (3, 0, 0)
    assert draft.count.tolist() == [0, 0, 0]
