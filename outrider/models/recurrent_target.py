"""The target for recurrent decoder-only models. transformers runs them one sequence at a time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from outrider.cache.recurrent import RecurrentCache
from outrider.core import tree
from outrider.core.types import Batch, Draft, DraftChains, Scores, StopRule
from outrider.errors import OutriderError
from outrider.models.base import draft_by_scores
from outrider.models.checkpoint import Checkpoint
from outrider.models.prepack import load_weights, weight_bytes


class RecurrentTarget:
    """A recurrent decoder-only model. Sequences run one by one, and the branches of a tree one by one."""

    def __init__(self, checkpoint: Checkpoint, *, slots: int, context: int) -> None:
        self.vocab, self.device = checkpoint.vocab, checkpoint.device
        self.slots, self.context, self.version, self.kernels = slots, context, 0, "torch"
        self.cache = RecurrentCache(slots=slots, device=self.device, fresh=self._fresh, advance=self._advance)
        self._model = checkpoint.model
        self._state_argument = _state_argument(checkpoint.model)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        self.cache.stage(batch, draft, first)
        rows = [self._score_row(batch, draft, b) for b in range(len(batch.seqs))]
        return Scores(logits=torch.stack(rows))

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError(
                "a recurrent target exports no hidden states; use a proposer that needs none, such as ngram"
            )

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        load_weights(self._model, weights)
        self.version = version

    def bytes(self) -> int:
        return weight_bytes(self._model)

    def _score_row(self, batch: Batch, draft: Draft, b: int) -> torch.Tensor:
        """Return the logits [1 + N, V] of sequence b. Padding repeats the root."""
        slot, feed = batch.seqs[b].slot, torch.tensor(batch.feed[b], device=self.device)
        parents = draft.parent[b, : draft.width[b]].tolist()
        out: torch.Tensor | None = None
        for leaf in sorted(set(range(len(parents))) - set(parents)) or [-1]:
            path = tree.path(parents, leaf)
            drafted = draft.tokens[b, path].clamp(0, self.vocab - 1)
            chain = (
                len(path) if path == list(range(len(parents))) else -1
            )  # commit can only keep the state of a whole chain
            logits = self.cache.read(slot, torch.cat([feed, drafted]), chain)[len(feed) - 1 :]
            out = logits[0].expand(1 + draft.size, -1).clone() if out is None else out
            out[[node + 1 for node in path]] = logits[1:]
        assert out is not None
        return out

    def _fresh(self) -> Any:
        return DynamicCache(config=self._model.config)

    def _advance(self, state: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = self._model(input_ids=tokens[None], use_cache=True, **{self._state_argument: state}).logits
        return logits[0].float()  # type: ignore[no-any-return]


def _state_argument(model: Any) -> str:
    """Return the name of the argument of `model.forward` that takes the state. transformers 5.24 renamed it."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "cache_params"
