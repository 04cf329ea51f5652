"""The base class of draft head modules: embedding, LM head and draft vocabulary."""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription
from outrider.models.heads.modules.centroids import CentroidHead


class HeadBase(nn.Module):
    """A draft head with its own embedding and LM head, or with those of its target.

    Tables that it shares with the target are set by `share_weights` and are not parameters of the module. A draft head
    with a reduced vocabulary keeps a copy of the needed rows of the target's LM head (Zhao et al. 2025, FR-Spec).
    """

    ids: torch.Tensor  # [Vd] target ids of the tokens that can be drafted, in ascending order

    def __init__(self, description: HeadDescription) -> None:
        super().__init__()
        self.description = description
        if description.own_lm_head and not description.stack:
            self.head = nn.Linear(description.width, description.output_vocab, bias=False)
        if description.own_embedding:
            self.embedding = nn.Embedding(description.vocab, description.width)
        if description.centroids:
            self.centroid_head = CentroidHead(description.width, description.output_vocab, description.centroids)
        self.register_buffer("ids", torch.arange(description.output_vocab), persistent=bool(description.draft_vocab))
        self._shared: tuple[torch.Tensor, torch.Tensor] | None = None  # embedding [V, H], LM head [Vd, H]

    def share_weights(self, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Use the target's embedding and LM head [V, H]. Call it again after `ids` has changed."""
        self._shared = embedding, head[self.ids] if self.description.draft_vocab else head

    def output_table(self) -> torch.Tensor:
        """Return the weight of the LM head [Vd, H]."""
        if self.description.own_lm_head:
            return self.head.weight
        assert self._shared is not None, "call share_weights first"
        return self._shared[1]

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [*, Vd] over `ids` for outputs [*, H].

        In training mode, all tokens get logits, also with a `CentroidHead`.
        """
        table = self.output_table().to(out.dtype)
        if self.description.centroids and not self.training:
            return self.centroid_head(out, table)  # type: ignore[no-any-return]
        return functional.linear(out, table).float()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [*, H] of target ids [*]."""
        if self.description.own_embedding:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        assert self._shared is not None, "call share_weights first"
        return functional.embedding(tokens, self._shared[0])
