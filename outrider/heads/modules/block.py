"""Drafts that fill in a block in one pass: DFlash (2602.06036), and DSpark (2607.05147), which corrects it by tokens.

The block is the text's last token and masks behind it; its columns see each other both ways. In every layer they also
see the target's states of all tokens before the block, as keys and values that the layer's own matrices make of them.
No column but the block's runs through the layers, and what stands for a text is made once, and kept.

The mask is a vector of the draft's own. Checkpoints that name a `mask_token_id` mean a row of the table of embeddings
instead: reading one copies that row, and writing one is possible where the mask is still a row, or a table is written
too that has a row for no token. Some checkpoints hide the token before from their confidence head: its columns are then
zeros here.
"""

from __future__ import annotations

import torch
from torch import nn

from outrider.heads.description import HeadDescription
from outrider.heads.modules.base import HeadBase
from outrider.heads.modules.layers import AttentionInput, Layer, Norm, rotation

_SPREAD = 0.02  # of fresh vectors that stand beside embeddings


class BlockHead(HeadBase):
    """Decoder layers over a block, and what corrects and judges its guesses; `logits` are still to be `corrected`."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        it, body, block = description, description.body, description.block
        assert body is not None
        assert block is not None
        self.body, self.block = body, block
        width = body.hidden
        if it.aux_states.fused:
            self.fuse = nn.Linear(len(it.aux_states.layers) * it.target_hidden, width, bias=it.aux_states.bias)
        self.state_norm = Norm(width, body.epsilon)
        self.mask = nn.Parameter(torch.empty(width).normal_(std=_SPREAD))
        self.layers = nn.ModuleList(
            Layer(body, i, inputs=width, norm=body.first_norm or i > 0) for i in range(body.layers)
        )
        if it.final_norm:
            self.norm = Norm(width, body.epsilon)
        if block.markov_rank:
            self.markov_in = nn.Embedding(it.vocab, block.markov_rank)
            self.markov_out = nn.Linear(block.markov_rank, it.output_vocab, bias=False)
            nn.init.normal_(self.markov_in.weight, std=_SPREAD)
            nn.init.zeros_(self.markov_out.weight)  # a fresh draft corrects nothing
        if block.confidence:
            self.judge = nn.Linear(width + block.markov_rank, 1)

    def fused(self, taps: torch.Tensor) -> torch.Tensor:
        """States [*, H] from what was tapped [*, taps, target H]."""
        states = taps.flatten(-2)
        return self.state_norm(self.fuse(states) if self.description.aux_states.fused else states)  # type: ignore[no-any-return]

    def shown(self, states: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By layer, keys and values [*, key heads, T, D] of fused states [*, T, H] of tokens at `positions` [*, T]."""
        rotary = rotation(positions, self.body, states.dtype)
        return [layer.self_attn.shown(states, rotary) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(self, anchors: torch.Tensor, positions: torch.Tensor, look: AttentionInput) -> torch.Tensor:
        """One pass over n blocks.

        Args:
            anchors: [*, n] the target's ids of the tokens that blocks begin with.
            positions: [*, n * size] of all columns, block by block, each one behind the one before.
            look: shows each column its whole block, and the states before it.

        Returns:
            The outputs [*, n, guesses, H] of the columns that guess, after the final norm.
        """
        first = self.embed(anchors).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*anchors.shape, self.block.size - 1, -1)
        x = torch.cat([first, masks], -2).flatten(-3, -2)
        rotary = rotation(positions, self.body, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, look)
        if self.description.final_norm:
            x = self.norm(x)
        guessing = x.view(*anchors.shape, self.block.size, -1)[..., -self.block.draft_tokens :, :]
        # With strides as of one piece, or torch copies the output layer for each block to multiply by it.
        return guessing.reshape(-1, x.shape[-1]).view(guessing.shape)

    def corrected(self, logits: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logits [*, Vd] of guesses that stand behind the tokens `before` [*], the target's ids."""
        if not self.block.markov_rank:
            return logits
        return logits + self.markov_out(self.markov_in(before)).float()  # type: ignore[no-any-return]

    def confidence(self, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """[*] float32, the log-odds that a guess drawn from these outputs [*, H] behind these tokens [*] is kept.

        They were learned from the laws as they are at temperature 1, and know nothing of the guess that will be drawn.
        """
        if self.block.markov_rank:
            out = torch.cat([out, self.markov_in(before).to(out.dtype)], -1)
        return self.judge(out)[..., 0].float()  # type: ignore[no-any-return]
