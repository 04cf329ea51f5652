"""What all trained drafts are as modules: beside the tables of a target, lent or their own, and with a vocabulary."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from outrider.heads.description import HeadDescription


class HeadBase(nn.Module):
    """A draft beside the tables of its target.

    Tables that it shares with the target are lent to it (`lend`) and are no parameters of its own. Where it guesses a
    part of the vocabulary by the target's output layer, it keeps those rows together (Zhao et al. 2025, FR-Spec).
    """

    ids: torch.Tensor  # [Vd] the target's ids of what is guessed, rising

    def __init__(self, description: HeadDescription) -> None:
        super().__init__()
        self.description = it = description
        if it.own_lm_head and not it.stack:
            self.head = nn.Linear(it.width, it.output_vocab, bias=False)
        if it.own_embedding:
            self.embedding = nn.Embedding(it.vocab, it.width)
        self.register_buffer("ids", torch.arange(it.output_vocab), persistent=bool(it.draft_vocab))
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None  # embeddings [V, H], output layer [Vd, H]

    def share_weights(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Take the target's tables [V, H]; again, where `ids` has changed since."""
        self._lent = embedding, head[self.ids] if self.description.draft_vocab else head

    def output_table(self) -> torch.Tensor:
        """The output layer [Vd, H], lent or own."""
        if self.description.own_lm_head:
            return self.head.weight
        assert self._lent is not None, "no output layer was lent"
        return self._lent[1]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[*, Vd] float32, over `ids`, of outputs [*, H]."""
        return functional.linear(out, self.output_table().to(out.dtype)).float()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """[*, H] of the target's ids [*]."""
        if self.description.own_embedding:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        assert self._lent is not None, "no embeddings were lent"
        return functional.embedding(tokens, self._lent[0])
