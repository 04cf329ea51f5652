"""Text as it grows: tokens in, characters out, stop strings found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_PARTIAL = "�"  # what a decoder shows for bytes that are not a whole character yet


class TextStream:
    """Decodes a completion token by token.

    Characters are given out once no later token can change them. A window of recent tokens is decoded at a time,
    since what a token spells depends on its left neighbour in many tokenizers.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._before = 0  # tokens[before:shown] is the left context of the window
        self._shown = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, stoppable: bool = True) -> bool:
        """Add one token; true when a stop string is complete, which then ends `text` just before it."""
        self._tokens.append(token)
        context = self._decode(self._tokens[self._before : self._shown])
        window = self._decode(self._tokens[self._before :])
        if len(window) <= len(context) or window.endswith(_PARTIAL):
            return False
        searched = len(self.text)
        self.text += window[len(context) :]
        self._before, self._shown = self._shown, len(self._tokens)
        return stoppable and self._find_stop(searched)

    def finish(self) -> str:
        """The whole text, with whatever was held back."""
        if not self.stopped:
            context = self._decode(self._tokens[self._before : self._shown])
            searched = len(self.text)
            self.text += self._decode(self._tokens[self._before :])[len(context) :]
            self._before = self._shown = len(self._tokens)
            self._find_stop(searched)
        return self.text

    def safe_length(self) -> int:
        """Characters of `text` that no stop string can still take back."""
        if self.stopped:
            return len(self.text)
        longest = max((len(stop) for stop in self._stop), default=1)
        for held in range(min(longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-held:]) for stop in self._stop):
                return len(self.text) - held
        return len(self.text)

    def _find_stop(self, searched: int) -> bool:
        ends = ((stop, max(0, searched - len(stop) + 1)) for stop in self._stop)  # older ones were too early to stop
        found = [at for stop, start in ends if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped
