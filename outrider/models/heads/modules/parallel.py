"""Draft heads that predict several positions from one hidden state of the target: Medusa and Hydra.

See Cai et al. 2024 (Medusa) and Ankner et al. 2024 (Hydra).
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription, Kind
from outrider.models.heads.modules.base import HeadBase


class ResidualBlock(nn.Module):
    """x + silu(W x + b). A wider input has a linear layer for the residual."""

    def __init__(self, inputs: int, size: int, *, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, size, bias=bias)
        if inputs != size:
            self.res_connection = nn.Linear(inputs, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual = self.res_connection(x) if hasattr(self, "res_connection") else x
        return residual + functional.silu(self.linear(x))


class ParallelHead(HeadBase):
    """Parallel heads. If the state predicts token t, which the target samples, head i predicts token t + 1 + i."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        stack = description.stack
        assert stack is not None
        self.stack = stack
        self.blocks = nn.ModuleList(map(self._make_blocks, range(stack.heads)))
        if not stack.shared_head:
            self.heads = nn.ModuleList(
                nn.Linear(description.target_hidden, description.output_vocab, bias=stack.head_bias)
                for _ in range(1 if stack.one_head else stack.heads)
            )

    def _make_blocks(self, head: int) -> nn.Sequential:
        width = self.description.target_hidden
        blocks = []
        for i in range(self.stack.layers):
            inputs = width
            if not i and self.description.kind is Kind.HYDRA:
                # The input also has the embeddings of the token after the state and of the earlier draft tokens.
                inputs = width * (2 + head)
            blocks.append(ResidualBlock(inputs, width, bias=self.stack.bias))
        return nn.Sequential(*blocks)

    def output_table(self) -> torch.Tensor:
        return self.heads[0].weight if self.stack.one_head else super().output_table()  # type: ignore[return-value]

    def forward(self, state: torch.Tensor, tokens: torch.Tensor, head: int) -> torch.Tensor:
        """Return the float32 logits [*, Vd] of one head.

        Args:
            state: [*, H] hidden states of the target, after its final norm.
            tokens: [*, head + 1] the tokens after the state, including earlier draft tokens. Only Hydra uses them.
            head: index of the head, from 0.
        """
        x = state
        if self.description.kind is Kind.HYDRA:
            x = torch.cat([state, self.embed(tokens).to(state.dtype).flatten(-2)], -1)
        x = self.blocks[head](x)
        if self.stack.shared_head:
            return self.logits(x)
        return self.heads[0 if self.stack.one_head else head](x).float()  # type: ignore[no-any-return]
