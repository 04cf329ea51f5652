"""The server on several ranks: rank 0 has the HTTP server, and the other ranks repeat what its engine does."""

from dataclasses import replace
from signal import SIG_IGN, SIGINT, SIGTERM, signal
from typing import NamedTuple

from outrider.core.types import Request
from outrider.llm import LLM
from outrider.runtime.ranks import Ranks

_STOP = -1.0


class _Call(NamedTuple):
    """A call of the engine between two rounds."""

    request: Request | None  # to add
    abort: int = -1  # id of a request to abort


class Leader:
    """Sends the calls of the engine of rank 0 to the other ranks, before each round."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._calls: list[_Call] = []

    def add(self, request: Request) -> None:
        """Queue a request in the other ranks."""
        self._calls.append(_Call(replace(request, grammar=None)))  # a compiled grammar cannot be sent

    def abort(self, id: int) -> None:
        """Abort a request in the other ranks."""
        self._calls.append(_Call(None, id))

    def step(self) -> None:
        """Run a round in the other ranks."""
        calls, self._calls = self._calls, []
        self._ranks.share((len(calls),))
        if calls:
            self._ranks.share_object(calls)

    def stop(self) -> None:
        """End the other ranks."""
        self._ranks.share((_STOP,))


def follow(llm: LLM, ranks: Ranks) -> None:
    """Repeat the rounds of rank 0 until it stops."""
    for number in (SIGTERM, SIGINT):  # torchrun sends them to all ranks, and rank 0 finishes its requests first
        signal(number, SIG_IGN)
    while (count := ranks.share((0.0,))[0]) != _STOP:
        calls: list[_Call] = ranks.share_object([]) if count else []
        for call in calls:
            if call.request is None:
                llm.abort(call.abort)
                continue
            constraint = call.request.params.constraint
            grammar = None if constraint is None else llm.prepare(constraint)
            llm.add(replace(call.request, grammar=grammar))
        llm.engine.step()
