"""Thresholds worth trying: those that would reject given shares of the drafts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.media.contract import Choice, Judgment, Position
from outrider.media.engine import MediaEngine
from outrider.media.routers.gate import parse_aggregate

_DIGITS = 4  # of a threshold, so that a printed one can be given back


class _AcceptAll:
    """Scores all drafts after the first block and accepts them."""

    name = "accept all"
    threshold: float | None = None
    quality: float | None = None

    def __init__(self, aggregate: str) -> None:
        self._aggregated = parse_aggregate(aggregate)

    def choose(self, position: Position) -> Choice:
        return Choice.SCORE if position.block else Choice.TARGET

    def judge(self, scores: Tensor) -> Judgment:
        return Judgment(score=self._aggregated(scores), accepted=True)


def draft_scores(engine: MediaEngine, prompts: Sequence[str], *, aggregate: str) -> list[float]:
    """Return the aggregated scores of drafts that follow a first block of the target and accepted drafts."""
    router = _AcceptAll(aggregate)
    results = [engine.generate(prompt, router, seed=i) for i, prompt in enumerate(prompts)]
    return [block.score for result in results for block in result.blocks if block.score is not None]


def thresholds_at(scores: Sequence[float], rejected: Sequence[float]) -> list[float]:
    """Return the thresholds below which these shares of the scores lie, ascending and different."""
    quantiles = torch.quantile(torch.tensor(scores, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64))
    return sorted({round(float(threshold), _DIGITS) for threshold in quantiles})
