"""A text's suffix automaton in native memory, and the trees of guesses that it grows: see suffix.cpp."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from outrider.native.library import Library

Guesses = tuple[list[int], list[int], list[float], list[int], list[int]]  # tokens, parents, chances, kinds, ways


class _Growth(ctypes.Structure):
    """`Growth` of suffix.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("worth", "said", "words", "votes")),
        *((name, ctypes.c_void_p) for name in ("token", "parent", "kind", "ways", "chance")),
        *((name, ctypes.c_int32) for name in ("sayings", "agreed", "budget", "count")),
    )


class SuffixText:
    """What `Automaton` and `grow` do, in one call each."""

    def __init__(self, library: Library) -> None:
        self._code = library.code
        self._text: int = self._code.outrider_text_open()
        self._size = 0
        self._room = 0  # guesses that there is space for
        self._growth = _Growth()

    def __del__(self) -> None:
        self._code.outrider_text_close(self._text)

    def __len__(self) -> int:
        return self._size

    def extend(self, text: Sequence[int]) -> None:
        """The text goes on with these tokens."""
        tokens = array("I", text)
        self._code.outrider_text_extend(self._text, tokens.buffer_info()[0], len(tokens))
        self._size += len(tokens)

    def guess(
        self, said: Sequence[tuple[array[int], Sequence[int]]], agreed: int, worth: array[float], budget: int
    ) -> Guesses:
        """The likeliest guesses, at most `budget`; `said` are tokens and the outputs that say them."""
        growth = self._space(budget)
        growth.worth, growth.agreed, growth.budget, growth.sayings = worth.buffer_info()[0], agreed, budget, len(said)
        if said:
            tokens = array("I", b"".join([way[0] for way in said]))
            words, votes = array("i", [len(way[0]) for way in said]), array("i", [len(way[1]) for way in said])
            growth.said, growth.words, growth.votes = (each.buffer_info()[0] for each in (tokens, words, votes))
        self._code.outrider_text_grow(self._text, ctypes.byref(growth))
        count = growth.count
        token, parent, kind, ways = (numbers[:count] for numbers in self._numbers)
        return token, parent, self._chances[:count], kind, ways

    def bytes(self) -> int:
        """Memory, in bytes."""
        return int(self._code.outrider_text_bytes(self._text))

    def _space(self, budget: int) -> _Growth:
        if budget > self._room:
            self._room = budget
            self._numbers = [(ctypes.c_int32 * budget)() for _ in range(4)]
            self._chances = (ctypes.c_double * budget)()
            growth = self._growth
            growth.token, growth.parent, growth.kind, growth.ways = map(ctypes.addressof, self._numbers)
            growth.chance = ctypes.addressof(self._chances)
        return self._growth
