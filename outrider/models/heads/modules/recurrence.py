"""The recurrent correction of Domino (2605.29707): corrects the logits of a block by the tokens before each one.

A GRU reads the embeddings of the last committed token and of the draft tokens. Its state after the
token before a draft token and the output of the column are mapped to a correction of the logits.
"""

import torch
from torch import nn
from torch.nn import functional

from outrider.models.heads.description import HeadDescription, Recurrence


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
        """Return the states [*, S] after embeddings [*, H] of tokens. `states` [*, S] are those before; None: none."""
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
