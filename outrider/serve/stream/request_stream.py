"""Passes the chunks of a completion from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum

from outrider.core.stats import Stats
from outrider.core.types import Completion, Request, SequenceState, TokenLogprobs
from outrider.serve.stream.drafts import RoundDrafts
from outrider.serve.stream.text import StreamText

_log = logging.getLogger("outrider.serve")
PUBLISH_INTERVAL = 0.04  # seconds; the rounds of this time share one chunk


class StreamContent(IntEnum):
    """The contents of a stream's chunks. Each level includes the levels before it."""

    END = 0  # only the last chunk
    TEXT = 1  # new text, of one or several rounds
    TOKENS = 2  # the text of each token
    ROUNDS = 3  # one chunk per round
    DRAFTS = 4  # the draft of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """The tokens and the text that one or several rounds add to a completion."""

    text: str = ""  # characters that no later token can change
    tokens: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()  # by token: whether it is an accepted draft token
    logprobs: tuple[TokenLogprobs, ...] = ()  # by token, if the request wants them
    token_texts: tuple[str, ...] = ()  # by token: what it adds to the text; from `StreamContent.TOKENS`
    drafts: RoundDrafts | None = None  # for `StreamContent.DRAFTS`
    completion: Completion | None = None  # in the last chunk
    error: str = ""  # in the last chunk, if the completion failed

    @property
    def last(self) -> bool:
        return bool(self.completion or self.error)

    def merge(self, later: StreamChunk) -> StreamChunk:
        """Return one chunk with the tokens of both. It has no text yet."""
        return replace(
            later,
            tokens=self.tokens + later.tokens,
            from_draft=self.from_draft + later.from_draft,
            logprobs=self.logprobs + later.logprobs,
        )


class RequestStream:
    """The stream of one request.

    The engine thread puts chunks without text. One reader in the event loop takes them and adds the
    text. If the reader is slow, the waiting chunks are merged into one, which is never longer than
    the completion. From `StreamContent.ROUNDS` on, chunks are not merged.
    """

    def __init__(self, request: Request, text: StreamText, content: StreamContent) -> None:
        self.request = request
        self.content = content
        self.seq: SequenceState | None = None  # what the engine has made so far; None: no tokens
        self.num_tokens = 0  # output tokens so far
        self.num_published = 0  # output tokens in chunks so far
        self.drafts: RoundDrafts | None = None  # of the round that is being committed
        self._text = text
        self._chunks: deque[StreamChunk] = deque()
        self._has_chunks = asyncio.Event()

    def put(self, chunk: StreamChunk) -> None:
        """Add a chunk, in the engine thread. The reader notices it after `wake`."""
        self.num_published += len(chunk.tokens)
        if self.content < StreamContent.ROUNDS:
            with suppress(IndexError):  # the reader has taken the waiting chunk
                chunk = self._chunks.pop().merge(chunk)
        self._chunks.append(chunk)

    def stats(self) -> Stats:
        """Return the statistics of the rounds so far. `prompt_tokens` includes a source; 0: there are no tokens yet."""
        if self.seq is None:
            return Stats()
        prompt = len(self.request.prompt_token_ids) + len(self.request.source_token_ids)
        return Stats.of_passes(tuple(self.seq.rounds), drafted=self.seq.num_draft_tokens, prompt=prompt)

    def wake(self) -> None:
        """Wake the reader, in the event loop."""
        self._has_chunks.set()

    async def chunks(self) -> AsyncIterator[list[StreamChunk]]:
        """Yield the new chunks until the last one.

        Each list has one chunk, or one per round from `StreamContent.ROUNDS` on.
        """
        while True:
            await self._has_chunks.wait()
            self._has_chunks.clear()
            new_chunks = self._take()
            if new_chunks:
                yield new_chunks
                if new_chunks[-1].last:
                    return

    def _take(self) -> list[StreamChunk]:
        """Take all waiting chunks, and return them with their text."""
        taken = list[StreamChunk]()
        with suppress(IndexError):  # the deque is empty; `put` empties it for a moment while it merges two chunks
            while True:
                taken.append(self._add_text(self._chunks.popleft()))
                if taken[-1].last:
                    break
        return taken

    def _add_text(self, chunk: StreamChunk) -> StreamChunk:
        if self.content is StreamContent.END:
            return chunk
        try:
            text = self._text.add_tokens(chunk.tokens, chunk.completion)
            token_texts = self._text.token_texts(chunk.tokens) if self.content >= StreamContent.TOKENS else ()
        except Exception as error:  # an error of this text does not affect other requests
            _log.exception("cannot decode a completion")
            return StreamChunk(error=f"cannot decode the tokens of this completion: {error}; see the log of the server")
        return replace(chunk, text=text, token_texts=token_texts)


class Wakeup:
    """Wakes readers from the engine thread, several of them in one call to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[RequestStream] = deque()
        self._scheduled = False

    def notify(self, streams: Sequence[RequestStream]) -> None:
        """Schedule a wakeup of these streams, in the engine thread."""
        self._pending.extend(streams)
        if not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop is closed, so there are no readers
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Clear the flag first: a stream that is added after the loop below has ended schedules a
        # new call.
        self._scheduled = False
        while self._pending:
            self._pending.popleft().wake()
