"""Heads that read one state of the target, each guessing one token further: Medusa and Hydra.

Cai et al. 2024 (Medusa); Ankner et al. 2024 (Hydra).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from outrider.heads.description import HeadDescription, Kind
from outrider.heads.modules.base import HeadBase


class Block(nn.Module):
    """x + silu(W x + b); where the input is wider, the residual takes a linear way of its own."""

    def __init__(self, inputs: int, size: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size, bias=bias)
        if inputs != size:
            self.res_connection = nn.Linear(inputs, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.res_connection(x) if hasattr(self, "res_connection") else x
        return residual + functional.silu(self.linear(x))


class ParallelHead(HeadBase):
    """The stack. Head i guesses token i + 2 after the state's own; the target itself guesses the first."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        stack, width = description.stack, description.target_hidden
        assert stack is not None
        self.stack = stack
        # Hydra: besides the state, the embeddings of the token that it led to and of the guesses before
        wider = description.kind is Kind.HYDRA
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(
                    Block(width * (2 + i) if wider and not j else width, width, bias=stack.bias)
                    for j in range(stack.layers)
                )
            )
            for i in range(stack.heads)
        )
        if not stack.shared_head:
            self.heads = nn.ModuleList(
                nn.Linear(width, description.output_vocab, bias=stack.head_bias)
                for _ in range(1 if stack.one_head else stack.heads)
            )

    def output_table(self) -> torch.Tensor:
        return self.heads[0].weight if self.stack.one_head else super().output_table()  # type: ignore[return-value]

    def forward(self, state: torch.Tensor, tokens: torch.Tensor, head: int) -> torch.Tensor:
        """Logits [*, Vd] float32 of head `head`.

        Args:
            state: [*, H] after the target's final norm.
            tokens: [*, head + 1] what came after the state, the guesses before this one included; Hydra reads them.
            head: which, counted from 0.
        """
        x = state
        if self.description.kind is Kind.HYDRA:
            x = torch.cat([state, self.embed(tokens).to(state.dtype).flatten(-2)], -1)
        x = self.blocks[head](x)
        if self.stack.shared_head:
            return self.logits(x)
        return self.heads[0 if self.stack.one_head else head](x).float()  # type: ignore[no-any-return]
