"""A completion's text as its reader sees it grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.text import TextStream
from outrider.types import Completion


class Wording:
    """Spells out what the engine's thread has only counted: it has better things to do."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        """Decode with a tokenizer that no other thread uses."""
        self._stream = TextStream(decode, stop)
        self._single = TextStream(decode)
        self._shown = 0  # characters

    def grow(self, tokens: Sequence[int], completion: Completion | None) -> str:
        """The characters that these tokens add and no later one can change; all that is left with the completion."""
        for token in tokens:
            self._stream.push(token, stoppable=False)  # the engine knows where it stops
        text = completion.text if completion else self._stream.text[: self._stream.safe_length()]
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def words(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """What each of the next tokens adds to the text; a character of several tokens comes with the last of them."""
        words = []
        for token in tokens:
            before = len(self._single.text)
            self._single.push(token)
            words.append(self._single.text[before:])
        return tuple(words)
