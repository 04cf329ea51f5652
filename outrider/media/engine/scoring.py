"""Asks a scorer for scores. Whatever goes wrong rejects the draft instead of ending the run."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.media.contract import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of a draft, or why there are none."""

    values: Tensor | None
    failure: str | None = None


def score_draft(scorer: Scorer, prompt: str, content: Tensor) -> Scores:
    """Return the scores of all units of a draft."""
    try:
        values = torch.as_tensor(scorer.score(prompt, content), dtype=torch.float32)
    except Exception as error:  # a scorer is foreign code
        return Scores(values=None, failure=f"the scorer raised {type(error).__name__}: {error}")
    if values.dim() != 1 or not len(values):
        return Scores(values=None, failure=f"the scorer returned shape {tuple(values.shape)}; a vector is needed")
    if not bool(values.isfinite().all()):
        return Scores(values=None, failure="the scorer returned a score that is not a finite number")
    return Scores(values=values)
