"""Chains of a draft model as they grow, and when a guess is no longer worth the next pass."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outrider.core.types import StopRule


class ChainBuilder:
    """The margins of chains as they grow, and where each row stops."""

    def __init__(self, budget: Sequence[int], stop_rule: StopRule | None) -> None:
        """Without `stop_rule`, as where a look would wait for the device, nobody stops before the budget."""
        self.count, self.depth = list(budget), 0
        self._trust = stop_rule
        self.margins: list[list[float]] | None = None if stop_rule is None else [[] for _ in budget]
        self.chances: list[list[float]] | None = None if stop_rule is None else [[] for _ in budget]

    def look(self, logits: torch.Tensor, drawn: torch.Tensor, sure: torch.Tensor | None = None) -> None:
        """At the next guess of each row [B], and at the logits [B, V] that it was drawn from.

        `sure`: what the draft itself says of it [B], in log-odds; it then stands for the margin of the logits.
        """
        if self._trust is not None:
            until = self._trust.until(sum(count > self.depth for count in self.count))
            margins = margins_of(logits) if sure is None else sure.tolist()
            for b, (margin, token) in enumerate(zip(margins, drawn.tolist(), strict=True)):
                if self.depth < self.count[b]:
                    chance = self._note(b, margin)
                    left_out = chance < self._trust.min_path_prob
                    if left_out or chance < until or token in self._trust.ends:
                        self.count[b] = self.depth + (not left_out)
        self.depth += 1

    def _note(self, b: int, margin: float) -> float:
        assert self._trust is not None
        assert self.margins is not None
        assert self.chances is not None
        before = self.chances[b][-1] if self.depth else 1.0
        self.margins[b].append(margin)
        self.chances[b].append(before * chance_of(self._trust, self.depth, margin))
        return self.chances[b][-1]


def margins_of(logits: torch.Tensor) -> list[float]:
    """[B] how far the largest of [B, V] lies before the next one."""
    first, second = logits.topk(2, -1).values.unbind(-1)
    return (first - second).nan_to_num(nan=0.0).tolist()


def chance_of(stop_rule: StopRule, position: int, margin: float) -> float:
    """That a guess is kept whose ancestors were, by the margin of the logits that it was drawn from."""
    kind = min(position, len(stop_rule.weight) - 1)
    return 1 / (1 + math.exp(-min(max(stop_rule.weight[kind] * margin + stop_rule.bias[kind], -30.0), 30.0)))
