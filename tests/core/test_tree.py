"""Tests of draft trees against a loop over the nodes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import tree
from outrider.core.types import Draft
from outrider.verify.verdict import path_to

SIZES = st.integers(0, 7)


@st.composite
def parents(draw):
    """Return the parents of a batch of trees of one size. Parents precede their children."""
    size = draw(SIZES)
    batch_size = draw(st.integers(1, 4))
    return [[draw(st.integers(-1, node - 1)) for node in range(size)] for _ in range(batch_size)]


def draft_of(parents):
    batch_size = len(parents)
    parent = torch.tensor(parents, dtype=torch.int64).view(batch_size, -1)
    size = parent.shape[1]
    return Draft(
        tokens=torch.zeros_like(parent),
        parent=parent,
        count=torch.full((batch_size,), size),
        kind=torch.zeros_like(parent),
        q=None,
        width=(size,) * batch_size,
        depth=(size,) * batch_size,
        chain=False,
    )


def path_by_loop(parent, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parent[node]
    return path[::-1]


@settings(deadline=None, derandomize=True, max_examples=40)
@given(parents())
def test_ancestors_depths_and_paths(batch):
    draft = draft_of(batch)
    ancestors = tree.ancestors(draft.parent)
    depth = tree.depths(draft)
    for b, parent in enumerate(batch):
        for node in range(-1, len(parent)):
            path = path_by_loop(parent, node)
            if node >= 0:
                assert ancestors[b, node].nonzero().flatten().tolist() == path
                assert int(depth[b, node]) == len(path)
            result, length = path_to(draft, torch.full((len(batch),), node))
            assert result[b].tolist() == path + [-1] * (len(parent) - len(path))
            assert int(length[b]) == len(path)


@pytest.mark.parametrize("size", range(4))
def test_chain_has_the_parents_of_a_chain(size):
    tokens = torch.arange(2 * size).view(2, size)
    draft = tree.chain(tokens, (size, size // 2))
    assert draft.parent.tolist() == [list(range(-1, size - 1))] * 2
    assert draft.count.tolist() == [size, size // 2]
    assert tree.valid_nodes(draft).sum(1).tolist() == [size, size // 2]
    assert tree.valid_nodes(draft)[0].all()
    assert torch.equal(tree.depths(draft), tree.ancestors(draft.parent).sum(-1))


def test_chain_keeps_the_kind_of_each_draft_token():
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    assert tree.chain(tokens, (3,)).kind.tolist() == [[0, 0, 0]]
    assert tree.chain(tokens, (3,), kind=torch.tensor([[0, 1, 2]])).kind.tolist() == [[0, 1, 2]]


def test_empty_draft():
    draft = tree.empty(3, torch.device("cpu"))
    assert draft.size == 0
    assert draft.chain
    assert draft.q is None
    assert tree.valid_nodes(draft).shape == (3, 0)
    assert tree.depths(draft).shape == (3, 0)
    assert tree.ancestors(draft.parent).shape == (3, 0, 0)
    assert draft.count.tolist() == [0, 0, 0]
