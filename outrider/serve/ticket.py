"""What a waiting client holds: the pieces of one completion as rounds commit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from outrider.types import Completion, Request, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one round added."""

    text: str  # characters that no later token can change
    tokens: tuple[int, ...]
    guessed: tuple[bool, ...]  # per token: an accepted guess, or the target's own
    logprobs: tuple[TokenLogprobs, ...]  # per token, where they were asked for
    completion: Completion | None = None  # in the last piece
    error: str = ""  # likewise, where something broke

    def then(self, later: Piece) -> Piece:
        """The two as one."""
        return Piece(
            text=self.text + later.text,
            tokens=self.tokens + later.tokens,
            guessed=self.guessed + later.guessed,
            logprobs=self.logprobs + later.logprobs,
            completion=later.completion,
            error=later.error,
        )


class Ticket:
    """One request on its way.

    The engine's thread puts pieces in, and one reader takes them out in its own time. What waits for who is slow is
    one piece, never longer than the completion.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.loop = request, loop
        self.given = self.shown = 0  # tokens and characters that pieces hold so far
        self._pieces: deque[Piece] = deque(maxlen=1)
        self._more = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """From the engine's thread; `wake` tells the reader."""
        self.given += len(piece.tokens)
        self.shown += len(piece.text)
        with suppress(IndexError):  # taken, perhaps just now
            piece = self._pieces.pop().then(piece)
        self._pieces.append(piece)

    def wake(self) -> None:
        """From the reader's loop."""
        self._more.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Each as it comes, to the last."""
        while True:
            self._more.clear()
            try:
                piece = self._pieces.popleft()
            except IndexError:
                await self._more.wait()
                continue
            yield piece
            if piece.completion or piece.error:
                return


def wake(tickets: Sequence[Ticket]) -> None:
    """All of a round in one call."""
    for ticket in tickets:
        ticket.wake()
