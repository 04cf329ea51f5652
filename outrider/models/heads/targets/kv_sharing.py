"""A target that runs draft heads that attend to the target's keys and values. It has no KV cache of its own."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.errors import OutriderError
from outrider.models.heads.hidden_states import NoCache
from outrider.models.heads.modules.kv_sharing import KVSharingHead
from outrider.models.heads.targets.base import HeadRunner


class KVSharingTarget(HeadRunner):
    """Runs a `KVSharingHead`, which reads the KV cache of its target.

    Queries attend to whatever the target has cached for a sequence at that time. So the head must
    draft before the target runs its next pass.
    """

    module: KVSharingHead

    def __init__(self, module: KVSharingHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        """Prepare for `slots` sequences of up to `context` tokens.

        Raises:
            OutriderError: the target does not export keys and values.
        """
        super().__init__(module, tables, slots=slots, context=context, max_draft_tokens=context)
        if tables.kv_view is None:
            raise OutriderError(
                "this draft head needs the target's keys and values, which this target does not"
                " export; use another draft head"
            )
        self._target_kv = tables.kv_view
        self.cache = NoCache(self.hidden_states)
        # These belong to the current round.
        self._slots: list[int] = []
        self._ends: list[int] = []  # position of the last committed token of each sequence
        self._states = torch.empty(0)  # [B, 1 + nodes, H] after the last committed token and after each node

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._slots = [seq.slot for seq in batch.seqs]
            self._ends = [end - 1 for end in batch.ends]
            ends = zip(self._slots, self._ends, strict=True)
            target_states = torch.cat([self.hidden_states.read(slot, end - 1, end) for slot, end in ends])
            tokens = tree.upload([feed[-1:] for feed in batch.feed], self.device)
            states = self.module.fuse_states(target_states)[:, None].to(self._dtype)
        else:
            parents = draft.parent[:, first:].clamp(max=first - 1) + 1
            tokens = draft.tokens[:, first:]
            states = self._states.gather(1, parents[..., None].expand(-1, -1, self._states.shape[-1]))
        positions = tree.upload(self._ends, self.device)[:, None].expand_as(tokens)
        out = self.module(tokens, states, positions, self._attend)
        new_states = self.module.feed_back(out)
        self._states = new_states if first < 0 else torch.cat([self._states[:, : 1 + first], new_states], 1)
        return self._scores(self.module.logits(out))

    def _attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the attention output of queries [B, heads, M, D] over the target's entries, or a window of them."""
        shared = self.module.description.shared_kv[layer]
        seqs, heads, columns, dim = query.shape
        ends = self._ends
        begins = [max(end - shared.window, 0) if shared.window else 0 for end in ends]
        begin = min(begins)
        end = max(ends)
        mask = None
        if len(set(ends)) > 1:
            entry_index = torch.arange(begin, end, device=self.device)
            first_entry = tree.upload(begins, self.device)[:, None]
            entry_end = tree.upload(ends, self.device)[:, None]
            mask = ((entry_index >= first_entry) & (entry_index < entry_end))[:, None, None]
        entries = self._target_kv.entries(shared.layer, self._slots, begin, end)
        if entries is None:  # the target has not run yet, because passes of the head are being timed
            keys = values = query.new_zeros(seqs, shared.key_heads, 1, dim).expand(-1, -1, end - begin, -1)
        else:
            keys, values = (tensor.to(query.dtype) for tensor in entries)
        # Treat the query heads that share a key head as further columns of one head.
        grouped = query.reshape(seqs, shared.key_heads, heads // shared.key_heads * columns, dim)
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(query.shape)
