"""What followed in finished outputs: counted suffix trees of bounded size, one a scope (Oliaro et al. 2024).

A tree is kept as its sorted leaves (Manber and Myers 1990). A leaf is a place in an output, sorted by the tokens before
it, the nearest first; so places whose last tokens agree stand side by side, and they are a node and its count.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from outrider.errors import OutriderError

DEEP = 16  # tokens before a place that tell it from others
_NEAR = 8  # places looked at
_UNIT = 4  # bytes of a token
_BLOCK = 512  # leaves that an insertion may move
_WIDTH = DEEP * _UNIT
_ENDING = Struct(f">{DEEP}I")  # what a leaf begins with: tokens, such that bytes compare as they do
_NAME = Struct(">II")  # what it ends with: the output, and its bytes from the place on; so early places come last
_LAST = b"\xff" * _NAME.size  # behind any name
_NOBODY, _NOBODY_EITHER = b"\xff" * _UNIT, b"\xfe"  # before the first token of an output, and of a text


class Way(NamedTuple):
    """How some places went on that look like a text's end."""

    tokens: array[int]
    outputs: list[int]  # where they are, one for each


class History:
    """Keeps the outputs that were useful last, up to a number of tokens over all scopes."""

    def __init__(self, tokens: int) -> None:
        """Hold at most `tokens` tokens, those included that stood before the outputs."""
        if tokens < 1:
            raise OutriderError(f"a history of {tokens} tokens holds nothing; use a number above 0")
        self._most = tokens
        self._held = 0
        self._outputs: OrderedDict[int, _Output] = OrderedDict()  # the least recently useful one first
        self._trees: dict[str, _Leaves] = {}
        self._made = 0

    def learn(self, scope: str, before: Sequence[int], output: Sequence[int]) -> None:
        """Remember an output and the tokens that stood before it; forget others for it."""
        if not output:
            return
        text = [*before[-DEEP:], *output][-self._most :]
        new = _Output(scope, array("I", text).tobytes(), own=min(len(output), self._most))
        while self._held + len(text) > self._most:
            self._forget()
        tree = self._trees.setdefault(scope, _Leaves())
        for leaf in new.leaves(self._made):
            tree.add(leaf)
        self._outputs[self._made] = new
        self._held += len(text)
        self._made += 1

    def used(self, outputs: Iterable[int]) -> None:
        """Guesses from these outputs were kept."""
        for output in outputs:
            if output in self._outputs:
                self._outputs.move_to_end(output)

    def ways(self, scope: str, ending: Sequence[int], most: int) -> tuple[list[Way], int]:
        """How outputs went on for `most` tokens, where they agree longest with the end of a text; and how long.

        Alike ones are one way, and of many places the nearest ones are taken.
        """
        tree = self._trees.get(scope)
        if tree is None:
            return [], 0
        key = _key(ending)
        before, after = tree.around(key + _LAST, _NEAR)
        matched = max([_shared(key, leaf) for leaf in (*before[:1], *after[:1])], default=0)
        if not matched:
            return [], 0
        same, size = key[: matched * _UNIT], most * _UNIT
        found: dict[bytes, list[int]] = {}
        for leaf in [leaf for leaf in (*before, *after) if leaf.startswith(same)][:_NEAR]:
            name, left = _NAME.unpack_from(leaf, _WIDTH)
            text = self._outputs[name].text
            at = len(text) - left
            found.setdefault(text[at : at + size], []).append(name)
        return [Way(array("I", tokens), names) for tokens, names in found.items()], matched

    def tokens(self) -> int:
        """How many it holds."""
        return self._held

    def bytes(self) -> int:
        """Memory, in bytes."""
        texts = sum(output.text.__sizeof__() for output in self._outputs.values())
        return texts + sum(tree.bytes() for tree in self._trees.values())

    def _forget(self) -> None:
        name, output = self._outputs.popitem(last=False)
        tree = self._trees[output.scope]
        for leaf in output.leaves(name):
            tree.remove(leaf)
        if tree.empty():
            del self._trees[output.scope]
        self._held -= len(output.text) // _UNIT


@dataclass(frozen=True, slots=True)
class _Output:
    scope: str
    text: bytes  # a few tokens that stood before it, and its own
    own: int  # how many are its own

    def leaves(self, name: int) -> list[bytes]:
        units = array("I", self.text)
        units.reverse()
        units.byteswap()
        backwards = units.tobytes() + _NOBODY * DEEP
        ends = range(_UNIT, self.own * _UNIT + 1, _UNIT)
        return [backwards[left : left + _WIDTH] + _NAME.pack(name, left) for left in ends]


class _Leaves:
    """A sorted list, in blocks."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = [[]]  # none is empty but the first
        self._heads = [b""]  # leaves from here on are in the block

    def add(self, leaf: bytes) -> None:
        at = bisect_right(self._heads, leaf) - 1
        block = self._blocks[at]
        insort(block, leaf)
        if len(block) > _BLOCK:
            half = len(block) // 2
            self._blocks.insert(at + 1, block[half:])
            self._heads.insert(at + 1, block[half])
            del block[half:]

    def remove(self, leaf: bytes) -> None:
        at = bisect_right(self._heads, leaf) - 1
        block = self._blocks[at]
        place = bisect_left(block, leaf)
        assert block[place] == leaf
        del block[place]
        if not block and at:
            del self._blocks[at], self._heads[at]

    def around(self, key: bytes, most: int) -> tuple[list[bytes], list[bytes]]:
        """Up to `most` leaves below a key and up to `most` from it on, the nearest ones first."""
        at = bisect_right(self._heads, key) - 1
        place = bisect_left(self._blocks[at], key)
        before, after = self._blocks[at][max(place - most, 0) : place], self._blocks[at][place : place + most]
        low, high = at, at + 1
        while len(before) < most and low:
            low -= 1
            before = self._blocks[low][len(before) - most :] + before
        while len(after) < most and high < len(self._blocks):
            after += self._blocks[high][: most - len(after)]
            high += 1
        return before[::-1], after

    def empty(self) -> bool:
        return not any(self._blocks)

    def bytes(self) -> int:
        return sum(block.__sizeof__() + sum(leaf.__sizeof__() for leaf in block) for block in self._blocks)


def _key(text: Sequence[int]) -> bytes:
    """The end of a text as leaves begin."""
    end = text[: -DEEP - 1 : -1]
    return _ENDING.pack(*end) if len(end) == DEEP else Struct(f">{len(end)}I").pack(*end).ljust(_WIDTH, _NOBODY_EITHER)


def _shared(key: bytes, leaf: bytes) -> int:
    """Tokens with which both begin."""
    differ = int.from_bytes(key, "big") ^ int.from_bytes(leaf[:_WIDTH], "big")
    return DEEP - -(-differ.bit_length() // (8 * _UNIT))
