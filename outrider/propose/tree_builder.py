"""Trees of picked guesses while they are still on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from outrider.core import tree
from outrider.core.types import Draft


@dataclass(frozen=True, slots=True)
class TreeBuilder:
    """One row's guesses: parents before children, likelier ones before others (see `Draft.accept_prob`)."""

    tokens: list[int] = field(default_factory=list)
    parent: list[int] = field(default_factory=list)  # -1 = the last committed token
    accept_prob: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, chance: float) -> int:
        """Append a guess; returns its node."""
        self.tokens.append(token)
        self.parent.append(parent)
        self.accept_prob.append(chance)
        return len(self.tokens) - 1

    def path(self, emitted: Sequence[int]) -> list[int]:
        """The nodes that agree with what was emitted, from the root down: how a proposer finds what became of them."""
        path: list[int] = []
        at = -1
        for node, (token, parent) in enumerate(zip(self.tokens, self.parent, strict=True)):
            if len(path) == len(emitted):
                break
            if parent == at and token == emitted[len(path)]:
                at = node
                path.append(node)
        return path


def picked(sketches: Sequence[TreeBuilder], device: torch.device) -> Draft:
    """The draft of some rows' sketches."""
    width = tuple(len(sketch.tokens) for sketch in sketches)
    size = max(width)
    if not size:
        return tree.empty(len(sketches), device)
    chance = tuple(tuple(sketch.accept_prob) for sketch in sketches)
    tokens = tree.upload([sketch.tokens + [0] * (size - len(sketch.tokens)) for sketch in sketches], device)
    if all(sketch.parent == list(range(-1, len(sketch.parent) - 1)) for sketch in sketches):
        return tree.chain(tokens, width, accept_prob=chance)
    parent = tree.upload([sketch.parent + [-1] * (size - len(sketch.parent)) for sketch in sketches], device)
    depth = tuple(max(depths(sketch.parent), default=0) for sketch in sketches)
    return tree.one_hot_tree(tokens, parent, width, depth=depth, accept_prob=chance)


def depths(parent: Sequence[int]) -> list[int]:
    """Of each node; 1 for a child of the root."""
    out: list[int] = []
    for above in parent:
        out.append(1 if above < 0 else out[above] + 1)
    return out
