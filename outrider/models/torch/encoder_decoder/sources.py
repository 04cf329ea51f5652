"""Keys and values of the encoded sources, by slot. The cross-attention reads them."""

from collections.abc import Sequence

import torch

from outrider.core import tree
from outrider.core.cache import SequenceSpan
from outrider.models.cache.memory import check_slots

_GROWTH = 64  # positions; the capacity is a multiple of it


class Sources:
    """Keys and values [slots, heads, capacity, dim] of each decoder layer, and the sources that they belong to.

    A source is any object: token ids, or `AudioFeatures`. The capacity grows to the longest source so far.
    """

    def __init__(self, slots: int, device: torch.device, layers: int) -> None:
        self.device = device
        self._layers = layers
        self._slots = slots
        self._capacity = 0
        self._sources: list[object] = [None] * slots  # None: the slot holds no source
        self._length = [0] * slots  # positions of keys and values
        self._keys: dict[int, torch.Tensor] = {}  # by layer
        self._values: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Drop all sources, after a weight update."""
        self._sources = [None] * self._slots

    def holds(self, slot: int, source: object) -> bool:
        """Return whether a slot holds a source. A source that another slot holds is copied."""
        held = self._sources[slot]
        if held is source or held == source:
            return True
        if source not in self._sources:
            return False
        other = self._sources.index(source)
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[slot] = tensor[other]
        self._sources[slot] = source
        self._length[slot] = self._length[other]
        return True

    def begin(self, slot: int, length: int) -> None:
        """Reserve a slot for a source of `length` positions. Call `write` for each layer, and then `end`."""
        self._sources[slot] = None
        self._length[slot] = length
        if length > self._capacity:
            held = self._capacity
            self._capacity = -(-length // _GROWTH) * _GROWTH
            if held:
                self._check_memory(self.bytes() // held // self._slots * (self._capacity - held))
            for tensors in (self._keys, self._values):
                for layer, old in tensors.items():
                    tensors[layer] = self._allocate(old.shape[1], old.shape[3], old.dtype)
                    tensors[layer][:, :, : old.shape[2]] = old

    def write(self, layer: int, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values [heads, S, dim] of a source in a layer."""
        if not self._keys:
            self._check_memory(self._layers * (keys[:, :1].nbytes + values[:, :1].nbytes) * self._capacity)
        for tensors, new in ((self._keys, keys), (self._values, values)):
            if layer not in tensors:
                tensors[layer] = self._allocate(new.shape[0], new.shape[2], new.dtype)
            tensors[layer][slot, :, : new.shape[1]] = new
            tensors[layer][slot, :, new.shape[1] :] = 0  # masked, but 0 * NaN is NaN

    def end(self, slot: int, source: object) -> None:
        """Note that all layers of a source are written."""
        self._sources[slot] = source

    def entries(self, layer: int, group: Sequence[SequenceSpan]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [R, heads, S, dim] for adjacent slots, up to the longest of their sources."""
        slots = slice(group[0].slot, group[0].slot + len(group))
        stop = max(self._lengths(group))
        return self._keys[layer][slots, :, :stop], self._values[layer][slots, :, :stop]

    def mask(self, group: Sequence[SequenceSpan], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask [R, 1, 1, S] of adjacent slots, added to the scores. None: all sources are equally long."""
        lengths = self._lengths(group)
        if min(lengths) == max(lengths):
            return None
        columns = torch.arange(max(lengths), device=self.device)
        padding = columns >= tree.upload(lengths, self.device)[:, None]
        mask = torch.zeros(padding.shape, dtype=dtype, device=self.device).masked_fill_(padding, -torch.inf)
        return mask[:, None, None]

    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._keys.values(), *self._values.values()))

    def _lengths(self, group: Sequence[SequenceSpan]) -> list[int]:
        return [self._length[span.slot] for span in group]

    def _check_memory(self, slot_bytes: int) -> None:
        """Check the memory for the keys and values of all layers, which take `slot_bytes` for each slot."""
        what = f"the keys and values of sources of up to {self._capacity} positions"
        check_slots(what, slot_bytes=slot_bytes, slots=self._slots, device=self.device)

    def _allocate(self, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self._slots, heads, self._capacity, dim, dtype=dtype, device=self.device)
