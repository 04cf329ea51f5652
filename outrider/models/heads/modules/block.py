"""Draft heads that fill in a block in one pass.

These are DFlash (2602.06036), DFlash 2, JetSpec (2606.18394), DSpark (2607.05147), XPress
(2608.02438) and Domino (2605.29707).

A block is the last committed token and mask tokens after it. Its columns attend to each other in both directions, or in
JetSpec only to columns before them. In each layer they also attend to the target's hidden states of the tokens before
the block; the layer's own key and value projections map these states. Only the columns of the block run through the
layers. The keys and values of committed tokens are computed once and cached. DSpark and DFlash 2 also correct the
logits of each draft token by the token before it, XPress and Domino by all draft tokens before it.

The mask is a vector of the draft head. Some checkpoints have a `mask_token_id` instead, which names
a row of the embedding. Import copies that row. Export is possible if the mask still equals a row,
or if the checkpoint includes an embedding with a row that no token uses. In some checkpoints the
confidence head does not use the previous token; the columns for it are zero here.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription, Recurrence, Selector
from outrider.models.heads.modules.base import HeadBase
from outrider.models.heads.modules.convolution import ConvolvedLayer
from outrider.models.heads.modules.layers import AttentionFunction, Layer, Norm, rotation
from outrider.models.heads.modules.refiner import CausalRefiner

_INIT_STD = 0.02  # of new embeddings


class RecurrentCorrection(nn.Module):
    """Computes corrections of logits, over the draft vocabulary. A new one corrects nothing."""

    def __init__(self, description: HeadDescription, recurrence: Recurrence) -> None:
        super().__init__()
        self.first = recurrence.first
        self.gru = nn.GRUCell(description.width, recurrence.state, bias=False)
        self.join = nn.Linear(description.width + recurrence.state, recurrence.rank, bias=False)
        self.token_out = nn.Linear(recurrence.rank, description.output_vocab, bias=False)
        nn.init.zeros_(self.token_out.weight)

    def advance(self, embeddings: torch.Tensor, states: torch.Tensor | None = None) -> torch.Tensor:
        """Return the states [*, S] after embeddings [*, H] of tokens. `states` [*, S] are those before; None: zeros."""
        before = None if states is None else states.flatten(0, -2)
        after: torch.Tensor = self.gru(embeddings.flatten(0, -2), before)
        return after.view(*embeddings.shape[:-1], -1)

    def corrections(self, out: torch.Tensor, states: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """Return float32 corrections [*, Vd] of logits.

        Args:
            out: [*, H] outputs of columns.
            states: [*, S] states after the tokens before.
            depth: [*] or [] draft tokens before. The first ones of a block are not corrected.
        """
        hidden = functional.silu(self.join(torch.cat([out, states.to(out.dtype)], -1)))
        return self.token_out(hidden).float() * (depth >= self.first)[..., None]  # type: ignore[no-any-return]


class CandidateSelector(nn.Module):
    """Corrects logits over the draft vocabulary. A new one corrects nothing."""

    def __init__(self, description: HeadDescription, selector: Selector) -> None:
        super().__init__()
        self.candidates = selector.candidates
        self.before = nn.Parameter(torch.empty(description.vocab, selector.rank).normal_(std=_INIT_STD))
        self.after = nn.Parameter(torch.zeros(description.output_vocab, selector.rank))
        self.gate = nn.Linear(description.width, selector.rank, bias=False)

    def corrections(self, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return float32 corrections [*, Vd] of all tokens, for outputs [*, H] and the target ids [*] before."""
        return functional.linear(self._latents(out, before), self.after).float()

    def select(self, logits: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return corrected logits [*, Vd]. All tokens but the candidates get -inf."""
        if not 0 < self.candidates < logits.shape[-1]:
            return logits + self.corrections(out, before)
        values, rows = logits.topk(self.candidates)
        values = values + (self.after[rows] @ self._latents(out, before)[..., None])[..., 0].float()
        return torch.full_like(logits, -torch.inf).scatter(-1, rows, values)

    def _latents(self, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return functional.embedding(before, self.before) * self.gate(out)  # type: ignore[no-any-return]


class BlockHead(HeadBase):
    """Decoder layers over a block, with an optional correction of the logits, and an optional confidence head.

    Pass the result of `logits` to `correct_logits`, or add the corrections of `refiner` or
    `recurrence`, before sampling.
    """

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        body = description.body
        block = description.block
        aux = description.aux_states
        assert body is not None
        assert block is not None
        self.body = body
        self.block = block
        width = body.hidden
        if aux.fused:
            self.fuse = nn.Linear(len(aux.layers) * description.target_hidden, width, bias=aux.bias)
        self.state_norm = Norm(width, body.epsilon)
        self.mask = nn.Parameter(torch.empty(width).normal_(std=_INIT_STD))
        self.layers = nn.ModuleList(self._layer(i) for i in range(body.layers))
        if description.final_norm:
            self.norm = Norm(width, body.epsilon)
        if block.markov_rank:
            self.markov_in = nn.Embedding(description.vocab, block.markov_rank)
            self.markov_out = nn.Linear(block.markov_rank, description.output_vocab, bias=False)
            nn.init.normal_(self.markov_in.weight, std=_INIT_STD)
            nn.init.zeros_(self.markov_out.weight)  # training starts without a correction
        if block.confidence:
            self.judge = nn.Linear(width + block.markov_rank, 1)
        if block.refiner:
            self.refiner = CausalRefiner(description)
        if block.selector:
            self.selector = CandidateSelector(description, block.selector)
        if block.recurrence:
            self.recurrence = RecurrentCorrection(description, block.recurrence)

    def _layer(self, i: int) -> Layer:
        if self.block.convolution:
            return ConvolvedLayer(self.body, i, self.block.convolution, self.block.size)
        return Layer(self.body, i, inputs=self.body.hidden, norm=self.body.first_norm or i > 0)

    def fuse_states(self, aux_states: torch.Tensor) -> torch.Tensor:
        """Return the fused states [*, H] of the target's hidden states [*, layers, target H]."""
        states = aux_states.flatten(-2)
        return self.state_norm(self.fuse(states) if self.description.aux_states.fused else states)  # type: ignore[no-any-return]

    def keys_and_values(self, states: torch.Tensor, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of each layer for fused states.

        Args:
            states: [*, T, H] fused states of tokens.
            positions: [*, T] positions of these tokens.

        Returns:
            Keys and values [*, key heads, T, D], by layer.
        """
        rotary = rotation(positions, self.body, states.dtype)
        return [layer.self_attn.keys_and_values(states, rotary) for layer in self.layers]  # type: ignore[operator, union-attr]

    def forward(self, anchors: torch.Tensor, positions: torch.Tensor, attend: AttentionFunction) -> torch.Tensor:
        """Run one pass over n blocks.

        Args:
            anchors: [*, n] target ids of the first token of each block.
            positions: [*, n * size] positions of all columns, block after block.
            attend: lets each column attend to its block and to the states before the block, as far
                as the view of the layer allows.

        Returns:
            Outputs [*, n, size, H] of all columns, after the final norm.
        """
        first = self.embed(anchors).to(self.mask.dtype)[..., None, :]
        masks = self.mask.expand(*anchors.shape, self.block.size - 1, -1)
        x = torch.cat([first, masks], -2).flatten(-3, -2)
        rotary = rotation(positions, self.body, x.dtype)
        for layer in self.layers:
            x = layer(x, rotary, attend)
        if self.description.final_norm:
            x = self.norm(x)
        return x.view(*anchors.shape, self.block.size, -1)

    def predicting(self, out: torch.Tensor) -> torch.Tensor:
        """Return the outputs [*, draft tokens, H] of the columns that predict, of outputs [*, size, H]."""
        predicting = out[..., self.block.first_column :, :]
        # Make the strides contiguous. Otherwise torch copies the LM head for each block to multiply by it.
        return predicting.reshape(-1, out.shape[-1]).view(predicting.shape)

    def correct_logits(self, logits: torch.Tensor, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the logits [*, Vd] of draft tokens, corrected by the token before each.

        In training mode, a candidate selector corrects all tokens.

        Args:
            logits: [*, Vd] without the correction.
            out: [*, H] the outputs that they are computed from.
            before: [*] target ids of the tokens before.
        """
        if self.block.selector and self.training:
            return logits + self.selector.corrections(out, before)
        if self.block.selector:
            return self.selector.select(logits, out, before)
        if not self.block.markov_rank:
            return logits
        return logits + self.markov_out(self.markov_in(before)).float()  # type: ignore[no-any-return]

    def confidence(self, out: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the log-odds [*] float32 that a draft token is accepted.

        They are trained on the distributions at temperature 1 and do not depend on the sampled draft token.

        Args:
            out: [*, H] outputs from which the token is sampled.
            before: [*] target ids of the tokens before it.
        """
        if self.block.markov_rank:
            out = torch.cat([out, self.markov_in(before).to(out.dtype)], -1)
        return self.judge(out)[..., 0].float()  # type: ignore[no-any-return]
