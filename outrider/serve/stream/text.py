"""The text of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.text import TextStream
from outrider.core.types import Completion


class StreamText:
    """Detokenizes in the event loop, so that the engine thread does not have to."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], spell: Callable[[int], str], stop: Sequence[str]
    ) -> None:
        """Decode with a tokenizer that no other thread uses. `spell` returns the text of a single token."""
        self._spell = spell
        self._stream = TextStream(decode, stop)
        self._shown = 0  # characters
        self._new = ""  # what the last tokens added, held back or not
        self._slow = TextStream(decode)  # the same text, token by token where it must be
        self._behind: list[int] = []  # tokens that it has not seen yet

    def grow(self, tokens: Sequence[int], completion: Completion | None) -> str:
        """The characters that these tokens add and no later one can change; all that is left with the completion."""
        before = len(self._stream.text)
        for token in tokens:
            self._stream.add_token(token, stoppable=False)  # the engine knows where it stops
        whole = self._stream.text
        self._new = whole[before:]
        text = completion.text if completion else whole[: self._stream.safe_length()]
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new

    def words(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """What each of the tokens that were grown last adds to the text; of a character, the last one adds it all."""
        alone = tuple(map(self._spell, tokens))
        if "".join(alone) == self._new:  # as mostly, where tokens are bytes
            self._behind += tokens
            return alone
        for token in self._behind:
            self._slow.add_token(token)
        self._behind.clear()
        words = []
        for token in tokens:
            before = len(self._slow.text)
            self._slow.add_token(token)
            words.append(self._slow.text[before:])
        return tuple(words)
