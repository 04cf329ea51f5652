"""Store finished outputs in counted suffix trees of bounded size, one for each scope (Oliaro et al. 2024).

A tree is stored as its sorted leaves (Manber and Myers 1990). A leaf is a position in an output.
Leaves are sorted by the tokens before the position, nearest first. So positions with equal
preceding tokens are adjacent. Together they are a node of the tree, and their number is its count.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from struct import Struct
from typing import NamedTuple

from outrider.errors import OutriderError

CONTEXT = 16  # tokens before a position that a leaf is sorted by
_MAX_MATCHES = 8  # positions that a lookup considers
_TOKEN_BYTES = 4
_MAX_BLOCK = 512  # most leaves of a block, all of which an insertion may move
_KEY_BYTES = CONTEXT * _TOKEN_BYTES
_KEY = Struct(f">{CONTEXT}I")  # a leaf begins with its key: big-endian tokens, which compare as bytes
# A leaf ends with the id of its output, and the bytes of the text from the position on. So early positions sort last.
_POSITION = Struct(">II")
_AFTER_ALL_POSITIONS = b"\xff" * _POSITION.size
# Paddings of keys at the beginning of an output and of a lookup. They differ, so that they never match.
_OUTPUT_PADDING = b"\xff" * _TOKEN_BYTES
_LOOKUP_PADDING = b"\xfe"


class Continuation(NamedTuple):
    """The tokens that followed at one or more matching positions."""

    tokens: array[int]
    outputs: list[int]  # the output of each position


class History:
    """Keeps the most recently useful outputs, up to a number of tokens over all scopes."""

    def __init__(self, tokens: int) -> None:
        """Keep at most `tokens` tokens, with the tokens before the outputs.

        Raises:
            OutriderError: `tokens` is below 1.
        """
        if tokens < 1:
            raise OutriderError(f"a history of {tokens} tokens can store no output; use a number above 0")
        self._max_tokens = tokens
        self._num_tokens = 0
        self._outputs: OrderedDict[int, _Output] = OrderedDict()  # by id, the least recently useful one first
        self._trees: dict[str, _SortedLeaves] = {}  # by scope
        self._next_id = 0

    def learn(self, scope: str, before: Sequence[int], output: Sequence[int], *, version: int = 0) -> int | None:
        """Store an output and the tokens before it. Evict other outputs if there is no room.

        `version` is that of the weights that sampled it. Returns the id of the output; None if it is empty.
        """
        if not output:
            return None
        tokens = [*before[-CONTEXT:], *output][-self._max_tokens :]
        num_tokens = min(len(output), self._max_tokens)
        stored = _Output(scope, array("I", tokens).tobytes(), num_tokens=num_tokens, version=version)
        while self._num_tokens + len(tokens) > self._max_tokens:
            self._evict()
        tree = self._trees.setdefault(scope, _SortedLeaves())
        for leaf in stored.leaves(self._next_id):
            tree.add(leaf)
        self._outputs[self._next_id] = stored
        self._num_tokens += len(tokens)
        self._next_id += 1
        return self._next_id - 1

    def remove(self, outputs: Iterable[int]) -> None:
        """Remove outputs, as far as they are still stored."""
        for output in outputs:
            if output in self._outputs:
                self._outputs.move_to_end(output, last=False)
                self._evict()

    def remove_before(self, version: int) -> None:
        """Remove all outputs of older versions of the weights."""
        self.remove([id for id, output in self._outputs.items() if output.version < version])

    def mark_useful(self, outputs: Iterable[int]) -> None:
        """Note that draft tokens from these outputs were accepted."""
        for output in outputs:
            if output in self._outputs:
                self._outputs.move_to_end(output)

    def continuations(self, scope: str, tokens: Sequence[int], most: int) -> tuple[list[Continuation], int]:
        """Find the positions with the longest match of the last tokens of a sequence.

        Args:
            scope: only outputs of this scope are searched.
            most: tokens of each continuation.

        Returns:
            The distinct continuations, from at most _MAX_MATCHES positions, and the number of matching tokens.
        """
        tree = self._trees.get(scope)
        if tree is None:
            return [], 0
        key = _key(tokens)
        before, after = tree.around(key + _AFTER_ALL_POSITIONS, _MAX_MATCHES)
        matched = max([_common_tokens(key, leaf) for leaf in (*before[:1], *after[:1])], default=0)
        if not matched:
            return [], 0
        prefix = key[: matched * _TOKEN_BYTES]
        size = most * _TOKEN_BYTES
        leaves = [leaf for leaf in (*before, *after) if leaf.startswith(prefix)][:_MAX_MATCHES]
        outputs_by_tokens: dict[bytes, list[int]] = {}
        for leaf in leaves:
            output, bytes_left = _POSITION.unpack_from(leaf, _KEY_BYTES)
            text = self._outputs[output].text
            position = len(text) - bytes_left
            outputs_by_tokens.setdefault(text[position : position + size], []).append(output)
        return [Continuation(array("I", text), outputs) for text, outputs in outputs_by_tokens.items()], matched

    def tokens(self) -> int:
        """Return the number of stored tokens."""
        return self._num_tokens

    def bytes(self) -> int:
        texts = sum(output.text.__sizeof__() for output in self._outputs.values())
        return texts + sum(tree.bytes() for tree in self._trees.values())

    def _evict(self) -> None:
        """Remove the least recently useful output."""
        id, output = self._outputs.popitem(last=False)
        tree = self._trees[output.scope]
        for leaf in output.leaves(id):
            tree.remove(leaf)
        if tree.is_empty():
            del self._trees[output.scope]
        self._num_tokens -= len(output.text) // _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class _Output:
    """A stored output."""

    scope: str
    text: bytes  # a few tokens before the output, then its own
    num_tokens: int  # its own tokens
    version: int  # of the weights that sampled it

    def leaves(self, id: int) -> list[bytes]:
        """Return a leaf for each of the output's own tokens."""
        units = array("I", self.text)
        units.reverse()
        units.byteswap()
        reversed_text = units.tobytes() + _OUTPUT_PADDING * CONTEXT
        ends = range(_TOKEN_BYTES, self.num_tokens * _TOKEN_BYTES + 1, _TOKEN_BYTES)
        return [reversed_text[end : end + _KEY_BYTES] + _POSITION.pack(id, end) for end in ends]


class _SortedLeaves:
    """A sorted list in blocks."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]  # only the first one may be empty
        self._bounds = [b""]  # lower bound of the leaves of each block

    def add(self, leaf: bytes) -> None:
        index = bisect_right(self._bounds, leaf) - 1
        block = self._blocks[index]
        insort(block, leaf)
        if len(block) > _MAX_BLOCK:
            half = len(block) // 2
            self._blocks.insert(index + 1, block[half:])
            self._bounds.insert(index + 1, block[half])
            del block[half:]

    def remove(self, leaf: bytes) -> None:
        index = bisect_right(self._bounds, leaf) - 1
        block = self._blocks[index]
        position = bisect_left(block, leaf)
        assert block[position] == leaf
        del block[position]
        if not block and index:
            del self._blocks[index]
            del self._bounds[index]

    def around(self, key: bytes, most: int) -> tuple[list[bytes], list[bytes]]:
        """Return up to `most` leaves below a key and as many from it on, nearest first."""
        index = bisect_right(self._bounds, key) - 1
        position = bisect_left(self._blocks[index], key)
        before = self._blocks[index][max(position - most, 0) : position]
        after = self._blocks[index][position : position + most]
        low = index
        high = index + 1
        while len(before) < most and low:
            low -= 1
            before = self._blocks[low][len(before) - most :] + before
        while len(after) < most and high < len(self._blocks):
            after += self._blocks[high][: most - len(after)]
            high += 1
        return before[::-1], after

    def is_empty(self) -> bool:
        return not any(self._blocks)

    def bytes(self) -> int:
        return sum(each.__sizeof__() for each in chain(self._blocks, *self._blocks))


def _key(tokens: Sequence[int]) -> bytes:
    """Return the last tokens of a sequence in the format of a leaf's key."""
    last = tokens[: -CONTEXT - 1 : -1]
    if len(last) == CONTEXT:
        return _KEY.pack(*last)
    return Struct(f">{len(last)}I").pack(*last).ljust(_KEY_BYTES, _LOOKUP_PADDING)


def _common_tokens(key: bytes, leaf: bytes) -> int:
    """Return the number of tokens at the beginning that a key and a leaf have in common."""
    difference = int.from_bytes(key, "big") ^ int.from_bytes(leaf[:_KEY_BYTES], "big")
    return CONTEXT - -(-difference.bit_length() // (8 * _TOKEN_BYTES))
