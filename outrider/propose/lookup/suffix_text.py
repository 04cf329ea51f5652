"""A row's text as its guesses grow from it: in native memory where there is a compiler, and else in Python's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.errors import UnsupportedModel
from outrider.native.library import load_library
from outrider.native.suffix import SuffixText
from outrider.propose.lookup.suffix_automaton import Automaton
from outrider.propose.lookup.suffix_history import Way
from outrider.propose.lookup.suffix_tree import Guessed, grow
from outrider.propose.tree_builder import TreeBuilder


class Text(Protocol):
    """Reads tokens, and guesses how they go on; what it guesses is the same whoever does it."""

    def __len__(self) -> int:
        """Tokens read so far."""

    def extend(self, text: Sequence[int]) -> None:
        """The text goes on with these tokens."""

    def grow(self, said: Sequence[Way], agreed: int, worth: array[float], budget: int) -> Guessed:
        """See `grow` of `suffix_tree`."""

    def bytes(self) -> int:
        """Memory, in bytes."""


class PlainText(Automaton):
    """In Python."""

    def grow(self, said: Sequence[Way], agreed: int, worth: array[float], budget: int) -> Guessed:
        return grow(self, said, agreed, worth, budget)


class NativeText(SuffixText):
    """In one call of the kernels."""

    def grow(self, said: Sequence[Way], agreed: int, worth: array[float], budget: int) -> Guessed:
        tokens, parents, chances, kinds, ways = self.guess(said, agreed, worth, budget)
        return Guessed(TreeBuilder(tokens, parents, chances), kinds, ways, said)


def text_maker(kernels: str) -> Callable[[], Text]:
    """What makes the texts of a house with these kernels."""
    if kernels == "torch":
        return PlainText
    try:
        return partial(NativeText, load_library())
    except UnsupportedModel:
        return PlainText  # no compiler here, and the guesses are the same
