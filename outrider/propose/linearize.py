"""Reduce draft trees to chains, for recurrent targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from outrider.core import tree
from outrider.core.types import Batch, Draft, Request, Round
from outrider.propose.base import Proposer

T = TypeVar("T")


class Linearized:
    """A proposer that returns only the likeliest path of another proposer's trees.

    A recurrent target runs each branch of a tree as a sequence of its own, from the end of the committed tokens. If
    there are several branches, it must run the accepted one once more. A second branch costs more than it gains.
    """

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.needs = inner.needs

    def admit(self, slot: int, request: Request) -> None:
        self.inner.admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        return linearize(self.inner.propose(batch))

    def commit(self, round: Round) -> None:
        self.inner.commit(round)

    def release(self, slot: int) -> None:
        self.inner.release(slot)


def linearize(draft: Draft) -> Draft:
    """Return the chain of first siblings in each tree. It is the likeliest path as far as the proposer knows.

    The order of sampled siblings does not depend on their tokens. So `q` of the first sibling is its distribution
    without any change.
    """
    if draft.chain:
        return draft
    counts = draft.count.tolist()
    paths = [_first_path(parents[:count]) for parents, count in zip(draft.parent.tolist(), counts, strict=True)]
    size = max(map(len, paths))
    index = tree.upload([path + [0] * (size - len(path)) for path in paths], draft.tokens.device)
    chain = tree.chain(
        draft.tokens.gather(1, index),
        tuple(map(len, paths)),
        kind=draft.kind.gather(1, index),
        q=None if draft.q is None else replace(draft.q, at=draft.q.at.gather(1, index)),
        accept_prob=_select(draft.accept_prob, paths),
    )
    return replace(chain, source=_select(draft.source, paths))


def _select(
    values: tuple[tuple[T, ...], ...] | None, paths: Sequence[Sequence[int]]
) -> tuple[tuple[T, ...], ...] | None:
    """Return the values of the nodes on each path."""
    if values is None:
        return None
    return tuple(tuple(nodes[i] for i in path) for nodes, path in zip(values, paths, strict=True))


def _first_path(parents: Sequence[int]) -> list[int]:
    """Return the path from the root that takes the first child of each node."""
    first_child: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first_child.setdefault(parent, node)
    path: list[int] = []
    node = -1
    while node in first_child:
        node = first_child[node]
        path.append(node)
    return path
