"""Builds the log-probabilities of a response in the formats of OpenAI's API."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.text import TextStream
from outrider.core.token_text import SingleTokens, id_text
from outrider.core.types import TokenLogprobs


class TokenOffsets:
    """Finds where each token of a completion begins in its text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]) -> None:
        """Begin at the first token. `decode` returns the text of tokens; `prompt` comes before the completion."""
        self._stream = TextStream(decode, prompt=prompt)

    def add(self, token: int) -> int:
        """Add a token and return the number of characters before it.

        Parts of one character begin at the same offset. A stop string counts as text, although it
        is not sent.
        """
        offset = len(self._stream.text)
        self._stream.add_token(token)
        return offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt that stands before its completion."""

    text: str
    tokens: tuple[int, ...]
    entries: tuple[TokenLogprobs, ...]  # of each token but the first; (): there are none

    def before(self, entries: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        """Return the entries of prompt and completion. That of the first token has no likeliest tokens."""
        first = TokenLogprobs(token=self.tokens[0], logprob=0.0, sampled_logprob=0.0, top=())
        return [first, *self.entries, *entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsBuilder:
    """Builds the `logprobs` object of a choice."""

    tokens: SingleTokens
    chat: bool  # chats and completions have different formats
    omitted: frozenset[int]  # tokens that have no entry: those that end the text

    def build(self, entries: Sequence[TokenLogprobs], offsets: TokenOffsets) -> dict[str, Any]:
        """Return the object for these tokens, which come after those that `offsets` has seen."""
        if self.chat:
            content = [self._chat_entry(entry) for entry in entries if entry.token not in self.omitted]
            return {"content": content, "refusal": None}
        begins = [offsets.add(entry.token) for entry in entries]
        shown = [pair for pair in zip(entries, begins, strict=True) if pair[0].token not in self.omitted]
        return {
            "tokens": [self.tokens.text(entry.token) for entry, _ in shown],
            "token_logprobs": [entry.logprob for entry, _ in shown],
            "top_logprobs": [self._by_text(_with_own(entry)) for entry, _ in shown],
            "text_offset": [begin for _, begin in shown],
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by text. Of two tokens with the same text, the second has its id as key."""
        by_text: dict[str, float] = {}
        for token, logprob in top:
            text = self.tokens.text(token)
            by_text[id_text(token) if text in by_text else text] = logprob
        return by_text

    def _chat_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """Return the log-probabilities at one token of a chat."""
        top = [self._chat_token(token, logprob) for token, logprob in entry.top]
        return self._chat_token(entry.token, entry.logprob) | {"top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.tokens.piece(token)
        return {"token": self.tokens.text(token), "logprob": logprob, "bytes": list(piece) if piece else None}


def _with_own(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Return the likeliest tokens, and the token itself if it is not one of them."""
    own = () if any(token == entry.token for token, _ in entry.top) else ((entry.token, entry.logprob),)
    return [*entry.top, *own]
