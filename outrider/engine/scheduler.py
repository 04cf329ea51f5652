"""Who runs now, what each row feeds, and when a row is done."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from outrider.cache.base import Cache
from outrider.core.text import TextStream
from outrider.core.types import Batch, Finish, Request, Round, Row
from outrider.engine.prefill_budget import Tempo
from outrider.errors import OutriderError

_PATIENCE = 64  # rounds of waiting that count as much as one step of priority
_AHEAD = 64  # tokens that each row can go on for, as far as memory goes, when another one is admitted
_NO_NUMBERS = "the target's logits were not numbers (NaN or infinite)"


class Scheduler:
    """By priority, then by arrival, in slots and in memory.

    Every row that decodes runs in every round. Prompts share what `chunk` leaves of it, the first ones first, so a
    prompt waits at most for the prompts before it, and no long prompt holds up those who decode.

    Waiting makes all equally older, so the order of two requests never changes, and who comes first is known when they
    come: one of priority p goes before all that come more than `_PATIENCE` rounds later for each step that theirs is
    lower. So it waits for a bounded number of others, whatever comes.

    Where memory ends, whoever comes last gives way, and waits for a slot again with the text so far as its prompt. The
    first one never does, so it ends, and then another is the first.
    """

    def __init__(self, *, slots: int, chunk: int | Tempo, context: int, first: int = 0) -> None:
        """Run at most `slots` rows at once and feed about `chunk` tokens a round, or what a `Tempo` allows.

        Where several engines share a target, each has slots of its own, from `first` on.
        """
        if slots < 1:
            raise OutriderError(f"rows is {slots}; it must be at least 1")
        self.preempted = 0  # how often a row has given way
        self._tempo = chunk if isinstance(chunk, Tempo) else Tempo(chunk)
        self._context = context
        self._free = list(range(first, first + slots))
        self._waiting: list[tuple[tuple[int, int], Row]] = []  # a heap
        self._running: list[Row] = []  # by rank
        self._rounds = self._came = 0

    def add(self, request: Request, stream: TextStream | None = None) -> Row:
        """Queue a request, and return its row; `stream` decodes its text and finds its stop strings.

        Raises:
            OutriderError: its prompt fills the context, so that nothing could follow.
        """
        if len(request.prompt) >= self._context:
            raise OutriderError(
                f"the prompt is {len(request.prompt)} tokens long and the context holds {self._context}; shorten it"
            )
        self._came += 1
        rank = _PATIENCE * request.params.priority + self._rounds, self._came
        row = Row(request=request, slot=-1, text=list(request.prompt), stream=stream, rank=rank)
        self._wait(row)
        return row

    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    def reads(self) -> bool:
        """Whether prompts are to be fed in the next round."""
        return bool(self._waiting and self._free) or self._owed() > 0

    def admit(self, cache: Cache) -> list[Row]:
        """Give free slots to those who come first, while there is memory and room for their prompts in the round.

        Rows whose grammar cannot be started are among them, marked with their `finish`: these have no slot.
        """
        admitted = []
        while self._waiting and self._free and (self._owed() < self._left() or not self._running):
            row, slot = self._waiting[0][1], self._free[0]  # the lowest, so that running rows stay neighbours in memory
            if not self._formed(row):
                heapq.heappop(self._waiting)
                admitted.append(row)
                continue
            row.cached = cache.admit(slot, row.text, row.request.params.scope)
            ends = {each.slot: self._ahead(each) for each in self._running}
            if self._running and not cache.fits({**ends, slot: self._ahead(row)}):
                cache.release(slot)
                break
            heapq.heappop(self._waiting)
            row.slot = heapq.heappop(self._free)
            insort(self._running, row, key=attrgetter("rank"))
            admitted.append(row)
        return admitted

    def next(self) -> Batch:
        """The rows of this round, by slot; each row's budget is what it could use at most."""
        left = self._left()
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
            waiting=len(self._running) - len(rows) + min(len(self._waiting), len(self._free)),
        )

    def preempt(self) -> int:
        """Let the row that comes last wait again; returns its slot, which is to be released."""
        assert len(self._running) > 1, "a text that fits the context has memory when it is alone"
        row = self._running.pop()
        slot, row.slot, row.cached = row.slot, -1, 0
        heapq.heappush(self._free, slot)
        self._wait(row)
        self.preempted += 1
        return slot

    def took(self, batch: Batch, seconds: float) -> None:
        """How long the round of a batch was."""
        self._tempo.learn(sum(len(feed) for feed in batch.feed if len(feed) > 1), seconds)

    def commit(self, round: Round) -> list[Row]:
        """Append what was emitted to the rows' texts; return the rows that are done."""
        self._rounds += 1
        for b, row in enumerate(round.batch.rows):
            row.cached = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
            if round.failed[b]:
                row.finish, row.error = Finish.ERROR, round.reasons.get(b, _NO_NUMBERS)
            elif round.emitted[b]:
                self._extend(row, round, b)
        return self._retire([row for row in round.batch.rows if row.finish])

    def abort(self, id: int) -> Row | None:
        """Take a request back; returns its row if it was running."""
        for _, row in self._waiting:
            if row.request.id == id:
                row.finish = Finish.ABORT
        self._waiting = [(rank, row) for rank, row in self._waiting if not row.finish]
        heapq.heapify(self._waiting)
        for row in self._running:
            if row.request.id == id:
                row.finish = Finish.ABORT
                return self._retire([row])[0]
        return None

    def _formed(self, row: Row) -> bool:
        """Whether a row stands where its form begins, if it is to have one; else it is done."""
        if row.request.grammar is not None and row.matcher is None:
            try:
                row.matcher = row.request.grammar.start(row.request.end_ids)
            except OutriderError as error:
                row.finish, row.error = Finish.ERROR, str(error)
        return row.finish is None

    def _wait(self, row: Row) -> None:
        heapq.heappush(self._waiting, (row.rank, row))

    def _owed(self) -> int:
        """Tokens of prompts that wait to be fed."""
        missing = (len(row.text) - row.cached for row in self._running)
        return sum(count for count in missing if count > 1)

    def _left(self) -> int:
        """Tokens of prompts that a round takes beside the rows that decode."""
        return self._tempo.chunk(sum(len(row.text) - row.cached == 1 for row in self._running))

    def _ahead(self, row: Row) -> int:
        """How long a row's text may be before long."""
        return min(len(row.text) + _AHEAD, len(row.request.prompt) + row.request.limit, self._context)

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
