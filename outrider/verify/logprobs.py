"""Log-probabilities of tokens under the model's own softmax, for requests that ask for them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Logprobs(NamedTuple):
    """Natural log-probabilities of n tokens, and of the likeliest ids at their positions."""

    tokens: list[float]  # [n]
    top_ids: list[list[int]]  # [n][top], best first
    top: list[list[float]]  # [n][top]


def logprobs(logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], top: int) -> Logprobs:
    """Return the log-probabilities of tokens [n] at rows [n] of logits [T, V], and of the `top` likeliest ids."""
    at = torch.tensor(rows, device=logits.device)
    values = logits[at].log_softmax(-1)  # [n, V]
    chosen = values.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    best = values.topk(min(top, logits.shape[-1]))
    return Logprobs(tokens=chosen.tolist(), top_ids=best.indices.tolist(), top=best.values.tolist())
