"""Another model's cache, for a draft that is the first layers of that model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.cache.base import Cache, CacheUsage, Layout
from outrider.core.types import Batch, Draft, Round


class SharedCache:
    """Reads the owner's committed text, and stages behind it.

    Of committed text the two have the same keys and values, so there is nothing to catch up on and nothing to keep.
    What the borrower stages lies behind the committed text, where the owner's own pass writes anew whatever it reads:
    so the owner must run its pass after the borrower has guessed, and commits for both.
    """

    def __init__(self, owner: Cache) -> None:
        self._owner = owner

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        return self._owner.length(slot)

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        return self._owner.stage(batch, draft, first)

    def commit(self, round: Round) -> None:
        pass

    def release(self, slot: int) -> None:
        pass

    def length(self, slot: int) -> int:
        return self._owner.length(slot)

    def set_prefix_caching(self, on: bool) -> None:
        pass

    def resize(self, blocks: int) -> None:
        raise NotImplementedError("the owner has the blocks")

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._owner.fits(ends)

    def usage(self) -> CacheUsage:
        return CacheUsage()

    def bytes(self) -> int:
        return 0
