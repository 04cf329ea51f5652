"""Divide memory among the KV caches of the target and its drafts."""

from collections.abc import Sequence

import torch

from outrider.core.cache import Cache, CacheConfig, CacheUsage
from outrider.errors import OutriderError
from outrider.models.cache.memory import free_bytes
from outrider.runtime.machine import free_memory

_CACHE_SHARE = 0.8  # share of the free memory for KV caches


def share_out(caches: Sequence[Cache], context: int, caching: CacheConfig, device: torch.device | None = None) -> None:
    """Divide memory among the cache of the target, which is the first, and the caches of its drafts.

    All caches in blocks get the same number of blocks. Without `caching.gigabytes`, it is enough
    for a full context in each slot, but takes at most `_CACHE_SHARE` of the free memory.

    Raises:
        OutriderError: the size of the target's cache cannot be set, or the memory is too small for one sequence.
    """
    for cache in caches:
        cache.set_prefix_caching(caching.share)
    gigabytes = caching.gigabytes
    uses = [(cache, use) for cache in caches if (use := cache.usage()).block_tokens]
    has_target = bool(uses) and uses[0][0] is caches[0]
    if gigabytes is not None and not has_target:
        raise OutriderError(
            "cache_gb can be set for kernels native and triton; here each sequence has memory for"
            " a whole context, so set max_num_seqs and max_model_len"
        )
    if not uses:
        return
    blocks = max(use.full_blocks for _, use in uses)
    # A draft that reads a window never needs more blocks than all its windows have.
    limits = [use.full_blocks if cache is not caches[0] and use.full_blocks < blocks else None for cache, use in uses]
    free = free_bytes(device) if device and device.type == "cuda" else free_memory()
    if gigabytes is not None:
        blocks = _blocks_within(gigabytes * 1e9, uses, limits)
    elif free is not None:
        blocks = min(blocks, _blocks_within(_CACHE_SHARE * free, uses, limits))
    _check_enough(blocks, context, [use for _, use in uses], can_be_set=has_target)
    for (cache, _), limit in zip(uses, limits, strict=True):
        cache.resize(blocks if limit is None else min(blocks, limit))


def _check_enough(blocks: int, context: int, uses: Sequence[CacheUsage], *, can_be_set: bool) -> None:
    """Check that one sequence with a full context fits into this number of blocks in each cache.

    A draft that reads a window needs memory for the window only. `can_be_set` says whether `cache_gb` applies.
    """
    longest = max(min(context, use.slot_tokens) for use in uses)
    # One more block, because a sequence briefly uses both a partly matching block and its copy.
    needed = 1 + max(-(-longest // use.block_tokens) for use in uses)
    if blocks >= needed:
        return
    block_bytes = sum(use.token_bytes * use.block_tokens for use in uses)
    raise OutriderError(
        f"the KV caches have {blocks * block_bytes / 1e9:.3g} GB, and one sequence of {longest} tokens needs"
        f" {needed * block_bytes / 1e9:.3g} GB ({block_bytes // uses[0].block_tokens} bytes per token);"
        f" {'raise cache_gb, ' if can_be_set else ''}free memory, or lower max_model_len"
    )


def _blocks_within(size: float, uses: Sequence[tuple[Cache, CacheUsage]], limits: Sequence[int | None]) -> int:
    """Return how many blocks each cache can have in `size` bytes, if no cache gets more than its limit."""
    blocks = [(use.token_bytes * use.block_tokens, limit) for (_, use), limit in zip(uses, limits, strict=True)]
    for limit in sorted({limit for _, limit in blocks if limit is not None}):
        count = int(size / sum(block_bytes for block_bytes, _ in blocks))
        if count <= limit:
            return count
        size -= sum(block_bytes * limit for block_bytes, other in blocks if other == limit)
        blocks = [(block_bytes, other) for block_bytes, other in blocks if other != limit]
    return int(size / sum(block_bytes for block_bytes, _ in blocks))
