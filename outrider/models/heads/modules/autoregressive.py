"""Draft heads that predict token by token from the target's hidden states: EAGLE-1, 2, 3 and 3.1, and MTP modules.

The input of column j is token x_j and hidden state f_(j-1), from which x_j was predicted. The state
comes from the target; after a draft token it is the head's own output. The output of column j
predicts x_(j+1). See Li et al. 2024 (EAGLE), 2025 (EAGLE-3), and DeepSeek-AI 2024 (MTP).

A single module runs once per draft token. A head with several modules runs each of them once:
module m combines x_j with the output of module m - 1 at x_(j-1), where module 0 uses f_(j-1). So
module m starts m tokens later in the sequence. Each module has its own decoder layers and KV cache.

P-EAGLE (2602.01469) predicts all draft tokens in one pass from mask tokens after the sequence. A
mask token is a column like any other. Its embedding is that of an unused token, and its hidden
state is a learned vector that all mask tokens share.
"""

from __future__ import annotations

import torch
from torch import nn

from outrider.models.heads.description import Feedback, FuseNorm, FusionPoint, HeadDescription
from outrider.models.heads.modules.base import HeadBase
from outrider.models.heads.modules.layers import AttentionFunction, Layer, Norm, rotation


class DraftModule(nn.Module):
    """One module: fusion of embeddings and hidden states, decoder layers, and a final norm."""

    def build(self, description: HeadDescription, index: int) -> None:
        """Create the layers of module `index`."""
        body = description.body
        fusion = description.input_fusion
        assert body is not None
        assert fusion is not None
        self.body = body
        self.fusion = fusion
        width = body.hidden
        first_layer = index * body.layers
        if fusion.norms:
            self.embedding_norm = Norm(width, body.epsilon)
            self.state_norm = Norm(width, body.epsilon)
        if fusion.at is FusionPoint.PROJECTION:
            self.project = nn.Linear(2 * width, width, bias=fusion.bias)
        self.layers = nn.ModuleList()
        for i in range(body.layers):
            if not i and fusion.at is FusionPoint.ATTENTION:
                layer = Layer(body, first_layer, inputs=2 * width, norm=False)
            else:
                layer = Layer(body, first_layer + i, inputs=width, norm=body.first_norm or i > 0)
            self.layers.append(layer)
        if description.final_norm:
            self.norm = Norm(width, body.epsilon)

    def run(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, attend: AttentionFunction
    ) -> torch.Tensor:
        """Return the outputs [*, T, H] for embeddings and hidden states [*, T, H] at positions [*, T]."""
        if self.fusion.zero_first:
            embedded = embedded * (positions > 0)[..., None]
        normed_states = states
        if self.fusion.norms:
            embedded = self.embedding_norm(embedded)
            normed_states = self.state_norm(states)
        pair = (embedded, normed_states) if self.fusion.embedding_first else (normed_states, embedded)
        fused = torch.cat(pair, -1)
        rotary = rotation(positions, self.body, states.dtype)
        if self.fusion.at is FusionPoint.PROJECTION:
            x = self.project(fused)
            attention_input = None
        else:
            x = normed_states if self.fusion.residual_normed else states
            attention_input = fused
        for i, layer in enumerate(self.layers):
            x = layer(x, rotary, attend, attention_input=None if i else attention_input)
        return x  # type: ignore[no-any-return]

    def apply_norm(self, out: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to outputs [*, H], if the module has one."""
        return self.norm(out) if hasattr(self, "norm") else out


class LaterModule(DraftModule):
    """A module after the first one."""

    def __init__(self, description: HeadDescription, index: int) -> None:
        super().__init__()
        self.build(description, index)


class AutoregressiveHead(HeadBase, DraftModule):
    """A draft head with one or more modules. It is its own first module."""

    def __init__(self, description: HeadDescription) -> None:
        super().__init__(description)
        body = description.body
        aux = description.aux_states
        assert body is not None
        fuse_inputs = len(aux.layers) * description.target_hidden
        if aux.norm is FuseNorm.EACH:
            self.fuse_norm = nn.ModuleList(Norm(description.target_hidden, body.epsilon) for _ in aux.layers)
        elif aux.norm is FuseNorm.WHOLE:
            self.fuse_norm = nn.ModuleList([Norm(fuse_inputs, body.epsilon)])
        if aux.fused:
            self.fuse = nn.Linear(fuse_inputs, body.hidden, bias=aux.bias)
        if description.masks:
            self.mask = nn.Parameter(torch.empty(fuse_inputs).normal_())  # replaces the target's states
        self.build(description, 0)
        self.deeper = nn.ModuleList(LaterModule(description, index) for index in range(1, description.modules))

    def fuse_states(self, aux_states: torch.Tensor) -> torch.Tensor:
        """Return the fused states [*, H] of the target's hidden states [*, layers, target H]."""
        gathered = self.gather_states(aux_states)
        return self.fuse(gathered) if self.description.aux_states.fused else gathered

    def gather_states(self, aux_states: torch.Tensor) -> torch.Tensor:
        """Return the input of the fusion [*, layers * target H]: the normalized and concatenated states."""
        if self.description.aux_states.norm is FuseNorm.EACH:
            aux_states = torch.stack([norm(aux_states[..., i, :]) for i, norm in enumerate(self.fuse_norm)], -2)
        aux_states = aux_states.flatten(-2)
        if self.description.aux_states.norm is FuseNorm.WHOLE:
            return self.fuse_norm[0](aux_states)  # type: ignore[no-any-return]
        return aux_states

    def mask_state(self) -> torch.Tensor:
        """Return the fused state [H] of mask tokens."""
        return self.fuse_states(self.mask.view(-1, self.description.target_hidden))

    def forward(
        self,
        tokens: torch.Tensor,  # [*, T] target ids
        states: torch.Tensor,  # [*, T, H] fused states, or the head's own from `feed_back`
        positions: torch.Tensor,  # [*, T] of the states; the second token of a sequence has position 0
        attend: AttentionFunction,
        module: int = 0,
    ) -> torch.Tensor:
        """Return the outputs [*, T, H] of one module, before the final norm."""
        return self._get_module(module).run(self.embed(tokens).to(states.dtype), states, positions, attend)

    def feed_back(self, out: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return the state that is fed back with the next draft token, for outputs [*, H]."""
        return self.normed(out, module) if self.description.feedback is Feedback.NORMED else out

    def normed(self, out: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return outputs [*, H] of a module after its final norm, if it has one."""
        return self._get_module(module).apply_norm(out)

    def logits(self, out: torch.Tensor, module: int = 0) -> torch.Tensor:
        """Return float32 logits [*, Vd] over `ids` for outputs [*, H] before the final norm."""
        return super().logits(self.normed(out, module))

    def _get_module(self, index: int) -> DraftModule:
        return self.deeper[index - 1] if index else self  # type: ignore[return-value]
