"""Compare the scores of a recorded pass with those of the eager pass.

Rounding differs between the two. In a mixture of experts it may route a token to another expert
where two of them are nearly tied, which changes the logits of this token and of those after it.
With many tokens this is likely. So where logits differ, the eager pass runs again with the experts
of the recorded pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from outrider.core.tree import upload
from outrider.core.types import Batch, Draft, Scores
from outrider.models.torch.rounding import TIE_FACTOR, TOLERANCE
from outrider.models.torch.routing import observed_experts, prescribed_experts
from outrider.models.torch.static_pass import StaticModel, StaticPass
from outrider.runtime.ranks import all_ranks


class Pass(NamedTuple):
    """The input of a pass."""

    batch: Batch
    draft: Draft
    first: int  # as in `Target.score`

    def token_counts(self) -> list[int]:
        """Return the tokens of each sequence."""
        has_feed = self.first < 0
        skip = max(self.first, 0)
        pairs = zip(self.batch.feed, self.draft.width, strict=True)
        return [len(feed) * has_feed + max(width - skip, 0) for feed, width in pairs]


class Comparison(NamedTuple):
    """The result of a comparison."""

    scores: Scores  # of the eager pass that ran last, so that its keys and values are in the cache
    agree: bool


def compare(
    model: StaticModel, buffers: StaticPass, scored: Pass, scores: Scores, eager: Callable[[], Scores]
) -> Comparison:
    """Compare the scores of a recorded pass with those of the eager pass.

    Args:
        model: the model of both.
        buffers: the inputs of the recorded pass, which has run last.
        scored: what both run over.
        scores: the scores of the recorded pass.
        eager: runs the eager pass.
    """
    tolerance = TOLERANCE[model.dtype]
    expected = eager()
    differs = _differing_rows(scores, expected, tolerance)
    if all_ranks(not differs.any()):
        return Comparison(expected, agree=True)
    experts = _experts(model, buffers, scored)
    if not experts:
        return Comparison(expected, agree=False)
    with prescribed_experts(model.model, experts) as gaps:
        expected = eager()
    wrong_choice = _largest_gaps(gaps, scored).to(differs.device) > TIE_FACTOR * tolerance
    unexplained = differs & (wrong_choice[:, None] | _differing_rows(scores, expected, tolerance))
    if all_ranks(not unexplained.any()):
        return Comparison(expected, agree=True)
    return Comparison(eager(), agree=False)  # with the experts of its own choice


def _differing_rows(scores: Scores, expected: Scores, tolerance: float) -> torch.Tensor:
    """Return [B, 1 + N], whether a node's logits differ by more than rounding. NaN may differ."""
    finite = expected.logits.amax(-1).isfinite()
    error = (scores.logits - expected.logits).norm(dim=-1)
    differs: torch.Tensor = error > tolerance * expected.logits.norm(dim=-1)
    differs |= ~scores.logits.amax(-1).isfinite()
    return differs & finite


def _experts(model: StaticModel, buffers: StaticPass, scored: Pass) -> list[torch.Tensor]:
    """Return the experts [T, K] of the tokens of the eager pass that the recorded one chose, for each layer with any.

    A recording does not keep them, so its operations run once more, without the recording.
    """
    with observed_experts(model.model) as chosen:
        buffers.score()
    columns = buffers.bucket.columns
    begins = [seq.slot * columns for seq in scored.batch.seqs]
    spans = zip(begins, scored.token_counts(), strict=True)
    rows = [row for begin, count in spans for row in range(begin, begin + count)]
    index = upload(rows, model.cache.device)
    return [experts[index] for experts in chosen]


def _largest_gaps(gaps: list[torch.Tensor], scored: Pass) -> torch.Tensor:
    """Return [B], the largest gap of a sequence (see `prescribed_experts`). Each token may change those after it."""
    counts = scored.token_counts()
    if not gaps:
        return torch.zeros(len(counts))
    by_token = torch.stack(gaps).amax(0)
    return torch.stack([part.amax() if len(part) else part.new_zeros(()) for part in torch.split(by_token, counts)])
