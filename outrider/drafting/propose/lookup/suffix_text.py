"""Choose the implementation of the suffix index: native code if there is a C++ compiler, and else Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.drafting.propose.lookup.suffix_automaton import Automaton
from outrider.drafting.propose.lookup.suffix_history import Continuation
from outrider.drafting.propose.lookup.suffix_tree import SuffixDraft, grow
from outrider.drafting.propose.tree_builder import TreeBuilder
from outrider.errors import UnsupportedModel
from outrider.models.native.library import load_library
from outrider.models.native.suffix import SuffixText


class SuffixIndex(Protocol):
    """Indexes the tokens of a sequence, and drafts what follows them. All implementations draft the same tokens."""

    def __len__(self) -> int:
        """Return the number of indexed tokens."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""

    def grow(
        self, continuations: Sequence[Continuation], matched: int, calibration: array[float], budget: int
    ) -> SuffixDraft:
        """Return the likeliest draft tokens. See `suffix_tree.grow`."""

    def bytes(self) -> int:
        """Return the memory in bytes."""


class PythonSuffixIndex(Automaton):
    """A suffix index in Python."""

    def grow(
        self, continuations: Sequence[Continuation], matched: int, calibration: array[float], budget: int
    ) -> SuffixDraft:
        return grow(self, continuations, matched, calibration, budget)


class NativeSuffixIndex(SuffixText):
    """A suffix index in C++."""

    def grow(
        self, continuations: Sequence[Continuation], matched: int, calibration: array[float], budget: int
    ) -> SuffixDraft:
        tokens, parents, accept_probs, kinds, masks = self.draft(continuations, matched, calibration, budget)
        return SuffixDraft(TreeBuilder(tokens, parents, accept_probs), kinds, masks, continuations)


def suffix_index_factory(kernels: str) -> Callable[[], SuffixIndex]:
    """Return a function that makes suffix indexes. `kernels` is "torch" for the one in Python (see `make_target`)."""
    if kernels == "torch":
        return PythonSuffixIndex
    try:
        return partial(NativeSuffixIndex, load_library())
    except UnsupportedModel:
        return PythonSuffixIndex  # there is no compiler
