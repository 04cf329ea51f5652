"""Find the replica that has most of a prompt in its KV cache."""

import json
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b
from typing import Any

_BLOCK_CHARS = 256  # characters of a block of text
_BLOCK_TOKENS = 64  # tokens of a block, for prompts of token ids
_MAX_BLOCKS = 256  # blocks of a prompt that are hashed
_TABLE_SIZE = 1 << 16  # blocks


def prefix_blocks(body: bytes) -> tuple[int, ...]:
    """Return hashes of the leading blocks of the prompt of a request. Each one depends on the blocks before it.

    Only requests of one user share cached prefixes, so the user is part of the hash. A body that is
    no request has no blocks.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(request, dict):
        return ()
    hashed = blake2b(json.dumps(request.get("user")).encode(), digest_size=8)
    blocks = []
    for block in _blocks(request)[:_MAX_BLOCKS]:
        hashed.update(block)
        blocks.append(int.from_bytes(hashed.copy().digest()))
    return tuple(blocks)


def _blocks(request: dict[str, Any]) -> list[bytes]:
    """Return the whole blocks of the prompt."""
    prompt = request.get("messages") or request.get("prompt") or ""
    is_tokens = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if is_tokens:
        starts = range(0, len(prompt) - _BLOCK_TOKENS + 1, _BLOCK_TOKENS)
        return [repr(prompt[start : start + _BLOCK_TOKENS]).encode() for start in starts]
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    starts = range(0, len(text) - _BLOCK_CHARS + 1, _BLOCK_CHARS)
    return [text[start : start + _BLOCK_CHARS].encode(errors="replace") for start in starts]


class PrefixTable:
    """Remembers which replicas have processed which blocks. The blocks that were used least recently are forgotten."""

    def __init__(self, size: int = _TABLE_SIZE) -> None:
        self._size = size
        self._replicas: OrderedDict[int, set[Hashable]] = OrderedDict()

    def matches(self, blocks: Sequence[int]) -> dict[Hashable, int]:
        """Return the number of leading blocks that each replica has processed, for replicas with at least one."""
        counts: dict[Hashable, int] = {}
        for count, block in enumerate(blocks):
            known = self._replicas.get(block)
            current = [replica for replica in known or () if counts.get(replica, 0) == count]
            if not current:
                break
            self._replicas.move_to_end(block)
            counts |= dict.fromkeys(current, count + 1)
        return counts

    def add(self, blocks: Sequence[int], replica: Hashable) -> None:
        """Note that a replica processes these blocks."""
        for block in blocks:
            self._replicas.setdefault(block, set()).add(replica)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._size:
            self._replicas.popitem(last=False)

    def forget(self, replica: Hashable) -> None:
        """Drop a replica that is gone."""
        for block in [block for block, replicas in self._replicas.items() if replica in replicas]:
            self._replicas[block].discard(replica)
            if not self._replicas[block]:
                del self._replicas[block]
