"""Build the chains of a draft model token by token, and stop them early."""

import math
from collections.abc import Sequence

import torch

from outrider.core.types import StopRule


class ChainBuilder:
    """Collects the margins of chains and decides where each sequence stops."""

    def __init__(self, budget: Sequence[int], stop_rule: StopRule | None) -> None:
        """Start chains of up to `budget` [B] tokens. Without `stop_rule`, none stops earlier."""
        self.count = list(budget)  # [B] tokens of each chain
        self.depth = 0  # tokens that were processed
        self._stop_rule = stop_rule
        self.margins: list[list[float]] | None = None if stop_rule is None else [[] for _ in budget]
        self.accept_probs: list[list[float]] | None = None if stop_rule is None else [[] for _ in budget]

    def process(self, logits: torch.Tensor, tokens: torch.Tensor, confidence: torch.Tensor | None = None) -> None:
        """Process the next draft token of each sequence.

        Args:
            logits: [B, V].
            tokens: [B] the draft tokens.
            confidence: [B] log-odds of acceptance from a confidence head, which replace the margin of the logits.
        """
        if self._stop_rule is not None:
            min_prob = self._stop_rule.threshold(sum(count > self.depth for count in self.count))
            margins = margins_of(logits) if confidence is None else confidence.tolist()
            for b, (margin, token) in enumerate(zip(margins, tokens.tolist(), strict=True)):
                if self.depth < self.count[b]:
                    prob = self._record(b, margin)
                    dropped = prob < self._stop_rule.min_path_prob
                    if dropped or prob < min_prob or token in self._stop_rule.ends:
                        self.count[b] = self.depth + (not dropped)
        self.depth += 1

    def _record(self, b: int, margin: float) -> float:
        """Record the margin of a draft token. Return the acceptance probability of its path."""
        assert self._stop_rule is not None
        assert self.margins is not None
        assert self.accept_probs is not None
        parent_prob = self.accept_probs[b][-1] if self.depth else 1.0
        self.margins[b].append(margin)
        self.accept_probs[b].append(parent_prob * accept_prob_of(self._stop_rule, self.depth, margin))
        return self.accept_probs[b][-1]


def margins_of(logits: torch.Tensor) -> list[float]:
    """Return [B], the difference of the two largest logits of [B, V]."""
    first, second = logits.topk(2, -1).values.unbind(-1)
    return (first - second).nan_to_num(nan=0.0).tolist()


def accept_prob_of(stop_rule: StopRule, position: int, margin: float) -> float:
    """Return the probability that a draft token is accepted if its ancestors are, from the margin of its logits."""
    index = min(position, len(stop_rule.weight) - 1)
    return 1 / (1 + math.exp(-min(max(stop_rule.weight[index] * margin + stop_rule.bias[index], -30.0), 30.0)))
