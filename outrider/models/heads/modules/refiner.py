"""The causal refiner of XPress (2608.02438): corrects the logits of a block by the tokens before each draft token.

Each column of a block has an input: the column's own output, the mean output of the block, and the token before the
token that the column predicts. The inputs of a column and of the columns before it are mixed, with a weight per pair of
columns and channel. An MLP and a small output layer turn the result into a correction of the logits.

A column only depends on tokens before it. So the distribution of a draft token is a function of its path, and tokens
can be sampled one after another. Greedy tokens can also be found in passes over all columns at once, each with the
tokens of the pass before (Jacobi iteration): pass k settles draft token k.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription

_INIT_STD = 0.02  # of the embedding


class CausalRefiner(nn.Module):
    """Computes corrections of logits, over the draft vocabulary."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__()
        block = description.block
        assert block is not None
        assert block.refiner is not None
        rank = block.refiner.rank
        self.rank = rank
        self.token_in = nn.Embedding(description.vocab, rank)
        self.column_in = nn.Linear(description.width, rank, bias=False)
        self.block_in = nn.Linear(description.width, rank, bias=False)
        self.join = nn.Linear(3 * rank, rank, bias=False)  # of column, block and token, in this order
        # [rank, size, size] from the columns of the last dimension to those of the one before; only
        # j <= k is used
        self.mix = nn.Parameter(torch.zeros(rank, block.size, block.size))
        self.gate = nn.Linear(rank, block.refiner.ffn, bias=False)
        self.up = nn.Linear(rank, block.refiner.ffn, bias=False)
        self.down = nn.Linear(block.refiner.ffn, rank, bias=False)
        self.token_out = nn.Linear(rank, description.output_vocab, bias=False)
        nn.init.normal_(self.token_in.weight, std=_INIT_STD)
        nn.init.zeros_(self.token_out.weight)  # training starts without a correction

    def features(self, out: torch.Tensor) -> torch.Tensor:
        """Return the part of the inputs [*, size, rank] that does not depend on tokens, of outputs [*, size, H]."""
        block = self.block_in(out.mean(-2, keepdim=True)).expand(*out.shape[:-1], -1)
        return functional.linear(torch.cat([self.column_in(out), block], -1), self.join.weight[:, : 2 * self.rank])

    def inputs(self, features: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return inputs [*, rank] from features [*, rank] and the target ids [*] of the tokens before."""
        return features + functional.linear(self.token_in(before), self.join.weight[:, 2 * self.rank :])

    def mix_columns(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return latents [*, size, rank] from the inputs [*, size, rank] of all columns of blocks."""
        weights = self.mix.tril().to(inputs.dtype)
        return self._finish(inputs + torch.einsum("rkj,...jr->...kr", weights, inputs))

    def mix_nodes(self, inputs: torch.Tensor, column: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Return latents [B, M, rank] of the nodes of trees.

        Args:
            inputs: [B, M, rank] inputs of nodes.
            column: [B, M] the column of each node.
            visible: [B, M, M] bool: whether node j is on the path of node i, or is i.
        """
        weights = self.mix[:, column[:, :, None], column[:, None]] * visible  # [rank, B, M, M]
        return self._finish(inputs + torch.einsum("rbij,bjr->bir", weights.to(inputs.dtype), inputs))

    def _finish(self, mixed: torch.Tensor) -> torch.Tensor:
        return mixed + self.down(functional.silu(self.gate(mixed)) * self.up(mixed))  # type: ignore[no-any-return]

    def corrections(self, latents: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 corrections [*, Vd] of logits, or only those of some tokens.

        Args:
            latents: [*, rank] latents.
            rows: [*, C] indices of tokens in the draft vocabulary; None: all.
        """
        if rows is None:
            return self.token_out(latents).float()  # type: ignore[no-any-return]
        return (self.token_out.weight[rows] @ latents[..., None])[..., 0].float()
