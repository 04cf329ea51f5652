"""A suffix automaton in native memory, and the draft trees that it proposes. See suffix.cpp."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from outrider.models.native.library import Library
from outrider.models.native.structures import CSuffixDraft


class SuffixTree(NamedTuple):
    """A draft tree of N nodes."""

    tokens: list[int]  # [N]
    parents: list[int]  # [N] node index; -1: the root
    path_probs: list[float]  # [N] acceptance probability of the path
    kinds: list[int]  # [N]
    continuations: list[int]  # [N] bit mask of the continuations that contain the path


class SuffixText:
    """The native implementation of `Automaton` and `grow` of `outrider.drafting.propose.lookup`."""

    def __init__(self, library: Library) -> None:
        self._code = library.code
        self._automaton: int = self._code.outrider_suffix_open()
        self._size = 0
        self._capacity = 0  # draft tokens that the buffers have space for
        self._draft = CSuffixDraft()

    def __del__(self) -> None:
        self._code.outrider_suffix_close(self._automaton)

    def __len__(self) -> int:
        return self._size

    def extend(self, text: Sequence[int]) -> None:
        """Append tokens."""
        tokens = array("I", text)
        self._code.outrider_suffix_extend(self._automaton, tokens.buffer_info()[0], len(tokens))
        self._size += len(tokens)

    def draft(
        self,
        continuations: Sequence[tuple[array[int], Sequence[int]]],
        matched: int,
        calibration: array[float],
        budget: int,
    ) -> SuffixTree:
        """Return the tree of the likeliest draft tokens.

        Args:
            continuations: tokens, and the finished outputs that continued with them.
            matched: tokens that these outputs have in common with the end of the sequence.
            calibration: acceptance probability of a token divided by its share, by kind.
            budget: maximum number of draft tokens.
        """
        self._reserve(budget)
        draft = self._draft
        draft.calibration = calibration.buffer_info()[0]
        draft.matched_outputs = matched
        draft.budget = budget
        draft.num_continuations = len(continuations)
        if continuations:
            tokens = array("I", b"".join([tokens for tokens, _ in continuations]))
            lengths = array("i", [len(tokens) for tokens, _ in continuations])
            counts = array("i", [len(outputs) for _, outputs in continuations])
            draft.continuation = tokens.buffer_info()[0]
            draft.lengths = lengths.buffer_info()[0]
            draft.outputs = counts.buffer_info()[0]
        self._code.outrider_suffix_draft(self._automaton, ctypes.byref(draft))
        size = draft.count
        return SuffixTree(
            tokens=self._tokens[:size],
            parents=self._parents[:size],
            path_probs=self._probs[:size],
            kinds=self._kinds[:size],
            continuations=self._masks[:size],
        )

    def bytes(self) -> int:
        """Return the memory of the automaton in bytes."""
        return int(self._code.outrider_suffix_bytes(self._automaton))

    def _reserve(self, budget: int) -> None:
        """Grow the output buffers to `budget` draft tokens."""
        if budget <= self._capacity:
            return
        self._capacity = budget
        int_buffer = ctypes.c_int32 * budget
        self._tokens = int_buffer()
        self._parents = int_buffer()
        self._kinds = int_buffer()
        self._masks = int_buffer()
        self._probs = (ctypes.c_double * budget)()
        draft = self._draft
        draft.token = ctypes.addressof(self._tokens)
        draft.parent = ctypes.addressof(self._parents)
        draft.kind = ctypes.addressof(self._kinds)
        draft.continuations = ctypes.addressof(self._masks)
        draft.prob = ctypes.addressof(self._probs)
