"""The static KV cache: contiguous keys and values for each slot, allocated once."""

from collections.abc import Iterable, Sequence

import torch

from outrider.core import tree
from outrider.core.cache import CacheUsage, Layout, UnboundedCache, lay_out
from outrider.core.types import Batch, Draft, Round, SequenceState
from outrider.models.cache.memory import check_cache
from outrider.models.cache.prefix_tree import common_prefix


class StaticCache(UnboundedCache):
    """Keys and values [slots, heads, capacity, dim] per layer.

    Draft tokens are written after the committed tokens, at the index of their node. Commit moves
    the accepted path of a tree to consecutive entries. Memory of a layer is allocated at its first
    write, in the shape of its keys.

    A slot keeps its tokens after a sequence ends, until another sequence gets the slot. With prefix
    caching, a new sequence copies the longest common prefix from any slot of its scope.
    """

    def __init__(self, *, slots: int, capacity: int, device: torch.device, layers: int = 1, reserve: int = 0) -> None:
        """Prepare for `slots` sequences of up to `capacity` tokens.

        Before the first of the `layers` is allocated, the memory of the device must hold all of
        them, as if their keys had equal shapes, and `reserve` bytes besides.
        """
        self.device = device
        self._layers = layers
        self._reserve = reserve
        self._slots = slots
        self._capacity = capacity
        self._length = [0] * slots
        self._written = [0] * slots  # entries from here on are zero
        self._unchecked = [0] * slots  # end of the entries that may be NaN or infinite
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}  # by layer: exported hidden states [slots, 1, capacity, H]
        self._shares = False
        self._query_tokens = 0
        self._hit_tokens = 0
        self.forget()

    def forget(self) -> None:
        """Stop sharing the cached tokens, after a weight update."""
        self._scopes: list[str | None] = [None] * self._slots
        self._finished: list[list[int]] = [[] for _ in range(self._slots)]  # tokens of slots without a sequence
        self._seqs: list[SequenceState | None] = [None] * self._slots  # the sequence in the slot

    def free(self) -> None:
        """Free the memory. No sequence may run. The next write allocates it again."""
        for tensors in (self._keys, self._values, self._outputs):
            tensors.clear()
        self._written = [0] * self._slots
        self._unchecked = [0] * self._slots
        self.forget()

    def set_prefix_caching(self, on: bool) -> None:
        self._shares = on

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.release(slot)
        prefix = list(tokens[:-1])
        length = 0
        if scope is not None and self._shares:
            length, source = self._longest_prefix(slot, prefix, scope)
            if length:
                self._copy_prefix(source, length, slot)
            self._query_tokens += len(tokens)
            self._hit_tokens += length
        self._scopes[slot] = scope
        self._finished[slot] = prefix[:length]
        self._length[slot] = length
        self._unchecked[slot] = self._written[slot]
        return length

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        layout = lay_out(batch, draft, first, self.device)
        self._set_sequences(batch)
        for span in layout.spans:
            stop = span.start + span.end - span.begin
            if span.end > span.begin:
                assert stop <= self._capacity, "slot overflow"
                self._open(span.slot, stop)
        return layout

    def commit(self, round: Round) -> None:
        batch = round.batch
        for seq, start, feed, path in zip(batch.seqs, batch.start, batch.feed, round.path, strict=True):
            base = start + len(feed)
            self._length[seq.slot] = base + len(path)
            self._unchecked[seq.slot] = 0
            if path != tuple(range(len(path))):
                self._compact(seq.slot, base, path)

    def release(self, slot: int) -> None:
        self._finished[slot] = self._cached_tokens(slot)
        self._seqs[slot] = None
        self._length[slot] = 0

    def usage(self) -> CacheUsage:
        return CacheUsage(
            token_bytes=_bytes(self._tensors()) // self._slots // self._capacity,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
        )

    def length(self, slot: int) -> int:
        return self._length[slot]

    def bytes(self) -> int:
        return _bytes(self._tensors())

    def entries(
        self, layer: int, slots: Sequence[int], begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return keys and values [slots, heads, end - begin, dim] of a layer; None before its first write.

        Entries beyond the length of a slot are arbitrary finite numbers.
        """
        if layer not in self._keys:
            return None
        index: slice | torch.Tensor = slice(slots[0], slots[0] + len(slots))
        if list(slots) != list(range(slots[0], slots[0] + len(slots))):
            index = tree.upload(slots, self.device)
        return self._keys[layer][index, :, begin:end], self._values[layer][index, :, begin:end]

    def write(
        self, layer: int, layout: Layout, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the keys and values [heads, T, dim] of a pass. Returns those of all slots."""
        if values.shape[-1] and not any(each.shape[-1] for each in self._values.values()):
            self._check_memory(keys, values)  # not for the keys of an indexer, which have no values
        if layer not in self._keys:
            self._keys[layer] = self._allocate(keys)
            self._values[layer] = self._allocate(values)
        all_keys, all_values = self._keys[layer], self._values[layer]
        for span in layout.spans:
            at = slice(span.start, span.start + span.end - span.begin)
            all_keys[span.slot, :, at] = keys[:, span.begin : span.end]
            all_values[span.slot, :, at] = values[:, span.begin : span.end]
        return all_keys, all_values

    def _check_memory(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Check the memory for all layers, before the first write of keys and values [heads, T, dim]."""
        check_cache(
            token_bytes=self._layers * (_token_bytes(keys) + _token_bytes(values)),
            slots=self._slots,
            context=self._capacity,
            reserve=self._reserve + self._missing_bytes(),
            device=self.device,
        )

    def _missing_bytes(self) -> int:
        """Return the bytes that the cache still needs besides keys and values."""
        return 0

    def _slots_of(self, scope: str, slot: int) -> list[int]:
        """Return the slots of a scope. `slot` comes first, because it needs no copy."""
        return [other for other in (slot, *range(self._slots)) if self._scopes[other] == scope]

    def _longest_prefix(self, slot: int, prefix: list[int], scope: str) -> tuple[int, int]:
        """Return the number of leading tokens of `prefix` that a slot of the scope has, and the slot."""
        lengths = {other: common_prefix(self._cached_tokens(other), prefix) for other in self._slots_of(scope, slot)}
        source = max(lengths, key=lambda other: lengths[other], default=slot)
        return lengths.get(source, 0), source

    def _copy_prefix(self, source: int, length: int, slot: int) -> None:
        """Copy what is cached of the first `length` tokens of a slot to another."""
        if source != slot:
            for tensor in self._tensors():
                tensor[slot, :, :length] = tensor[source, :, :length]
            self._written[slot] = max(self._written[slot], length)

    def write_outputs(self, layer: int, layout: Layout, states: torch.Tensor) -> None:
        """Store the hidden states [T, H] that a layer exports, so that a shared prefix has them as well."""
        if not self._shares:
            return
        if layer not in self._outputs:
            self._outputs[layer] = self._allocate(states[None])
        for span in layout.spans:
            at = slice(span.start, span.start + span.end - span.begin)
            self._outputs[layer][span.slot, 0, at] = states[span.begin : span.end]

    def outputs(self, slot: int, layers: Sequence[int], end: int) -> torch.Tensor:
        """Return a copy of the exported hidden states [end, layers, H] of the first `end` tokens of a slot."""
        return torch.stack([self._outputs[layer][slot, 0, :end] for layer in layers], 1)

    def drop_outputs(self) -> None:
        """Drop all exported hidden states. Cached tokens without them are not shared any more."""
        self._outputs.clear()
        self.forget()

    def _tensors(self) -> list[torch.Tensor]:
        """Return all that is stored per slot and token, [slots, heads, capacity, dim]."""
        return [*self._keys.values(), *self._values.values(), *self._outputs.values()]

    def _set_sequences(self, batch: Batch) -> None:
        for seq in batch.seqs:
            self._seqs[seq.slot] = seq

    def _cached_tokens(self, slot: int) -> list[int]:
        seq = self._seqs[slot]
        return self._finished[slot] if seq is None else seq.token_ids[: self._length[slot]]

    def _open(self, slot: int, stop: int) -> None:
        """Prepare a slot for a pass that writes entries up to `stop`.

        Attention reads the entries after them with a mask if another sequence of the batch is
        longer. A masked entry has weight 0, but 0 * NaN is NaN. So those of an earlier sequence,
        and of a pass that was not committed, are set to zero. A committed pass of a sequence that
        goes on has finite logits, so its entries are finite.
        """
        if stop < self._unchecked[slot]:
            for tensor in self._tensors():
                tensor[slot, :, stop : self._written[slot]] = 0
            self._written[slot] = stop
        self._unchecked[slot] = stop
        self._written[slot] = max(self._written[slot], stop)

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Use zeros, not empty memory, for the reason in `_open`.
        heads, _, dim = like.shape
        return torch.zeros(self._slots, heads, self._capacity, dim, dtype=like.dtype, device=like.device)

    def _compact(self, slot: int, base: int, path: tuple[int, ...]) -> None:
        """Move the accepted path of a tree to consecutive entries."""
        accepted = tree.upload(path, self.device) + base
        for tensor in self._tensors():
            tensor[slot, :, base : base + len(path)] = tensor[slot, :, accepted]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _token_bytes(entries: torch.Tensor) -> int:
    """Return the bytes of one of T entries [heads, T, dim]; T may be 0."""
    heads, _, dim = entries.shape
    return heads * dim * entries.element_size()
