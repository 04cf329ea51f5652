"""The KV cache of a target, for a draft that is made of the target's own layers."""

from collections.abc import Mapping, Sequence

from outrider.core.cache import Cache, Layout, UnboundedCache
from outrider.core.types import Batch, Draft, Round


class SharedCache(UnboundedCache):
    """Uses the cache of its owner, the target.

    The draft attends to the target's own keys and values of committed tokens, so it needs no
    prefill. Its draft tokens are staged after the committed tokens, and the pass of the owner
    overwrites them. So the pass of the owner must come after the draft, and the owner commits for
    both.
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

    def fits(self, ends: Mapping[int, int]) -> bool:
        return self._owner.fits(ends)

    def bytes(self) -> int:
        return 0
