"""The base class of targets that run draft heads.

A draft head implements the same `Target` protocol as a draft model, so proposers and planners treat both alike. In
addition, a draft head needs the target's hidden state before each token, which each round brings
(`HiddenStates.record`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.core import tree
from outrider.core.cache import Cache
from outrider.core.target import Target, draft_by_scores, expand_logits
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.hidden_states import HiddenStates
from outrider.models.heads.modules.layers import Attention, AttentionFunction
from outrider.models.torch.attention import CacheReader, MaskRule, attend


@runtime_checkable
class HeadTarget(Target, Protocol):
    """A `Target` that needs the target's hidden states and predicts at most `max_draft_tokens` in a row."""

    description: HeadDescription
    max_draft_tokens: int
    hidden_states: HiddenStates  # record those of a round before it is committed


class HeadRunner:
    """The base of the targets of all draft heads. Subclasses implement `score`."""

    cache: Cache

    def __init__(self, module: Any, tables: SharedWeights, *, slots: int, context: int, max_draft_tokens: int) -> None:
        """Prepare a module for `slots` sequences of up to `context` tokens. It shares `tables` with the target."""
        self.description: HeadDescription = module.description
        self.module = module
        self.vocab = module.description.vocab
        self.slots = slots
        self.context = context
        self.max_draft_tokens = max_draft_tokens
        self.device = tables.embedding.device
        self.kernels = "torch"
        self.version = 0
        self.hidden_states = HiddenStates(self.description, tables)
        self._dtype = next(module.parameters()).dtype
        module.share_weights(tables.embedding, tables.head)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        raise NotImplementedError

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return draft_by_scores(self, batch, vocab, stop_rule)

    def export_hidden_states(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError("a draft head cannot export hidden states; export those of its target")

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new values for some or all weights. Raises OutriderError if a name or a shape does not match."""
        state_dict = self.module.state_dict()
        for name, value in weights.items():
            if name not in state_dict:
                raise OutriderError(f"the draft head has no weight {name!r}; give weights of the same draft head")
            if state_dict[name].shape != value.shape:
                raise OutriderError(
                    f"the new weight {name!r} has shape {tuple(value.shape)}, but the draft head"
                    f" has {tuple(state_dict[name].shape)}; give weights of the same draft head"
                )
        self.module.load_state_dict({**state_dict, **weights})
        self.version = version

    def refresh_shared(self, tables: SharedWeights) -> None:
        """Use the current values of the weights that the head shares with its target, after those have changed."""
        self.hidden_states.use_tables(tables)
        self.module.share_weights(tables.embedding, tables.head)

    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.module.parameters())

    def _scores(self, logits: torch.Tensor) -> Scores:
        """Expand logits [B, M, Vd] to the target's vocabulary. Other tokens get -inf."""
        if logits.shape[-1] == self.vocab:
            return Scores(logits=logits)
        return Scores(logits=expand_logits(logits, self.module.ids, self.vocab))


def window_rule(size: int | None) -> MaskRule | None:
    """Return the mask rule of a head that sees the latest `size` tokens, itself included; None: it sees all."""
    if size is None:
        return None
    return MaskRule(lambda _seq, _head, query, key: key > query - size, size)


def cached_attention(reader: CacheReader, mask_rule: MaskRule | None = None) -> AttentionFunction:
    """Return a function that computes attention over a KV cache, for a packed pass."""

    def attend_cached(module: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(module, query[None], key[None], value[None], mask_rule, kv=reader)[0][0].transpose(0, 1)

    return attend_cached


def node_depths(draft: Draft, first: int) -> torch.Tensor:
    """Return the depths [B, M] of the nodes from `first` on. With -1 the first one is the root, of depth 0."""
    depths = torch.cat([torch.zeros_like(draft.count)[:, None], tree.depths(draft)], 1)
    return depths[:, 1 + first :]


def at_depth(values: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
    """Select values [B, M, *] at the given depths.

    Args:
        values: [B, D, *] values by depth, that is, by the number of draft tokens before.
        depth: [B, M] depths. From D on, the last value is used.
    """
    seqs = torch.arange(len(values), device=values.device)[:, None]
    return values[seqs, depth.clamp(max=values.shape[1] - 1)]
