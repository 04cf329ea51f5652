"""The `Planner` protocol, and a planner with a fixed draft length."""

from typing import Protocol

from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, DraftBudget
from outrider.errors import OutriderError


class Planner(Protocol):
    """Decides how many tokens each sequence drafts in a round.

    A planner decides from committed tokens, earlier rounds, and the acceptance probabilities of a draft. It never uses
    the value of a token that it might drop, so the output stays exact. It may only lower `batch.budget`.
    """

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        """Return the batch with a draft budget for each sequence (0: do not speculate) and acceptance thresholds."""

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Drop draft tokens that are not worth their place in the target's pass."""


class FixedPlanner:
    """Gives every sequence k draft tokens, plus tokens that a grammar forces. With k = 0 there are no draft tokens."""

    def __init__(self, k: int) -> None:
        if k < 0:
            raise OutriderError(f"k is {k}; use 0 for plain decoding, or a number of draft tokens above 0")
        self.k = k

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        if not self.k:
            return batch.with_budget(DraftBudget((0,) * len(batch.seqs)))
        return batch.limited(limit_budgets(self.k, batch))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return draft


class GrammarPlanner(FixedPlanner):
    """Gives the proposer no draft tokens. Only grammars add those that they force."""

    def __init__(self) -> None:
        super().__init__(1)

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        return batch.limited((0,) * len(batch.seqs))


def limit_budgets(k: int, batch: Batch) -> tuple[int, ...]:
    """Return the draft budgets of a batch, at most k each."""
    return tuple(min(k, budget) for budget in batch.draft_budget)
