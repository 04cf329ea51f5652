"""Trained drafts as targets: what a draft model is to a proposer, they are too.

They read the same text as a draft model would, and beside each token the state from which the target went on to it. So
chains, trees, confidence and planning are those of draft models. The target's states come with each round (`note`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch

from outrider import tree
from outrider.attention import Reader, attend
from outrider.cache.base import Cache, Layout
from outrider.cache.static import StaticCache
from outrider.errors import OutriderError, UnsupportedModel
from outrider.heads.block import BlockDraft
from outrider.heads.description import Description
from outrider.heads.follower import Follower
from outrider.heads.independent import Independent
from outrider.heads.layers import Attention
from outrider.heads.native import HeadDecoder
from outrider.native.library import load_library
from outrider.native.target import columns_of
from outrider.target import Target, grow_by_scores
from outrider.types import Batch, Draft, Grown, Round, Scores, Tables, Trust

_log = logging.getLogger("outrider")


@runtime_checkable
class HeadTarget(Target, Protocol):
    """A `Target` that must be told of the target's states, and guesses no further than `reach` tokens."""

    description: Description
    reach: int

    def note(self, round: Round) -> None:
        """Take the states of what was fed and kept, before the round is committed."""

    def pretend(self, slot: int, start: int, count: int) -> None:
        """Take zeros for the states at `count` places from `start` on, so that passes can be timed without a target."""


class Taps:
    """What was tapped of the target's pass, by slot and place in the text, until it is read."""

    def __init__(self, description: Description, tables: Tables) -> None:
        self._description, self._tables = description, tables
        self._first: dict[int, int] = {}  # by slot, the place of the first state kept
        self._kept: dict[int, list[torch.Tensor]] = {}  # [n, taps, H] each, one behind another

    def admit(self, slot: int) -> None:
        self._first[slot], self._kept[slot] = 0, []

    def note(self, round: Round) -> None:
        """Keep the states at each row's feed and accepted path."""
        scores, taps = round.scores, self._description.taps
        for b, (row, path) in enumerate(zip(round.batch.rows, round.path, strict=True)):
            nodes = [node + 1 for node in path]
            found = [torch.cat([scores.fed[at][b], scores.features[at][b, nodes]]) for at in taps.layers]
            if taps.final:
                found[-1] = normed(found[-1], self._tables)
            self._kept[row.slot].append(torch.stack(found, 1))

    def pretend(self, slot: int, start: int, count: int) -> None:
        """Zeros in place of states."""
        it, table = self._description, self._tables.embedding
        zeros = torch.zeros(count, len(it.taps.layers), it.target_hidden, device=table.device)
        self._first[slot], self._kept[slot] = start, [zeros]

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """States [end - begin, taps, H] of these places, none of which was forgotten."""
        first, kept = self._first[slot], self._kept[slot]
        if len(kept) > 1:
            kept[:] = [torch.cat(kept)]
        return kept[0][begin - first : end - first]

    def forget(self, slot: int, before: int) -> None:
        """States before this place will not be asked for any more."""
        if self._kept[slot] and before > self._first[slot]:
            rest = torch.cat(self._kept[slot])[before - self._first[slot] :]
            self._first[slot], self._kept[slot] = before, [rest.clone()]

    def bytes(self) -> int:
        return sum(tensor.nbytes for kept in self._kept.values() for tensor in kept)


class _BehindCache:
    """Has one entry for each token but the first, and keeps those alone that were read with the target's own states."""

    def __init__(self, inner: StaticCache, taps: Taps) -> None:
        self._inner, self._taps = inner, taps

    def admit(self, slot: int, tokens: Sequence[int]) -> int:
        self._taps.admit(slot)
        return self._inner.admit(slot, tokens)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(behind(batch), draft, first)

    def commit(self, round: Round) -> None:
        nothing = ((),) * len(round.batch.rows)  # a guess's state was the draft's own, and is read again
        self._inner.commit(replace(round, batch=behind(round.batch), path=nothing))
        for row in round.batch.rows:
            self._taps.forget(row.slot, self._inner.length(row.slot))

    def release(self, slot: int) -> None:
        self._inner.release(slot)
        self._taps.admit(slot)

    def length(self, slot: int) -> int:
        held = self._inner.length(slot)
        return held + 1 if held else 0

    def bytes(self) -> int:
        return self._inner.bytes() + self._taps.bytes()


class FollowTarget:
    """A `Follower` over its own cache."""

    def __init__(self, module: Follower, tables: Tables, *, slots: int, context: int) -> None:
        self.description, self.module = module.description, module
        self.vocab, self.slots, self.context, self.reach = module.description.vocab, slots, context, context
        self.device, self.kernels, self.version = tables.embedding.device, "torch", 0
        self._taps = Taps(self.description, tables)
        self._memory = StaticCache(slots=slots, capacity=context, device=self.device)
        self.cache: Cache = _BehindCache(self._memory, self._taps)
        self._states: list[dict[int, torch.Tensor]] = []  # by row and node, the state behind it; -1: the text's end
        self._dtype = next(module.parameters()).dtype
        module.lend(tables.embedding, tables.head)

    def note(self, round: Round) -> None:
        self._taps.note(round)

    def pretend(self, slot: int, start: int, count: int) -> None:
        self._taps.pretend(slot, start, count)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        ours = behind(batch)
        states = torch.cat([self._before(batch, draft, first, b) for b in range(len(batch.rows))])
        out, logits = self._run(ours, draft, first, states)
        self._remember(self.module.recycled(out), ours, draft, first)
        return Scores(logits=spread(logits, self.module.ids, self.vocab))

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        return grow_by_scores(self, batch, vocab, trust)

    def export(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError("a trained draft exports no layers; tap the target's")

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        load(self.module, weights)
        self.version = version

    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.module.parameters())

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, H] of all columns, and logits [B, M, Vd] of the nodes asked for."""
        layout = self._memory.stage(batch, draft, first)
        reader = Reader(self._memory, layout)

        def look(of: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(of, query[None], key[None], value[None], None, kv=reader)[0][0].transpose(0, 1)

        out = self.module(layout.tokens, states, layout.positions, look)
        return out, layout.per_node(self.module.logits(out[layout.keep]))

    def _before(self, batch: Batch, draft: Draft, first: int, b: int) -> torch.Tensor:
        """The states [L, H] before row b's columns."""
        slot, end = batch.rows[b].slot, batch.start[b] + len(batch.feed[b])
        if first < 0:
            assert not draft.width[b], "the text is read before guesses are"
            begin = max(batch.start[b], 1)
            return self.module.fused(self._taps.read(slot, begin - 1, end - 1).to(self._dtype))
        known = self._states[b]
        nodes = range(first, draft.width[b])
        above = [node - 1 for node in nodes] if draft.chain else draft.parent[b].tolist()[first : draft.width[b]]
        return torch.stack([known[parent] for parent in above]) if above else known[-1].new_empty(0, len(known[-1]))

    def _remember(self, states: torch.Tensor, batch: Batch, draft: Draft, first: int) -> None:
        """Keep what stands behind the text's end, or behind each new node, for the nodes below."""
        if first < 0:
            ends = accumulate(map(len, batch.feed))
            self._states = [{-1: states[end - 1]} for end in ends]
            return
        column = 0
        for known, width in zip(self._states, draft.width, strict=True):
            for node in range(first, width):
                known[node] = states[column]
                column += 1


class NativeFollowTarget(FollowTarget):
    """The same on the native kernels, where a greedy chain is one call."""

    def __init__(self, module: Follower, tables: Tables, *, slots: int, context: int) -> None:
        """Prepare for `slots` rows of up to `context` tokens.

        Raises:
            UnsupportedModel: the kernels cannot run it.
        """
        super().__init__(module, tables, slots=slots, context=context)
        body = module.body
        stripes = [self._memory.stripes(i, body.key_heads, body.dim) for i in range(body.layers)]
        caches = [keys for keys, _ in stripes], [values for _, values in stripes]
        self._decoder = HeadDecoder(module, tables, load_library(), caches)
        self.kernels = "native"

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        none = tree.empty(len(batch.rows), self.device)
        states = torch.cat([self._before(batch, none, -1, b) for b in range(len(batch.rows))])
        columns, _ = columns_of(behind(batch), none, -1, self.vocab)
        return self._decoder.grow(columns, batch.budget, vocab, trust, state=states.float())

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        raise OutriderError("a trained draft in native kernels cannot be swapped; load it with kernels torch")

    def _run(self, batch: Batch, draft: Draft, first: int, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns, order = columns_of(batch, draft, first, self.vocab)
        logits, _, out = self._decoder.run(columns, (self.module.body.layers - 1,), states.float().contiguous())
        logits = logits if order is None else logits[order]
        return out[0].to(self._dtype), logits.view(len(batch.rows), -1, logits.shape[-1])


class _NoCache:
    """Where nothing is kept of a text but the state before its end."""

    def __init__(self, taps: Taps) -> None:
        self._taps = taps
        self._length: dict[int, int] = {}

    def admit(self, slot: int, tokens: Sequence[int]) -> int:
        self._taps.admit(slot)
        self._length[slot] = 0
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        raise NotImplementedError("there are no keys and values to stage")

    def commit(self, round: Round) -> None:
        for row, start, feed in zip(round.batch.rows, round.batch.start, round.batch.feed, strict=True):
            self._length[row.slot] = start + len(feed)
            self._taps.forget(row.slot, start + len(feed) - 1)

    def release(self, slot: int) -> None:
        self.admit(slot, ())

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return self._taps.bytes()


class IndependentTarget:
    """A stack of `Independent` heads on the state before the last token."""

    def __init__(self, module: Independent, tables: Tables, *, slots: int, context: int) -> None:
        self.description, self.module = module.description, module
        self.vocab, self.slots, self.context = module.description.vocab, slots, context
        self.reach = module.stack.heads
        self.device, self.kernels, self.version = tables.embedding.device, "torch", 0
        self._taps = Taps(self.description, tables)
        self.cache: Cache = _NoCache(self._taps)
        self._dtype = next(module.parameters()).dtype
        self._state, self._last = torch.empty(0), torch.empty(0)  # [B, H], [B, 1] of this round
        module.lend(tables.embedding, tables.head)

    def note(self, round: Round) -> None:
        self._taps.note(round)

    def pretend(self, slot: int, start: int, count: int) -> None:
        self._taps.pretend(slot, start, count)

    def score(self, batch: Batch, draft: Draft, first: int = -1) -> Scores:
        if first < 0:
            ends = [start + len(feed) for start, feed in zip(batch.start, batch.feed, strict=True)]
            taps = [self._taps.read(row.slot, end - 2, end - 1) for row, end in zip(batch.rows, ends, strict=True)]
            self._state = torch.cat(taps)[:, -1].to(self._dtype)
            self._last = tree.upload([feed[-1:] for feed in batch.feed], self.device)
            logits = self.module(self._state, self._last, 0)[:, None]
        else:
            logits = torch.stack([self._after(draft, node) for node in range(first, draft.size)], 1)
        return Scores(logits=spread(logits, self.module.ids, self.vocab))

    def grow(self, batch: Batch, vocab: int, trust: Trust | None = None) -> Grown:
        return grow_by_scores(self, batch, vocab, trust)

    def export(self, layers: Sequence[int]) -> None:
        if layers:
            raise OutriderError("a trained draft exports no layers; tap the target's")

    def swap(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        load(self.module, weights)
        self.version = version

    def bytes(self) -> int:
        return sum(weight.nbytes for weight in self.module.parameters())

    def _after(self, draft: Draft, node: int) -> torch.Tensor:
        """Logits [B, Vd] behind a node, or anything where its row has no such node."""
        paths = [_path(parents, node) for parents in draft.parent.tolist()]
        depth = min(max(map(len, paths)), self.reach - 1)
        if any(len(path) != len(paths[0]) for path in paths):
            return torch.stack([self._row(draft, b, path) for b, path in enumerate(paths)])
        index = tree.upload([path[:depth] for path in paths], self.device)
        return self.module(self._state, torch.cat([self._last, draft.tokens.gather(1, index)], 1), depth)  # type: ignore[no-any-return]

    def _row(self, draft: Draft, b: int, path: Sequence[int]) -> torch.Tensor:
        depth = min(len(path), self.reach - 1)
        tokens = torch.cat([self._last[b], draft.tokens[b, list(path[:depth])]])
        return self.module(self._state[b], tokens, depth)  # type: ignore[no-any-return]


def make_head_target(module: Any, tables: Tables, *, slots: int, context: int) -> HeadTarget:
    """What runs a draft beside a target with these tables."""
    if isinstance(module, BlockDraft):
        from outrider.heads.block_target import BlockTarget  # it is made of what stands here

        return BlockTarget(module, tables, slots=slots, context=context)
    if isinstance(module, Independent):
        return IndependentTarget(module, tables, slots=slots, context=context)
    if tables.packed is not None:
        try:
            return NativeFollowTarget(module, tables, slots=slots, context=context)
        except UnsupportedModel as reason:
            _log.warning("the draft runs on torch's kernels: %s", reason)
    return FollowTarget(module, tables, slots=slots, context=context)


def load(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load new values for some or all weights.

    Raises:
        OutriderError: there is no weight of such a name or shape.
    """
    held = module.state_dict()
    for name, value in weights.items():
        if name not in held or held[name].shape != value.shape:
            shape = tuple(held[name].shape) if name in held else "none"
            raise OutriderError(f"the draft has {shape} for {name!r}, and {tuple(value.shape)} was given")
    module.load_state_dict({**held, **weights})


def behind(batch: Batch) -> Batch:
    """The same batch without each text's first token, which no state led to."""
    start = tuple(max(start - 1, 0) for start in batch.start)
    feed = tuple(feed if start else feed[1:] for start, feed in zip(batch.start, batch.feed, strict=True))
    return replace(batch, start=start, feed=feed)


def normed(states: torch.Tensor, tables: Tables) -> torch.Tensor:
    """The target's final norm."""
    wide = states.float()
    scale = (wide.square().mean(-1, keepdim=True) + tables.epsilon).rsqrt()
    return wide * scale * tables.norm.float()


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Logits [*, Vd] over some of the target's ids as [*, V], the others being impossible."""
    if logits.shape[-1] == vocab:
        return logits
    out = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    out[..., ids] = logits
    return out


def _path(parents: Sequence[int], node: int) -> list[int]:
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
