"""Keys and values in blocks that rows take as they grow, and that texts with the same beginning share."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import torch

from outrider.cache.base import CacheUsage, Layout, lay_out
from outrider.cache.huge_pages import zeros
from outrider.cache.prefix_tree import BLOCK, CachedBlock, PrefixTree
from outrider.core.types import Batch, Draft, Round, SequenceState


class CPool(ctypes.Structure):
    """`Pool` of native/decoder.cpp."""

    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("layers", ctypes.c_int32),
        ("reach", ctypes.c_int32),
        ("bits", ctypes.c_int32),
    )


class CacheFull(RuntimeError):
    """More was fed than there is memory for: the caller did not ask `Cache.fits`."""


@dataclass(slots=True, eq=False)
class _Lease:
    """What one slot has: pages from the text's beginning on, and behind them blocks of its own."""

    scope: str | None = None
    asked: int = 0  # tokens of the text that it was admitted with
    length: int = 0  # committed
    pages: list[CachedBlock] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    part: CachedBlock | None = None  # whose first entries are to be the first of its own
    row: SequenceState | None = None  # whose text it holds, once that has been fed

    @property
    def blocks(self) -> int:
        return len(self.pages) + len(self.own)


class PagedCache:
    """Keys and values, in bfloat16 or float32, for those who read and write them in place, through a table.

    A block of committed text becomes a page, which others may read and nobody writes: guesses always lie in blocks of
    their row's own, and where a text goes on from within a page the row gets a copy of what it shares. A row that has
    written what a page says already takes the page: so a text must have the same keys and values whoever computes them,
    which is what the native kernels promise. When a row ends, its pages stay until their blocks are needed.
    """

    def __init__(self, *, slots: int, capacity: int, layers: int, heads: int, dim: int, dtype: torch.dtype) -> None:
        """Have room for `slots` texts of `capacity` tokens; `allot` changes how many blocks there are."""
        self._capacity, self._reach = capacity, -(-capacity // BLOCK)
        self._shape, self._dtype = (layers, heads, 2, BLOCK, dim), dtype
        self._table = array("i", bytes(4 * slots * self._reach))
        self._leases = [_Lease() for _ in range(slots)]
        self._pages = PrefixTree()
        self._shares = False
        self._asked = self._spared = 0
        self._pool = CPool(0, self._table.buffer_info()[0], layers, self._reach, 8 * dtype.itemsize)
        # One more for each slot: who goes on from within a page holds that and the copy for a while.
        self.resize(slots * (self._reach + 1))

    def resize(self, blocks: int) -> None:
        """Have so many blocks from now on, and forget all texts; no row may run."""
        self._leases = [_Lease() for _ in self._leases]
        self._entries = zeros(blocks, *self._shape, dtype=self._dtype)
        self._keys, self._values = self._apart(self._entries)
        self._pool.entries = self._entries.data_ptr()
        self._pages, self._free = PrefixTree(), list(range(blocks))

    @property
    def block_bytes(self) -> int:
        """Memory of one block: keys and values of all layers."""
        return self._entries[0].nbytes

    def address(self) -> int:
        """Where kernels find the `Pool`."""
        return ctypes.addressof(self._pool)

    def set_prefix_caching(self, on: bool) -> None:
        self._shares = on

    def forget(self) -> None:
        """What has been read belongs to other weights: no later text may begin with it."""
        self._pages.forget()
        for lease in self._leases:
            lease.scope = None

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        self.release(slot)
        lease = self._leases[slot] = _Lease(scope if self._shares else None, len(tokens))
        if lease.scope is not None:
            found, lease.part, shared = self._pages.match(lease.scope, tokens[:-1])
            for page in found:
                self._take_over(slot, page)
            if lease.part:
                self._pages.acquire(lease.part)
            lease.length = BLOCK * len(found) + shared
        return lease.length

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        self.reserve(batch, draft.width)
        return lay_out(batch, draft, first, self._entries.device)

    def reserve(self, batch: Batch, guesses: Sequence[int]) -> None:
        """Make room behind the committed text for each row's feed and so many guesses."""
        for row, start, feed, count in zip(batch.seqs, batch.start, batch.feed, guesses, strict=True):
            lease, stop = self._leases[row.slot], start + len(feed) + count
            assert stop <= self._capacity, "slot overflow"
            if lease.row is None and lease.scope is not None:
                self._asked, self._spared = self._asked + lease.asked, self._spared + lease.length
            lease.row = row
            while BLOCK * lease.blocks < stop:
                self._grow(row.slot)

    def commit(self, round: Round) -> None:
        batch = round.batch
        for row, start, feed, path in zip(batch.seqs, batch.start, batch.feed, round.path, strict=True):
            base = start + len(feed)
            self._leases[row.slot].length = base + len(path)
            if path != tuple(range(len(path))):
                self._compact(row.slot, base, path)
            self._publish(row.slot, base)  # of what was kept the row's text does not say yet what it is

    def release(self, slot: int) -> None:
        lease = self._leases[slot]
        if lease.row is not None:
            # Of a run that a stop string cut short the text has less than the cache.
            self._publish(slot, min(lease.length, len(lease.row.token_ids)), ended=True)
        if lease.part:
            self._pages.release(lease.part)
        for page in reversed(lease.pages):
            self._pages.release(page)
        for block in lease.own:
            heappush(self._free, block)
        self._leases[slot] = _Lease()

    def length(self, slot: int) -> int:
        return self._leases[slot].length

    def fits(self, ends: Mapping[int, int]) -> bool:
        missing = sum(max(-(-end // BLOCK) - self._leases[slot].blocks, 0) for slot, end in ends.items())
        return missing <= len(self._free) + self._pages.idle

    def usage(self) -> CacheUsage:
        return CacheUsage(
            token_bytes=self.block_bytes // BLOCK,
            block_tokens=BLOCK,
            blocks=len(self._entries),
            used_blocks=len(self._entries) - len(self._free) - self._pages.idle,
            cached_blocks=self._pages.idle,
            query_tokens=self._asked,
            hit_tokens=self._spared,
            evicted_blocks=self._pages.evicted,
        )

    def bytes(self) -> int:
        return self._entries.nbytes

    def entries(
        self, layer: int, slots: Sequence[int], begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A layer's keys and values [rows, heads, end - begin, dim] of some slots, copied; None until one has any.

        Behind what a slot holds stands anything that is a number.
        """
        if not any(self._leases[slot].blocks for slot in slots):
            return None
        first, last = begin // BLOCK, -(-end // BLOCK)
        blocks = torch.zeros(len(slots), last - first, dtype=torch.int64)
        for b, slot in enumerate(slots):
            held = self._table[slot * self._reach + first : slot * self._reach + min(last, self._leases[slot].blocks)]
            blocks[b, : len(held)] = torch.tensor(held, dtype=torch.int64)
        keys, values = self._apart(self._entries[blocks, layer])
        keys = keys.permute(0, 2, 1, 3, 5, 4, 6)  # [rows, heads, blocks, groups, lanes, words, each]
        values = values.permute(0, 2, 1, 3, 5, 4)  # [rows, heads, blocks, words, each, dim]
        size, cut = (len(slots), keys.shape[1], -1, self._shape[-1]), slice(begin - first * BLOCK, end - first * BLOCK)
        return keys.reshape(size)[:, :, cut], values.reshape(size)[:, :, cut]

    def _apart(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [..., heads, groups, words, lanes, each] and values [..., heads, words, dim, each] of blocks.

        Of keys a word holds `each` dimensions of one entry, sixteen entries side by side; of values a word holds one
        dimension of `each` neighbouring entries. So the kernels multiply them as they lie (native/attention.h).
        """
        each, dim = 4 // self._dtype.itemsize, self._shape[-1]
        keys, values = entries.flatten(-2).unbind(-2)
        groups = (BLOCK // _LANES, dim // each, _LANES, each)
        return keys.view(*keys.shape[:-1], *groups), values.view(*values.shape[:-1], BLOCK // each, dim, each)

    def _publish(self, slot: int, length: int, *, ended: bool = False) -> None:
        """Make pages of the blocks that hold nothing but the first `length` tokens, and at its end of the rest."""
        lease = self._leases[slot]
        if lease.scope is None or lease.row is None or not lease.own:
            return
        for begin in range(BLOCK * len(lease.pages), length if ended else length - BLOCK + 1, BLOCK):
            tokens = tuple(lease.row.token_ids[begin : min(begin + BLOCK, length)])
            block = lease.own.pop(0)
            page = self._pages.insert(lease.scope, lease.pages[-1] if lease.pages else None, tokens, block)
            if page.block != block:
                heappush(self._free, block)
            if len(tokens) == BLOCK:
                self._take_over(slot, page)

    def _take_over(self, slot: int, page: CachedBlock) -> None:
        """Let the slot read a page behind those that it has."""
        lease = self._leases[slot]
        self._table[slot * self._reach + len(lease.pages)] = page.block
        lease.pages.append(page)
        self._pages.acquire(page)

    def _grow(self, slot: int) -> None:
        """One more block, with what the text shares of the page that it goes on from."""
        lease, block = self._leases[slot], self._new_block()
        if lease.part:
            self._entries[block] = self._entries[lease.part.block]  # behind what it shares stands what nobody sees
            self._pages.release(lease.part)
            lease.part = None
        self._table[slot * self._reach + lease.blocks] = block
        lease.own.append(block)

    def _new_block(self) -> int:
        # The lowest first: the machine gives memory for what has been used and no more.
        if self._free:
            return heappop(self._free)
        if not self._pages.idle:
            raise CacheFull(f"all {len(self._entries)} blocks of {BLOCK} tokens are in use")
        return self._pages.evict()

    def _compact(self, slot: int, base: int, path: Sequence[int]) -> None:
        """Close the gaps that rejected branches leave."""
        row = slot * self._reach

        def places(entries: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            blocks = [self._table[row + entry // BLOCK] for entry in entries]
            return torch.tensor(blocks), torch.tensor([entry % BLOCK for entry in entries])

        block, at = places([base + node for node in path])
        to_block, to = places(range(base, base + len(path)))
        keys, values, each = self._keys, self._values, self._keys.shape[-1]
        keys[to_block, :, :, to // _LANES, :, to % _LANES] = keys[block, :, :, at // _LANES, :, at % _LANES]
        values[to_block, :, :, to // each, :, to % each] = values[block, :, :, at // each, :, at % each]


_LANES = 16  # entries whose keys lie side by side
