"""Hidden states of the target that wait to be processed by a draft head, and the caches that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn import functional

from outrider.core.cache import Cache, Layout, UnboundedCache, WrappedCache
from outrider.core.types import Batch, Draft, Round, SharedWeights
from outrider.models.heads.description import HeadDescription

_MERGE_SIZE = 64  # pieces of a slot that are concatenated, and outdated positions that are freed together


class HiddenStates:
    """The target's hidden states by slot and position, until the draft head has processed them.

    While no sequence drafts, states are only appended, so a round costs almost nothing. `num_pending` tells how many
    states wait, so that callers can feed them to the head before they take too much memory.
    """

    def __init__(self, description: HeadDescription, tables: SharedWeights) -> None:
        self._description = description
        self._tables = tables
        self.latest_only = False  # whether only the states of the latest round are needed
        # By slot, consecutive pieces: the first position, and the states [n, layers, H] from there on.
        self._pending: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def use_tables(self, tables: SharedWeights) -> None:
        """Use new values of the weights that are shared with the target."""
        self._tables = tables

    def admit(self, slot: int) -> None:
        """Start a sequence in `slot`."""
        self._pending[slot] = []

    def record(self, round: Round) -> None:
        """Store the states of each sequence's feed and accepted path."""
        layers = self._description.aux_states.layers
        for b, (seq, path) in enumerate(zip(round.batch.seqs, round.path, strict=True)):
            pieces = self._pending[seq.slot]
            if self.latest_only:
                pieces.clear()
            pieces.append((round.batch.start[b], round.scores.states(layers, b, path)))
            # A piece may be a view that keeps other sequences' states in memory. Concatenation copies it.
            if len(pieces) >= _MERGE_SIZE:
                pieces[:] = [(pieces[0][0], torch.cat([states for _, states in pieces]))]

    def set(self, slot: int, states: torch.Tensor) -> None:
        """Store the states [n, layers, H] of the first n positions, which the target had cached."""
        self._pending[slot] = [(0, states)]

    def set_zeros(self, slot: int, start: int, count: int) -> None:
        """Store zeros as the states of `count` positions from `start` on, to time passes without a target."""
        num_layers = len(self._description.aux_states.layers)
        device = self._tables.embedding.device
        self._pending[slot] = [(start, torch.zeros(count, num_layers, self._description.target_hidden, device=device))]

    def read(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the states [end - begin, layers, H] of these positions, which must not be dropped yet.

        If the description asks for it, the state of the last layer is returned after the target's final norm.
        """
        return self.finish(self.read_raw(slot, begin, end))

    def finish(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the final norm to the last layer of states [n, layers, H], if the description asks for it."""
        if not self._description.aux_states.final or not len(states):
            return states
        last = apply_final_norm(states[:, -1:], self._tables)
        return last if states.shape[1] == 1 else torch.cat([states[:, :-1], last], 1)

    def read_raw(self, slot: int, begin: int, end: int) -> torch.Tensor:
        """Return the same states as the layers output them, before any norm."""
        parts = self.parts(slot, begin, end)
        if not parts:
            num_layers = len(self._description.aux_states.layers)
            return self._tables.embedding.new_zeros(0, num_layers, self._description.target_hidden)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def parts(self, slot: int, begin: int, end: int) -> list[torch.Tensor]:
        """Return the same states as views of consecutive pieces."""
        return [
            states[max(begin - position, 0) : end - position]
            for position, states in self._pending[slot]
            if position < end and begin < position + len(states)
        ]

    def drop_before(self, slot: int, position: int) -> None:
        """Free the states before `position`, which are not needed any more."""
        pieces = self._pending[slot]
        while len(pieces) > 1 and pieces[0][0] + len(pieces[0][1]) <= position:
            del pieces[0]
        if not pieces:
            return
        start, states = pieces[0]
        num_outdated = min(position - start, len(states))
        if num_outdated >= _MERGE_SIZE:
            pieces[0] = start + num_outdated, states[num_outdated:].clone()

    def has_states(self, slot: int) -> bool:
        """Return whether states of the sequence in a slot were stored."""
        return bool(self._pending.get(slot))

    def num_pending(self, slot: int) -> int:
        """Return the number of positions whose states are stored; 0 if only the latest are ever needed."""
        return 0 if self.latest_only else sum(len(states) for _, states in self._pending.get(slot, ()))

    def bytes(self) -> int:
        return sum(states.nbytes for pieces in self._pending.values() for _, states in pieces)


class StateCache(WrappedCache):
    """The KV cache of a draft head, and the target's hidden states that it still needs."""

    def __init__(
        self, inner: Cache, states: HiddenStates, *, to_head_batch: Callable[[Batch], Batch], skipped_tokens: int = 0
    ) -> None:
        """Wrap a KV cache.

        Args:
            inner: the KV cache.
            states: the pending hidden states.
            to_head_batch: maps a batch of the target to the tokens for which the head has entries.
            skipped_tokens: how many tokens at the start of each sequence have no entry.
        """
        super().__init__(inner)
        self._states = states
        self._to_head_batch = to_head_batch
        self._skipped_tokens = skipped_tokens
        self._more_entries = 0

    def replace_inner(self, inner: Cache, *, more_entries: int = 0) -> None:
        """Use another KV cache. Each pass writes `more_entries` entries after those of a sequence."""
        self._inner = inner
        self._more_entries = more_entries

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._inner.fits({slot: end + self._more_entries for slot, end in ends.items()})

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._states.admit(slot)
        return self._inner.admit(slot, tokens)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._inner.stage(self._to_head_batch(batch), draft, first)

    def commit(self, round: Round) -> None:
        # Commit no draft token: its hidden state is unknown until the target has processed it.
        no_paths = ((),) * len(round.batch.seqs)
        self._inner.commit(replace(round, batch=self._to_head_batch(round.batch), path=no_paths))
        for seq in round.batch.seqs:
            self._states.drop_before(seq.slot, self._inner.length(seq.slot))

    def release(self, slot: int) -> None:
        self._inner.release(slot)
        self._states.admit(slot)

    def length(self, slot: int) -> int:
        entries = self._inner.length(slot)
        return entries + self._skipped_tokens if entries else 0

    def set_prefix_caching(self, on: bool) -> None:
        """Do nothing: the hidden states of a cached prefix are unknown."""

    def bytes(self) -> int:
        return self._inner.bytes() + self._states.bytes()


class NoCache(UnboundedCache):
    """The cache of a draft head that needs only the hidden state before the last token."""

    def __init__(self, states: HiddenStates) -> None:
        states.latest_only = True
        self._states = states
        self._length: dict[int, int] = {}

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self._states.admit(slot)
        self._length[slot] = 0
        return 0

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        raise NotImplementedError("there are no keys and values to stage")

    def commit(self, round: Round) -> None:
        for seq, start, feed in zip(round.batch.seqs, round.batch.start, round.batch.feed, strict=True):
            self._length[seq.slot] = start + len(feed)
            self._states.drop_before(seq.slot, start + len(feed) - 1)

    def release(self, slot: int) -> None:
        self.admit(slot, ())

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return self._states.bytes()


def apply_final_norm(states: torch.Tensor, tables: SharedWeights) -> torch.Tensor:
    """Apply the target's final norm to exported states [*, H] of its last layer, if they are not normed yet.

    Returns float32.
    """
    if tables.normed_states:
        return states.float()
    return functional.rms_norm(states.float(), tables.norm.shape, tables.norm.float(), tables.epsilon)
