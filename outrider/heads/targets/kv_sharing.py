"""A draft that looks at the target's keys and values, as a target: it reads no text, and keeps none."""

from __future__ import annotations

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Batch, Draft, Scores, SharedWeights
from outrider.errors import OutriderError
from outrider.heads.hidden_states import NoCache
from outrider.heads.modules.kv_sharing import KVSharingHead
from outrider.heads.targets.base import HeadRunner


class KVSharingTarget(HeadRunner):
    """An `KVSharingHead` beside the memory of its target.

    What the target has cached of a row when it is asked for guesses is what the row's queries see, so it must be asked
    before the target runs on.
    """

    module: KVSharingHead

    def __init__(self, module: KVSharingHead, tables: SharedWeights, *, slots: int, context: int) -> None:
        """Prepare for `slots` rows of up to `context` tokens.

        Raises:
            OutriderError: the target shows no keys and values.
        """
        super().__init__(module, tables, slots=slots, context=context, reach=context)
        if tables.kv_view is None:
            raise OutriderError("the draft looks at keys and values, and this target shows none; use another draft")
        self._memory = tables.kv_view
        self.cache = NoCache(self._taps)
        # Of this round: the texts' slots and lengths, and the states [B, 1 + nodes, H] behind their ends and the nodes.
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._states = torch.empty(0)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            self._slots = [row.slot for row in batch.seqs]
            self._lengths = [start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True)]
            ends = zip(self._slots, self._lengths, strict=True)
            taps = torch.cat([self._taps.read(slot, end - 2, end - 1) for slot, end in ends])
            tokens = tree.upload([feed[-1:] for feed in batch.feed], self.device)
            states = self.module.fused(taps)[:, None].to(self._dtype)
        else:
            above = draft.parent[:, first:].clamp(max=first - 1) + 1
            tokens = draft.tokens[:, first:]
            states = self._states.gather(1, above[..., None].expand(-1, -1, self._states.shape[-1]))
        last = tree.upload([length - 1 for length in self._lengths], self.device)[:, None].expand_as(tokens)
        out = self.module(tokens, states, last, self._look)
        behind = self.module.recycled(out)
        self._states = behind if first < 0 else torch.cat([self._states[:, : 1 + first], behind], 1)
        return self._scores(self.module.logits(out))

    def _look(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """What queries [B, heads, M, D] find: of each row all entries, or the last ones that its view shows."""
        view, (rows, heads, columns, dim) = self.module.description.shared_kv[layer], query.shape
        ends = [length - 1 for length in self._lengths]
        begins = [max(end - view.window, 0) if view.window else 0 for end in ends]
        begin, end = min(begins), max(ends)
        mask = None
        if len(set(ends)) > 1:
            places = torch.arange(begin, end, device=self.device)
            lows, highs = (tree.upload(each, self.device)[:, None] for each in (begins, ends))
            mask = ((places >= lows) & (places < highs))[:, None, None]
        entries = self._memory.entries(view.layer, self._slots, begin, end)
        if entries is None:  # no text was ever read, and what is being timed is a pass
            keys = values = query.new_zeros(rows, view.key_heads, 1, dim).expand(-1, -1, end - begin, -1)
        else:
            keys, values = (each.to(query.dtype) for each in entries)
        # The query heads that share a key head stand one below another.
        asked = query.reshape(rows, view.key_heads, heads // view.key_heads * columns, dim)
        return functional.scaled_dot_product_attention(asked, keys, values, attn_mask=mask).reshape(query.shape)
