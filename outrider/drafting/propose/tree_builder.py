"""Build draft trees on the host, before they become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.core import tree
from outrider.core.types import Draft


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """The draft tree of one sequence. Its tokens were chosen without sampling.

    Parents come before children, and likelier nodes before others (see `Draft.accept_prob`).
    """

    tokens: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # -1: the last committed token
    accept_prob: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, accept_prob: float) -> int:
        """Append a draft token and return its node."""
        self.tokens.append(token)
        self.parent.append(parent)
        self.accept_prob.append(accept_prob)
        return len(self.tokens) - 1

    def select(self, nodes: Sequence[int]) -> TreeBuilder:
        """Return the tree of these nodes, in this order. Parents must come first."""
        new_nodes = {-1: -1} | {node: i for i, node in enumerate(nodes)}
        return TreeBuilder(
            tree.pick(self.tokens, nodes),
            [new_nodes[parent] for parent in tree.pick(self.parent, nodes)],
            tree.pick(self.accept_prob, nodes),
        )

    def path(self, emitted: Sequence[int]) -> list[int]:
        """Return the longest path from the root whose tokens begin `emitted`. These nodes were accepted."""
        path: list[int] = []
        last = -1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parent, strict=True)):
            if len(path) == len(emitted):
                break
            if parent == last and token == emitted[len(path)]:
                last = node
                path.append(node)
        return path


def build_draft(builders: Sequence[TreeBuilder], device: torch.device) -> Draft:
    """Return the draft of a batch from the tree of each sequence."""
    width = tuple(len(builder.tokens) for builder in builders)
    size = max(width)
    if not size:
        return tree.empty(len(builders), device)
    accept_prob = tuple(tuple(builder.accept_prob) for builder in builders)
    tokens = tree.upload_rows([builder.tokens for builder in builders], size, device)
    parents = [builder.parent for builder in builders]
    if all(parent == list(range(-1, len(parent) - 1)) for parent in parents):
        return tree.chain(tokens, width, accept_prob=accept_prob)
    parent = tree.upload_rows(parents, size, device, -1)
    depth = tuple(max(depths(parent), default=0) for parent in parents)
    return tree.one_hot_tree(tokens, parent, width, depth=depth, accept_prob=accept_prob)


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node; 1 for a child of the root."""
    node_depths: list[int] = []
    for parent in parents:
        node_depths.append(1 if parent < 0 else node_depths[parent] + 1)
    return node_depths
