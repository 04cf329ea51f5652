"""A training sample: one sequence and the target's hidden states."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A finished sequence of L + 1 tokens."""

    id: int  # of the request: the number of the prompt
    tokens: tuple[int, ...]  # [L + 1]
    states: torch.Tensor  # [L, layers, H] bfloat16, outputs of the recorded layers at all tokens but the last
    prompt: int  # number of prompt tokens
    shared_kv: torch.Tensor | None = None  # [L, n] bfloat16, concatenated keys and values of the recorded layers
