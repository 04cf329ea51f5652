"""Targets that run autoregressive draft heads, on torch and on the native kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.core import tree
from outrider.core.cache import SequenceSpan
from outrider.core.config import FULL_BITS
from outrider.core.draws import Draws
from outrider.core.types import Batch, Draft, DraftChains, Scores, SharedWeights, StopRule
from outrider.models.cache.paged import PagedCache
from outrider.models.cache.static import StaticCache
from outrider.models.heads.hidden_states import StateCache
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.targets.base import HeadRunner, cached_attention, node_depths, window_rule
from outrider.models.heads.targets.native import HeadDecoder
from outrider.models.native.batch_columns import columns_of
from outrider.models.native.library import load_library
from outrider.models.torch.attention import CacheReader, MaskRule

# Runs one module of a head: from states [T, H] and its index, it returns the outputs [T, H] of the columns of a pass.
RunModule = Callable[[torch.Tensor, int], torch.Tensor]


class AutoregressiveTarget(HeadRunner):
    """Runs an `AutoregressiveHead` with its own KV cache, on torch."""

    module: AutoregressiveHead
    cache: StateCache

    def __init__(
        self, module: AutoregressiveHead, tables: SharedWeights, *, slots: int, context: int, window: int | None = None
    ) -> None:
        """Prepare for `slots` sequences of up to `context` tokens.

        With `window`, each token attends only to the latest `window` tokens. Rotary positions are
        relative, so the head never sees a distance that it was not trained for.
        """
        super().__init__(module, tables, slots=slots, context=context, max_draft_tokens=context)
        self._mask_rule = window_rule(window)
        self._kv_cache = StaticCache(slots=slots, capacity=context, device=self.device)
        self.cache = StateCache(self._kv_cache, self.hidden_states, to_head_batch=skip_tokens, skipped_tokens=1)
        self._node_states = torch.empty(0)  # [B, 1 + N, H] after the last committed token, and after each node
        self._prepare()

    def _prepare(self) -> None:
        """Prepare what a subclass needs."""

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        head_batch = skip_tokens(batch)
        states = self._feed_states(batch) if first < 0 else self._parent_states(draft, first)
        fed_back, logits = self._run(head_batch, draft, first, states)
        self._store_states(fed_back, head_batch, draft, first)
        return self._scores(logits)

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states [T, S] that all columns feed back, and the logits [B, M, Vd] of the nodes."""
        layout = self._kv_cache.stage(batch, draft, first)
        reader = CacheReader(self._kv_cache, layout)

        def run(states: torch.Tensor, module: int) -> torch.Tensor:
            attention = cached_attention(reader, self._rule_of(module))
            return self.module(layout.tokens, states, layout.positions, attention, module)  # type: ignore[no-any-return]

        fed_back, out = self._outputs(run, states, self._begins(layout.spans, first))
        return fed_back, self._node_logits(layout.per_node(out[layout.keep]), lambda: node_depths(draft, first))

    def _rule_of(self, module: int) -> MaskRule | None:
        """Return the mask rule of the layers of one module."""
        return self._mask_rule

    def _begins(self, spans: Sequence[SequenceSpan], first: int) -> torch.Tensor | None:
        """Return the first column [B] of each feed; None: the pass has no feed."""
        return tree.upload([span.begin for span in spans], self.device) if first < 0 else None

    def _outputs(
        self, run: RunModule, states: torch.Tensor, begins: torch.Tensor | None, modules: range | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the modules over the columns of a pass.

        Args:
            run: runs one module.
            states: [T, S] that the columns start from.
            begins: as `_begins` returns them, for heads with several modules.
            modules: those that are needed; None: all.

        Returns:
            The states [T, S] that columns feed back, and the outputs that `_node_logits` takes.
        """
        out = run(states, 0)
        return self.module.feed_back(out), out

    def _node_logits(self, out: torch.Tensor, depth: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return float32 logits [*, Vd] of nodes for their outputs [*, H] and depths [*]."""
        return self.module.logits(out)

    def _feed_states(self, batch: Batch) -> torch.Tensor:
        """Return the target's states [T, H] that the feeds start from."""
        return torch.cat([self._input_states(batch, b) for b in range(len(batch.seqs))])

    def _input_states(self, batch: Batch, b: int) -> torch.Tensor:
        """Return the target's states [F, H] that the feed of sequence b starts from."""
        return self._target_states(batch.seqs[b].slot, max(batch.start[b], 1) - 1, batch.ends[b] - 1)

    def _parent_states(self, draft: Draft, first: int) -> torch.Tensor:
        """Return the states [T, H] that the nodes from `first` on start from."""
        parent = draft.parent[:, first:].clamp(max=first - 1) + 1
        width = self._node_states.shape[-1]
        states = self._node_states.gather(1, parent[..., None].expand(-1, -1, width))
        return torch.cat([states[b, : max(width - first, 0)] for b, width in enumerate(draft.width)])

    def _target_states(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the target's states [end - begin, H] as the module takes them."""
        return self.module.fuse_states(self.hidden_states.read(slot, begin, end).to(self._dtype))

    def _store_states(self, states: torch.Tensor, batch: Batch, draft: Draft, first: int) -> None:
        """Store the state after the last committed token or each new node, for its children."""
        if first < 0:
            assert not any(draft.width), "run the feed before draft tokens"
            ends = accumulate(map(len, batch.feed))
            self._node_states = torch.stack([states[end - 1] for end in ends])[:, None]
            return
        counts = [max(width - first, 0) for width in draft.width]
        padded = pad_sequence(list(torch.split(states, counts)), batch_first=True)
        self._node_states = torch.cat([self._node_states[:, : 1 + first], padded], 1)


class NativeHead(AutoregressiveTarget):
    """Runs an `AutoregressiveHead` on the native kernels."""

    def __init__(
        self,
        module: AutoregressiveHead,
        tables: SharedWeights,
        *,
        slots: int,
        context: int,
        window: int | None = None,
        bits: int = FULL_BITS,
    ) -> None:
        """Prepare as an `AutoregressiveTarget`. With `bits` below 16 the kernels read quantized weights.

        Raises:
            UnsupportedModel: the kernels cannot run this head.
        """
        super().__init__(module, tables, slots=slots, context=context, window=window)
        body = module.body
        self._paged_cache = PagedCache(
            slots=slots,
            capacity=context,
            layers=body.layers,
            heads=body.key_heads,
            dim=body.dim,
            dtype=tables.embedding.dtype,
        )
        self.cache.replace_inner(self._paged_cache)
        self._shared_weights = tables
        self._window = window
        self._bits = bits
        self._pack()
        self.kernels = "native" if bits == FULL_BITS else f"native int{bits}"

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        super().update_weights(weights, version)
        self._pack()

    def refresh_shared(self, tables: SharedWeights) -> None:
        super().refresh_shared(tables)
        self._shared_weights = tables
        self._pack()

    def bytes(self) -> int:
        """Return the bytes of the module's weights and of the packed ones. The module's are kept for weight updates."""
        return super().bytes() + self._decoder.bytes()

    def _pack(self) -> None:
        """Pack the weights again. The memory of the old ones is freed with their decoder."""
        self._decoder = HeadDecoder(
            self.module, self._shared_weights, load_library(), self._paged_cache, window=self._window, bits=self._bits
        )

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._paged_cache.reserve(batch, draft.width)
        columns, _, order = columns_of(batch, draft, first, self.vocab)
        logits, _, out = self._decoder.run(columns, (self.module.body.layers - 1,), states.float().contiguous())
        logits = logits if order is None else logits[order]
        return self.module.feed_back(out[0].to(self._dtype)), logits.view(len(batch.seqs), -1, logits.shape[-1])


class NativeAutoregressiveTarget(NativeHead):
    """Runs an `AutoregressiveHead` on the native kernels, a whole chain of draft tokens per call.

    The kernels also fuse the target's hidden states. For a few columns, the calls of torch would
    take longer than the draft tokens.
    """

    def draft_greedy(self, batch: Batch, vocab: int, stop_rule: StopRule | None = None) -> DraftChains:
        return self._draft_chains(batch, vocab, stop_rule, None)

    def draft_sampled(self, batch: Batch, vocab: int, draws: Draws, stop_rule: StopRule | None = None) -> DraftChains:
        return self._draft_chains(batch, vocab, stop_rule, draws)

    def _draft_chains(self, batch: Batch, vocab: int, stop_rule: StopRule | None, draws: Draws | None) -> DraftChains:
        head_batch = skip_tokens(batch)
        empty = tree.empty(len(batch.seqs), self.device)
        states = self._feed_states(batch)
        self._paged_cache.reserve(head_batch, batch.draft_budget)
        columns = columns_of(head_batch, empty, -1, self.vocab).columns
        return self._decoder.draft_chains(
            columns, batch.draft_budget, vocab, stop_rule, draws=draws, state=states.float().contiguous()
        )

    def _target_states(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the target's states [end - begin, layers, target H] before fusion."""
        return self.hidden_states.read_raw(slot, begin, end)


def skip_tokens(batch: Batch, count: int = 1) -> Batch:
    """Return the batch without the first `count` tokens of each sequence, for which there are no states."""
    start = tuple(max(start - count, 0) for start in batch.start)
    feed = tuple(feed[max(count - start, 0) :] for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(batch, start=start, feed=feed)
