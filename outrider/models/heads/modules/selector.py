"""The candidate selector of DFlash 2: scores the likeliest tokens of a column by the token before them.

The score of a token b after a token a is its logit, plus the product of A(a), G(h) and B(b), summed
over the rank. A and B are tables of all tokens, and G maps the output h of the column.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription, Selector

_INIT_STD = 0.02  # of the table of tokens before


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
