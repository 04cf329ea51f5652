"""Trained drafts as targets: what a draft model is to a proposer, they are too.

They read the same text as a draft model would, and beside each token the state from which the target went on to it. So
chains, trees, confidence and planning are those of draft models. The target's states come with each round (`note`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.cache.base import Cache
from outrider.core.types import Batch, Draft, DraftChains, Round, Scores, SharedWeights, StopRule
from outrider.errors import OutriderError
from outrider.heads.description import HeadDescription
from outrider.heads.hidden_states import HiddenStates
from outrider.heads.modules.layers import Attention, AttentionInput
from outrider.models.attention import CacheReader, attend
from outrider.models.base import Target, draft_by_scores


@runtime_checkable
class HeadTarget(Target, Protocol):
    """A `Target` that must be told of the target's states, and guesses no further than `reach` tokens."""

    description: HeadDescription
    max_draft_tokens: int

    def note(self, round: Round) -> None:
        """Take the states of what was fed and kept, before the round is committed."""

    def piled(self, slot: int) -> int:
        """Places of a row's text whose states were taken and have not been read."""

    def pretend(self, slot: int, start: int, count: int) -> None:
        """Take zeros for the states at `count` places from `start` on, so that passes can be timed without a target."""


class HeadRunner:
    """What all trained drafts have in common as targets; how they score is their own business."""

    cache: Cache

    def __init__(self, module: Any, tables: SharedWeights, *, slots: int, context: int, reach: int) -> None:
        """Lend the target's `tables` to a module, for `slots` rows of up to `context` tokens."""
        self.description: HeadDescription = module.description
        self.module, self.vocab = module, module.description.vocab
        self.slots, self.context, self.max_draft_tokens = slots, context, reach
        self.device, self.kernels, self.version = tables.embedding.device, "torch", 0
        self._taps = HiddenStates(self.description, tables)
        self._dtype = next(module.parameters()).dtype
        module.share_weights(tables.embedding, tables.head)

    def note(self, round: Round) -> None:
        self._taps.record(round)

    def piled(self, slot: int) -> int:
        return self._taps.piled(slot)

    def pretend(self, slot: int, start: int, count: int) -> None:
        self._taps.set_assumed(slot, start, count)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        raise NotImplementedError

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError("a trained draft exports no layers; tap the target's")

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights.

        Raises:
            OutriderError: there is no weight of such a name or shape.
        """
        held = self.module.state_dict()
        for name, value in weights.items():
            if name not in held or held[name].shape != value.shape:
                shape = tuple(held[name].shape) if name in held else "none"
                raise OutriderError(f"the draft has {shape} for {name!r}, and {tuple(value.shape)} was given")
        self.module.load_state_dict({**held, **weights})
        self.version = version

    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.module.parameters())

    def _scores(self, logits: torch.Tensor) -> Scores:
        """Logits [B, M, Vd] over what the draft guesses, as scores over all ids: the others are impossible."""
        if logits.shape[-1] == self.vocab:
            return Scores(logits=logits)
        out = logits.new_full((*logits.shape[:-1], self.vocab), -torch.inf)
        out[..., self.module.ids] = logits
        return Scores(logits=out)


def looking(reader: CacheReader) -> AttentionInput:
    """Attention over a cache, of a pass whose columns are packed one behind another."""

    def look(of: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(of, query[None], key[None], value[None], None, kv=reader)[0][0].transpose(0, 1)

    return look


def at_depth(values: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """[B, M, *] of values [B, guesses, *] by how many guesses stand before each [B, M]; behind the last, the last."""
    rows = torch.arange(len(values), device=values.device)[:, None]
    return values[rows, depth.clamp(max=values.shape[1] - 1)]
