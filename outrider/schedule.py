"""Who runs now, what each row feeds, and when a row is done."""

from __future__ import annotations

import heapq
from collections import deque

from outrider.errors import OutriderError
from outrider.text import TextStream
from outrider.types import Batch, Finish, Request, Round, Row

_NO_NUMBERS = "the target's logits were not numbers (NaN or infinite)"


class Scheduler:
    """First come, first served, in slots.

    Every row that decodes runs in every round. Prompts share what is left of `chunk` fed tokens a round, the oldest
    first, so a prompt waits at most for the prompts before it, and no long prompt holds up those who decode.
    """

    def __init__(self, *, slots: int, chunk: int, context: int) -> None:
        """Run at most `slots` rows at once and feed at most about `chunk` tokens a round."""
        if slots < 1 or chunk < 1:
            raise OutriderError(f"rows is {slots} and chunk is {chunk}; both must be at least 1")
        self._chunk = chunk
        self._context = context
        self._free = list(range(slots))
        self._waiting: deque[tuple[Request, TextStream | None]] = deque()
        self._running: list[Row] = []  # in the order of admission

    def add(self, request: Request, stream: TextStream | None = None) -> None:
        """Queue a request; `stream` decodes its text and finds its stop strings."""
        self._waiting.append((request, stream))

    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    def admit(self) -> list[Row]:
        """Give free slots to those who wait longest."""
        admitted = []
        while self._waiting and self._free:
            request, stream = self._waiting.popleft()
            slot = heapq.heappop(self._free)  # the lowest, so that running rows stay neighbours in memory
            matcher = None if request.grammar is None else request.grammar.start(request.end_ids)
            row = Row(request=request, slot=slot, text=list(request.prompt), stream=stream, matcher=matcher)
            admitted.append(row)
        self._running += admitted
        return admitted

    def next(self) -> Batch:
        """The rows of this round, by slot; each row's budget is what it could use at most."""
        decoding = sum(len(row.text) - row.cached == 1 for row in self._running)
        left = max(self._chunk - decoding, 1)
        takes: dict[int, int] = {}
        for row in self._running:
            missing = len(row.text) - row.cached
            take = missing if missing == 1 else min(missing, left)
            left -= 0 if missing == 1 else take
            if take:
                takes[row.slot] = take
        rows = sorted((row for row in self._running if row.slot in takes), key=lambda row: row.slot)
        feeds = tuple(tuple(row.text[row.cached : row.cached + takes[row.slot]]) for row in rows)
        room = tuple(self._room(row, len(feed)) for row, feed in zip(rows, feeds, strict=True))
        return Batch(
            rows=tuple(rows),
            start=tuple(row.cached for row in rows),
            feed=feeds,
            budget=room,
            room=room,
            waiting=len(self._running) - len(rows),
        )

    def commit(self, round: Round) -> list[Row]:
        """Append what was emitted to the rows' texts; return the rows that are done."""
        for b, row in enumerate(round.batch.rows):
            row.cached = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
            if round.failed[b]:
                row.finish, row.error = Finish.ERROR, round.reasons.get(b, _NO_NUMBERS)
            elif round.emitted[b]:
                self._extend(row, round, b)
        return self._retire([row for row in round.batch.rows if row.finish])

    def abort(self, id: int) -> Row | None:
        """Take a request back; returns its row if it was running."""
        self._waiting = deque((request, stream) for request, stream in self._waiting if request.id != id)
        for row in self._running:
            if row.request.id == id:
                row.finish = Finish.ABORT
                return self._retire([row])[0]
        return None

    def _room(self, row: Row, feed: int) -> int:
        """Guesses that could become part of the completion: the bonus token takes the last place."""
        if row.cached + feed < len(row.text):
            return 0
        room = max(min(row.request.limit - row.emitted, self._context - len(row.text)) - 1, 0)
        most = row.request.params.guesses
        return room if most is None else min(room, most)

    def _extend(self, row: Row, round: Round, b: int) -> None:
        kept, before = len(round.path[b]), row.emitted
        for i, token in enumerate(round.emitted[b]):
            row.text.append(token)
            row.authors.append(i < kept)
            try:
                row.finish = self._finish(row, token)
            except OutriderError as error:
                row.finish, row.error = Finish.ERROR, str(error)
            if row.finish:
                break
        emitted = row.emitted - before
        row.passes.append((round.draft.depth[b], min(kept, emitted), emitted))
        row.drafted += round.draft.width[b]

    def _finish(self, row: Row, token: int) -> Finish | None:
        request = row.request
        if token in request.end_ids:
            return Finish.STOP
        if row.stream and row.stream.push(token, stoppable=row.emitted >= request.params.min_tokens):
            return Finish.STOP
        if row.matcher:
            row.matcher.push(token)
            if row.matcher.done:
                return Finish.STOP
        full = row.emitted >= request.limit or len(row.text) >= self._context
        return Finish.LENGTH if full else None

    def _retire(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            self._running.remove(row)
            heapq.heappush(self._free, row.slot)
        return rows
