"""What a waiting client holds: the pieces of one completion as rounds commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
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


class Ticket:
    """One request on its way.

    The engine's thread puts pieces in, and one reader takes them out in its own time. Who is slow finds more of them,
    and never more than the completion has.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request, self.loop = request, loop
        self.given = self.shown = 0  # tokens and characters that pieces hold so far
        self._pieces: list[Piece] = []
        self._more = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """From the engine's thread; `wake` tells the reader."""
        self.given += len(piece.tokens)
        self.shown += len(piece.text)
        self._pieces.append(piece)

    def wake(self) -> None:
        """From the reader's loop."""
        self._more.set()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Each as it comes, to the last."""
        taken = 0
        while True:
            self._more.clear()
            while taken < len(self._pieces):
                piece = self._pieces[taken]
                taken += 1
                yield piece
                if piece.completion or piece.error:
                    return
            if taken == len(self._pieces):
                await self._more.wait()


def wake(tickets: Sequence[Ticket]) -> None:
    """All of a round in one call."""
    for ticket in tickets:
        ticket.wake()
