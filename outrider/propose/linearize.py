"""Chains of trees, for a target to which every branch is a text of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.core import tree
from outrider.core.types import Batch, Draft, Request, Round
from outrider.propose.base import Proposer


class Linearized:
    """Another proposer's guesses, each row's likeliest way alone.

    A recurrent target reads a tree branch by branch, each from the end of the text, and must read an accepted branch
    once more where there were several: what a second way brings is less than what it costs.
    """

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.needs = inner, inner.needs

    def admit(self, slot: int, request: Request) -> None:
        self.inner.admit(slot, request)

    def propose(self, batch: Batch) -> Draft:
        return likeliest(self.inner.propose(batch))

    def commit(self, round: Round) -> None:
        self.inner.commit(round)

    def release(self, slot: int) -> None:
        self.inner.release(slot)


def likeliest(draft: Draft) -> Draft:
    """The chain in each row's tree that follows the first of all siblings, and so the likeliest as far as is known.

    Which node stands first among siblings never depends on its own token where it was drawn, and so the first one's law
    is its `q` as it stands.
    """
    if draft.chain:
        return draft
    counts = draft.count.tolist()
    paths = [_first_path(parents[:count]) for parents, count in zip(draft.parent.tolist(), counts, strict=True)]
    size = max(map(len, paths))
    index = tree.upload([path + [0] * (size - len(path)) for path in paths], draft.tokens.device)
    chance, by = draft.accept_prob, draft.source
    chain = tree.chain(
        draft.tokens.gather(1, index),
        tuple(map(len, paths)),
        kind=draft.kind.gather(1, index),
        q=None if draft.q is None else replace(draft.q, at=draft.q.at.gather(1, index)),
        accept_prob=chance and tuple(tuple(said[i] for i in path) for said, path in zip(chance, paths, strict=True)),
    )
    return replace(chain, source=by and tuple(tuple(who[i] for i in path) for who, path in zip(by, paths, strict=True)))


def _first_path(parents: Sequence[int]) -> list[int]:
    first: dict[int, int] = {}
    for node, parent in enumerate(parents):
        first.setdefault(parent, node)
    path, at = list[int](), -1
    while at in first:
        at = first[at]
        path.append(at)
    return path
