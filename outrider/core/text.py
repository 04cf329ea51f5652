"""Text as it grows: tokens in, characters out, stop strings found."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_PARTIAL = "�"  # what a decoder shows for bytes that are not a whole character yet
_TAIL = 4  # tokens that may still become one: a character has at most as many bytes
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
_HELD = 2 * _TAIL  # tokens held back, beyond which some are broken for good, or spell nothing


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
        self._text = ""
        self.stopped = False

    @property
    def text(self) -> str:
        """What has been given out so far."""
        if not self.stopped and self._shown < len(self._tokens):
            self._grow(self._shown + 1)
        return self._text

    def push(self, token: int, *, stoppable: bool = True) -> bool:
        """Add one token; true when a stop string is complete, which then ends `text` just before it."""
        self._tokens.append(token)
        if not self._stop:
            return False  # decoded when somebody asks for it, several tokens at once
        searched = len(self._text)
        self._grow(len(self._tokens))
        return len(self._text) > searched and stoppable and self._find_stop(searched)

    def finish(self) -> str:
        """The whole text, with whatever was held back."""
        if not self.stopped:
            searched = len(self._text)
            self._text += self._window(len(self._tokens))
            self._before = self._shown = len(self._tokens)
            self._find_stop(searched)
        return self._text

    def safe_length(self) -> int:
        """Characters of `text` that no stop string can still take back."""
        text = self.text
        longest = 0 if self.stopped else max((len(stop) for stop in self._stop), default=1)
        for held in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-held:]) for stop in self._stop):
                return len(text) - held
        return len(text)

    def _grow(self, first: int) -> None:
        """Give out what is whole; fewer than the `first` tokens have been tried before."""
        if self._show(len(self._tokens)):
            return
        if len(self._tokens) - self._shown > _HELD:  # special tokens spell nothing, however often they come
            held = self._tokens[self._shown :]
            self._tokens[self._shown :] = [token for token in held if self._decode((token, token))]
        for count in range(first, len(self._tokens)):
            if not self._show(count):
                self._cut(count)
        self._cut(len(self._tokens))

    def _show(self, count: int) -> bool:
        """Give out the characters of the first `count` tokens, if they are whole."""
        window = self._window(count)
        if not window or window.endswith(_PARTIAL):
            return False
        self._give(window, count)
        return True

    def _cut(self, count: int) -> None:
        """Give out what is broken for good, of more than `_HELD` tokens: else each decodes all before it again."""
        if count - self._shown <= _HELD:
            return
        window, whole = self._window(count - _TAIL), self._window(count)
        if window and whole.startswith(window) and whole != window:  # else it ends amid a character
            self._give(window, count - _TAIL)

    def _give(self, window: str, count: int) -> None:
        self._text += window
        self._before, self._shown = self._shown, count

    def _window(self, count: int) -> str:
        """What tokens[shown:count] spell behind their left neighbours."""
        context = self._decode(self._tokens[self._before : self._shown])
        return self._decode(self._tokens[self._before : count])[len(context) :]

    def _find_stop(self, searched: int) -> bool:
        ends = ((stop, max(0, searched - len(stop) + 1)) for stop in self._stop)  # older ones were too early to stop
        found = [at for stop, start in ends if (at := self._text.find(stop, start)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True
        return self.stopped


def is_utf8(text: str) -> bool:
    """Whether all of it is characters: JSON can spell halves of them, and bytes that are not UTF-8 turn into some."""
    return text.isascii() or not _HALF.search(text)
