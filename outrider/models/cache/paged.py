"""The paged KV cache: keys and values in blocks. Sequences with equal prefixes share blocks."""

import ctypes
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod

import torch

from outrider.core import tree
from outrider.core.cache import CacheUsage, Layout, lay_out
from outrider.core.types import Batch, Draft, Round, SequenceState
from outrider.models.cache.huge_pages import zeros
from outrider.models.cache.pool import CPool
from outrider.models.cache.prefix_tree import BLOCK, CachedBlock, PrefixTree

_LANES = 16  # entries whose keys are interleaved; kLanes of models/native/csrc/vectors.h
_SCALE = torch.float32.itemsize  # bytes of the scale of a key or a value in int8


def spread(keys: torch.Tensor) -> torch.Tensor:
    """Multiply keys [..., dim] with a Hadamard matrix, as models/native/csrc/pool.cpp. Doing it twice restores them."""
    dim = keys.shape[-1]
    matrix = pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while dim % (2 * len(matrix)) == 0:
        matrix = torch.kron(matrix, pair)
    parts = keys.view(*keys.shape[:-1], -1, len(matrix))
    return (parts @ (matrix / math.sqrt(len(matrix)))).flatten(-2)


class CacheFull(RuntimeError):
    """The cache has no free block. Call `Cache.fits` before a pass."""


@dataclass(slots=True, eq=False)
class _BlockTable:
    """The block table of one slot: shared blocks first, then its own blocks."""

    scope: str | None = None
    num_prompt_tokens: int = 0  # at admission
    length: int = 0  # committed tokens
    shared: list[CachedBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    partial: CachedBlock | None = None  # its first entries are copied into the first own block
    seq: SequenceState | None = None  # set by the first pass

    @property
    def blocks(self) -> int:
        return len(self.shared) + len(self.own)


class PagedCache:
    """Keys and values in bfloat16, float32 or int8, which the native kernels read and write through a block table.

    In int8 each token has a float32 scale per head for its key, and one for its value. They follow
    the numbers in a block, so whatever copies or shares blocks copies and shares them as well. Keys
    are spread over their dimensions (`spread`) before they are rounded.

    A full block of committed tokens is shared read-only. Draft tokens are always written to a
    sequence's own blocks. A prefix that ends within a shared block is copied. If a sequence
    computes a block that exists already, it uses the existing one. So keys and values must not
    depend on the batch, which the native kernels guarantee. Blocks of finished sequences stay
    cached until they are evicted.
    """

    def __init__(
        self,
        *,
        slots: int,
        capacity: int,
        layers: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        key_offset: torch.Tensor | None = None,
    ) -> None:
        """Allocate blocks for `slots` sequences of `capacity` tokens. `resize` changes the number of blocks.

        Args:
            slots: sequences that run at once.
            capacity: tokens of a sequence.
            layers: layers of the model.
            heads: key heads.
            dim: of a head.
            dtype: of keys and values.
            key_offset: [layers, heads, dim] float32, what keys in int8 are stored without; None: 0.
        """
        self._slots = slots
        self._capacity = capacity
        self._reach = -(-capacity // BLOCK)  # blocks of a full context
        self._dim = dim
        self._shape = (layers, heads, 2, BLOCK, dim + _SCALE if dtype == torch.int8 else dim)
        self._dtype = dtype
        self._table = array("i", bytes(4 * slots * self._reach))
        self._tables = [_BlockTable() for _ in range(slots)]
        self._tree = PrefixTree()
        self._shares = False
        self._query_tokens = 0
        self._hit_tokens = 0
        self._key_offset = torch.zeros(layers, heads, dim) if key_offset is None else key_offset
        self._pool = CPool(
            table=self._table.buffer_info()[0],
            key_offset=self._key_offset.data_ptr(),
            layers=layers,
            reach=self._reach,
            bits=8 * dtype.itemsize,
        )
        self.resize(self.wanted_blocks)

    @property
    def wanted_blocks(self) -> int:
        """Blocks for a full context in each slot.

        One more per slot, because a sequence briefly uses both a partly matching block and its copy.
        """
        return self._slots * (self._reach + 1)

    def resize(self, blocks: int) -> None:
        """Change the number of blocks and clear the cache. No sequence may run."""
        self._tables = [_BlockTable() for _ in self._tables]
        self._entries = self._allocate(blocks)
        self._pool.entries = self._entries.data_ptr()
        self._tree = PrefixTree()
        self._free = list(range(len(self._entries)))  # a heap

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return prod(self._shape) * self._dtype.itemsize

    def address(self) -> int:
        """Address of the `Pool` structure for the kernels."""
        return ctypes.addressof(self._pool)

    def set_prefix_caching(self, on: bool) -> None:
        self._shares = on

    def forget(self) -> None:
        """Stop sharing all cached blocks, after a weight update."""
        self._tree.forget()
        for table in self._tables:
            table.scope = None

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.release(slot)
        table = self._tables[slot] = _BlockTable(scope if self._shares else None, len(tokens))
        if table.scope is not None:
            blocks, table.partial, matched = self._tree.match(table.scope, tokens[:-1])
            for block in blocks:
                self._append_shared(slot, block)
            if table.partial:
                self._tree.acquire(table.partial)
            table.length = BLOCK * len(blocks) + matched
        return table.length

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        self.reserve(batch, draft.width)
        return lay_out(batch, draft, first, self._entries.device)

    def reserve(self, batch: Batch, widths: Sequence[int]) -> None:
        """Allocate blocks for the feed and `widths` [B] draft tokens of each sequence."""
        for seq, start, feed, count in zip(batch.seqs, batch.start, batch.feed, widths, strict=True):
            table = self._tables[seq.slot]
            stop = start + len(feed) + count
            assert stop <= self._capacity, "slot overflow"
            if table.seq is None and table.scope is not None:
                self._query_tokens += table.num_prompt_tokens
                self._hit_tokens += table.length
            table.seq = seq
            while BLOCK * table.blocks < stop:
                self._grow(seq.slot)

    def commit(self, round: Round) -> None:
        batch = round.batch
        for seq, start, feed, path in zip(batch.seqs, batch.start, batch.feed, round.path, strict=True):
            base = start + len(feed)
            table = self._tables[seq.slot]
            table.length = base + len(path)
            if path and path[-1] >= len(path):  # some node is not the child of the one before it
                self._compact(seq.slot, base, path)
            if table.scope is not None and base >= BLOCK * (len(table.shared) + 1):
                self._publish(seq.slot, base)  # the scheduler has not appended the accepted tokens yet

    def release(self, slot: int) -> None:
        table = self._tables[slot]
        if table.seq is not None:
            # A stop string may have ended the sequence before the last committed tokens.
            self._publish(slot, min(table.length, len(table.seq.token_ids)), ended=True)
        if table.partial:
            self._tree.release(table.partial)
        for block in reversed(table.shared):
            self._tree.release(block)
        for index in table.own:
            heappush(self._free, index)
        self._tables[slot] = _BlockTable()

    def length(self, slot: int) -> int:
        return self._tables[slot].length

    def fits(self, ends: Mapping[int, int]) -> bool:
        missing = 0
        for slot, end in ends.items():
            table = self._tables[slot]
            more = -(-end // BLOCK) - len(table.shared) - len(table.own)
            missing += more if more > 0 else 0
        return missing <= len(self._free) + self._tree.idle

    def usage(self) -> CacheUsage:
        return CacheUsage(
            token_bytes=self.block_bytes // BLOCK,
            block_tokens=BLOCK,
            slot_tokens=self._capacity,
            blocks=len(self._entries),
            full_blocks=self.wanted_blocks,
            used_blocks=len(self._entries) - len(self._free) - self._tree.idle,
            cached_blocks=self._tree.idle,
            query_tokens=self._query_tokens,
            hit_tokens=self._hit_tokens,
            evicted_blocks=self._tree.evicted,
        )

    def bytes(self) -> int:
        return self._entries.nbytes

    def entries(
        self, layer: int, slots: Sequence[int], begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Copy keys and values [slots, heads, end - begin, dim] of a layer; None if these slots are empty.

        Those in int8 are returned in float32. Entries beyond the length of a slot are arbitrary
        finite numbers.
        """
        if not any(self._tables[slot].blocks for slot in slots):
            return None
        first = begin // BLOCK
        last = -(-end // BLOCK)
        blocks = torch.zeros(len(slots), last - first, dtype=torch.int64)
        for b, slot in enumerate(slots):
            row = slot * self._reach
            indices = self._table[row + first : row + min(last, self._tables[slot].blocks)]
            blocks[b, : len(indices)] = torch.tensor(indices, dtype=torch.int64)
        keys, values = self._by_position(self._entries[blocks, layer])
        if self._dtype == torch.int8:
            keys = spread(keys) + self._key_offset[layer, :, None]
        wanted = slice(begin - first * BLOCK, end - first * BLOCK)
        return keys[:, :, wanted], values[:, :, wanted]

    def _by_position(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [slots, heads, positions, dim] of blocks [slots, blocks, heads, 2, BLOCK, dim]."""
        keys, values = self._views(entries)
        keys = keys.permute(0, 2, 1, 3, 5, 4, 6)  # [slots, heads, blocks, groups, lanes, words, each]
        values = values.permute(0, 2, 1, 3, 5, 4)  # [slots, heads, blocks, words, each, dim]
        shape = (*keys.shape[:2], -1, self._dim)
        keys, values = keys.reshape(shape), values.reshape(shape)
        if self._dtype != torch.int8:
            return keys, values
        scales = self._scales(entries).permute(3, 0, 2, 1, 4).reshape(2, *keys.shape[:-1], 1)
        return keys * scales[0], values * scales[1]

    def _allocate(self, blocks: int) -> torch.Tensor:
        """Return zeros [blocks, layers, heads, 2, BLOCK, dim], with scales in int8. Unused pages take no memory."""
        return zeros(blocks, *self._shape, dtype=self._dtype)

    def _views(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View blocks as keys [..., heads, groups, words, lanes, each] and values [..., heads, words, dim, each].

        A word of keys holds `each` dimensions of one entry, with 16 entries side by side. A
        word of values holds one dimension of `each` adjacent entries. The kernels multiply this
        layout directly (`models/native/csrc/attention.h`).
        """
        each = 1 if self._dtype == torch.float32 else 2
        dim = self._dim
        keys, values = entries.flatten(-2)[..., : BLOCK * dim].unbind(-2)
        groups = (BLOCK // _LANES, dim // each, _LANES, each)
        return keys.view(*keys.shape[:-1], *groups), values.view(*values.shape[:-1], BLOCK // each, dim, each)

    def _scales(self, entries: torch.Tensor) -> torch.Tensor:
        """View the scales [..., heads, 2, BLOCK] of blocks in int8."""
        return entries.flatten(-2)[..., BLOCK * self._dim :].view(torch.float32)

    def _publish(self, slot: int, length: int, *, ended: bool = False) -> None:
        """Share the full blocks within the first `length` tokens; with `ended` also the last, partly filled one."""
        table = self._tables[slot]
        if table.scope is None or table.seq is None or not table.own:
            return
        for begin in range(BLOCK * len(table.shared), length if ended else length - BLOCK + 1, BLOCK):
            tokens = tuple(table.seq.token_ids[begin : min(begin + BLOCK, length)])
            index = table.own.pop(0)
            block = self._tree.insert(table.scope, table.shared[-1] if table.shared else None, tokens, index)
            if block.index != index:
                heappush(self._free, index)
            if len(tokens) == BLOCK:
                self._append_shared(slot, block)

    def _append_shared(self, slot: int, block: CachedBlock) -> None:
        table = self._tables[slot]
        self._table[slot * self._reach + len(table.shared)] = block.index
        table.shared.append(block)
        self._tree.acquire(block)

    def _grow(self, slot: int) -> None:
        """Append an own block. The first one gets a copy of a partly matching block."""
        table = self._tables[slot]
        block = self._new_block()
        if table.partial:
            self._entries[block] = self._entries[table.partial.index]
            self._tree.release(table.partial)
            table.partial = None
        self._table[slot * self._reach + table.blocks] = block
        table.own.append(block)

    def _new_block(self) -> int:
        # Use the lowest block first, because the system allocates memory on first use.
        if self._free:
            return heappop(self._free)
        if not self._tree.idle:
            raise CacheFull(
                f"all {len(self._entries)} blocks of {BLOCK} tokens are in use; call Cache.fits before a pass"
            )
        return self._tree.evict()

    def _compact(self, slot: int, base: int, path: Sequence[int]) -> None:
        """Move the accepted path of a tree to consecutive entries."""
        block, at = self._locate(slot, [base + node for node in path])
        to_block, to = self._locate(slot, range(base, base + len(path)))
        keys, values = self._views(self._entries)
        each = keys.shape[-1]
        keys[to_block, :, :, to // _LANES, :, to % _LANES] = keys[block, :, :, at // _LANES, :, at % _LANES]
        values[to_block, :, :, to // each, :, to % each] = values[block, :, :, at // each, :, at % each]
        if self._dtype == torch.int8:
            scales = self._scales(self._entries)
            scales[to_block, :, :, :, to] = scales[block, :, :, :, at]

    def _locate(self, slot: int, entries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks of entries of a slot, and their indices in these blocks."""
        row = slot * self._reach
        blocks = [self._table[row + entry // BLOCK] for entry in entries]
        device = self._entries.device
        return tree.upload(blocks, device), tree.upload([entry % BLOCK for entry in entries], device)
