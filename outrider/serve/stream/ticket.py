"""What a waiting client holds: the pieces of one completion as rounds commit."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum

from outrider.core.types import Completion, Request, TokenLogprobs
from outrider.serve.stream.drafts import RoundDrafts
from outrider.serve.stream.text import StreamText

_log = logging.getLogger("outrider.serve")
TOGETHER = 0.04  # seconds of rounds that readers hear of at once


class StreamContent(IntEnum):
    """What a reader wants to hear of."""

    END = 0  # the last piece alone
    TEXT = 1  # what is new, of however many rounds
    TOKENS = 2  # and what each token added to the text
    ROUNDS = 3  # each round by itself
    DRAFTS = 4  # and all that was guessed in it


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """What one round added, or several."""

    text: str = ""  # characters that no later token can change
    tokens: tuple[int, ...] = ()
    from_draft: tuple[bool, ...] = ()  # per token: an accepted guess, or the target's own
    logprobs: tuple[TokenLogprobs, ...] = ()  # per token, where they were asked for
    token_texts: tuple[str, ...] = ()  # per token, what it added to the text, where that is watched
    drafts: RoundDrafts | None = None  # where they are watched
    completion: Completion | None = None  # in the last piece
    error: str = ""  # likewise, where something broke

    @property
    def last(self) -> bool:
        """Whether nothing comes after it."""
        return bool(self.completion or self.error)

    def merge(self, later: StreamChunk) -> StreamChunk:
        """The two as one."""
        return replace(
            later,
            tokens=self.tokens + later.tokens,
            from_draft=self.from_draft + later.from_draft,
            logprobs=self.logprobs + later.logprobs,
        )


class RequestStream:
    """One request on its way.

    The engine's thread puts pieces in without their text, and one reader takes them out in its own time. What waits for
    who is slow is one piece, never longer than the completion, unless rounds are watched one by one.
    """

    def __init__(self, request: Request, wording: StreamText, watch: StreamContent) -> None:
        self.request, self.watch = request, watch
        self.written = 0  # tokens so far
        self.given = 0  # those of them that pieces hold
        self.guesses: RoundDrafts | None = None  # of the round that is being committed
        self._wording = wording
        self._pieces: deque[StreamChunk] = deque()
        self._more = asyncio.Event()

    def put(self, piece: StreamChunk) -> None:
        """From the engine's thread; `wake` tells the reader."""
        self.given += len(piece.tokens)
        if self.watch < StreamContent.ROUNDS:
            with suppress(IndexError):  # taken, perhaps just now
                piece = self._pieces.pop().merge(piece)
        self._pieces.append(piece)

    def wake(self) -> None:
        """From the reader's loop."""
        self._more.set()

    async def chunks(self) -> AsyncIterator[list[StreamChunk]]:
        """What is new each time, to the last: one piece, or where rounds are watched one of each."""
        while True:
            await self._more.wait()
            self._more.clear()
            new = self._taken()
            if new:
                yield new
                if new[-1].last:
                    return

    def _taken(self) -> list[StreamChunk]:
        """All that waits, worded."""
        out = list[StreamChunk]()
        with suppress(IndexError):  # `put` may just be making two pieces one
            while True:
                out.append(self._worded(self._pieces.popleft()))
                if out[-1].last:
                    break
        return out

    def _worded(self, piece: StreamChunk) -> StreamChunk:
        if self.watch is StreamContent.END:
            return piece
        try:
            text = self._wording.grow(piece.tokens, piece.completion)
            words = self._wording.words(piece.tokens) if self.watch >= StreamContent.TOKENS else ()
        except Exception as error:  # an error of this text does not affect other requests
            _log.exception("a completion could not be told")
            return StreamChunk(error=f"the text cannot be written: {error}")
        return replace(piece, text=text, token_texts=words)


class Wakeup:
    """Wakes readers, those who are told of something together in one call to their loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._told: deque[RequestStream] = deque()
        self._called = False

    def notify(self, tickets: Sequence[RequestStream]) -> None:
        """From the engine's thread."""
        self._told.extend(tickets)
        if not self._called:
            self._called = True
            with suppress(RuntimeError):  # the loop is closed, and nobody reads
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._called = False  # before looking, so that whoever is told after the look rings again
        while self._told:
            self._told.popleft().wake()
