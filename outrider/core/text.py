"""Incremental detokenization with stop strings."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from outrider.errors import OutriderError

_REPLACEMENT = "�"  # what a tokenizer decodes an incomplete character to
_MAX_CHAR_TOKENS = 4  # a UTF-8 character has at most 4 bytes
_SURROGATE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair
_MAX_PENDING = 2 * _MAX_CHAR_TOKENS  # more pending tokens than this include invalid bytes or tokens without text
_MAX_PROMPT_TOKENS = 8  # of the prompt that are decoded before the completion


class TextStream:
    """Decodes a completion token by token.

    `text` has the characters that no later token can change. In many tokenizers the text of a token depends on the
    token before it. So a window of recent tokens is decoded each time. It begins within the prompt: SentencePiece
    removes a space from the front of decoded text, and the space before the first word of a completion must stay.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = (), *, prompt: Sequence[int] = ()
    ) -> None:
        """Start with an empty text.

        Args:
            decode: returns the text of tokens, without special tokens.
            stop: stop strings.
            prompt: the tokens before the completion. Their text is not returned.
        """
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens = _left_context(prompt, decode)
        self._context = 0  # tokens[context:decoded] are the left context of the window
        self._decoded = len(self._tokens)  # number of tokens whose text is in `_text`, or before it
        self._text = ""
        self.stop_string = ""  # the stop string before which the text ends

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return bool(self.stop_string)

    @property
    def text(self) -> str:
        """The text so far, without characters that a later token may change."""
        if not self.stopped and self._decoded < len(self._tokens):
            self._extend(self._decoded + 1)
        return self._text

    def add_token(self, token: int, *, stoppable: bool = True) -> bool:
        """Add a token. Returns True if it completes a stop string; `text` then ends before the stop string."""
        self._tokens.append(token)
        if not self._stop:
            return False  # `text` decodes several tokens at once when it is read
        searched = len(self._text)
        self._extend(len(self._tokens))
        return len(self._text) > searched and stoppable and self._find_stop(searched)

    def finish(self) -> str:
        """Return the whole text, including incomplete characters."""
        if not self.stopped:
            searched = len(self._text)
            if self._decoded < len(self._tokens):
                self._extend(self._decoded + 1)
            self._text += self._window(len(self._tokens))
            self._context = self._decoded = len(self._tokens)
            self._find_stop(searched)
        return self._text

    def safe_length(self) -> int:
        """Return the number of characters of `text` that no stop string can remove."""
        text = self.text
        longest = 0 if self.stopped else max(map(len, self._stop), default=1)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return len(text) - length
        return len(text)

    def _extend(self, first: int) -> None:
        """Append complete characters to the text. Earlier calls have tried prefixes shorter than `first` tokens."""
        window = self._window(len(self._tokens))
        if window and _REPLACEMENT not in window:
            self._append(window, len(self._tokens))
            return
        # Token by token: with byte fallback, one invalid byte makes all bytes beside it invalid, as
        # far as they are decoded together.
        if len(self._tokens) - self._decoded > _MAX_PENDING:  # drop special tokens, which have no text
            pending = self._tokens[self._decoded :]
            self._tokens[self._decoded :] = [token for token in pending if self._decode((token, token))]
        for count in range(min(first, len(self._tokens)), len(self._tokens) + 1):
            if not self._append_complete(count):
                self._append_invalid(count)

    def _append_complete(self, count: int) -> bool:
        """Append the text of the first `count` tokens if it ends with a complete character."""
        window = self._window(count)
        if not window or window.endswith(_REPLACEMENT):
            return False
        self._append(window, count)
        return True

    def _append_invalid(self, count: int) -> None:
        """Append invalid bytes once more than `_MAX_PENDING` tokens are pending, to bound the decoded window."""
        if count - self._decoded <= _MAX_PENDING:
            return
        window = self._window(count - _MAX_CHAR_TOKENS)
        whole = self._window(count)
        if window and whole.startswith(window) and whole != window:  # otherwise `window` ends within a character
            self._append(window, count - _MAX_CHAR_TOKENS)

    def _append(self, window: str, count: int) -> None:
        self._text += window
        self._context = self._decoded
        self._decoded = count

    def _window(self, count: int) -> str:
        """Return the text of tokens[decoded:count] after their left context."""
        context = self._decode(self._tokens[self._context : self._decoded])
        whole = self._decode(self._tokens[self._context : count])
        if not whole.startswith(context):  # with byte fallback, new bytes that are incomplete make the context invalid
            return self._decode(self._tokens[self._decoded : count])
        return whole[len(context) :]

    def _find_stop(self, searched: int) -> bool:
        """Cut the text at its first stop string, if any. The first `searched` characters contain none."""
        positions = ((self._text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stop)
        found = min((each for each in positions if each[0] >= 0), default=None)
        if found:
            first, self.stop_string = found
            self._text = self._text[:first]
        return self.stopped


def _left_context(prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Return the last tokens of a prompt, after its last special token, because a new text begins there.

    They have whole characters. With byte fallback, a part of a character would make all bytes after it invalid.
    """
    tail = list(prompt[-_MAX_PROMPT_TOKENS:])
    for i in range(len(tail), 0, -1):
        if not decode((tail[i - 1], tail[i - 1])):  # twice, as a space alone may have no text
            tail = tail[i:]
            break
    suffixes = (tail[i:] for i in range(len(tail)))
    return next((suffix for suffix in suffixes if _REPLACEMENT not in decode(suffix)), [])


def is_utf8(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8. Lone surrogates from JSON or invalid bytes cannot."""
    return text.isascii() or not _SURROGATE.search(text)


def read_text(file: str | Path, what: str, *, fix: str) -> str:
    """Return the text of a UTF-8 file, without a byte order mark.

    Args:
        file: the path.
        what: the name of the file in an error message.
        fix: the end of an error message: what to give in place of the file.

    Raises:
        OutriderError: the file cannot be read.
    """
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OutriderError(f"{what} cannot be read ({reason}); {fix}") from error
