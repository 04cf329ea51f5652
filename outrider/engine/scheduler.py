"""Who runs now, what each row feeds, and when a row is done."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from outrider.cache.base import Cache
from outrider.core.text import TextStream
from outrider.core.types import Batch, FinishReason, Request, Round, SequenceState
from outrider.engine.prefill_budget import PrefillBudget
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

    def __init__(self, *, slots: int, chunk: int | PrefillBudget, context: int, first: int = 0) -> None:
        """Run at most `slots` rows at once and feed about `chunk` tokens a round, or what a `PrefillBudget` allows.

        Where several engines share a target, each has slots of its own, from `first` on.
        """
        if slots < 1:
            raise OutriderError(f"rows is {slots}; it must be at least 1")
        self.preempted = 0  # how often a row has given way
        self._tempo = chunk if isinstance(chunk, PrefillBudget) else PrefillBudget(chunk)
        self._context = context
        self._free = list(range(first, first + slots))
        self._waiting: list[tuple[tuple[int, int], SequenceState]] = []  # a heap
        self._running: list[SequenceState] = []  # by rank
        self._rounds = self._came = 0

    def add(self, request: Request, stream: TextStream | None = None) -> SequenceState:
        """Queue a request, and return its row; `stream` decodes its text and finds its stop strings.

        Raises:
            OutriderError: its prompt fills the context, so that nothing could follow.
        """
        if len(request.prompt_token_ids) >= self._context:
            raise OutriderError(
                f"the prompt is {len(request.prompt_token_ids)} tokens long and the context holds {self._context};"
                " shorten it"
            )
        self._came += 1
        rank = _PATIENCE * request.params.priority + self._rounds, self._came
        row = SequenceState(
            request=request, slot=-1, token_ids=list(request.prompt_token_ids), stream=stream, rank=rank
        )
        self._wait(row)
        return row

    def busy(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._running or self._waiting)

    def prefilling(self) -> bool:
        """Whether prompts are to be fed in the next round."""
        return bool(self._waiting and self._free) or self._owed() > 0

    def admit(self, cache: Cache) -> list[SequenceState]:
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
            row.num_cached_tokens = cache.admit(slot, row.token_ids, row.request.params.scope)
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
            missing = len(row.token_ids) - row.num_cached_tokens
            take = missing if missing == 1 else min(missing, left)
            left -= 0 if missing == 1 else take
            if take:
                takes[row.slot] = take
        rows = sorted((row for row in self._running if row.slot in takes), key=lambda row: row.slot)
        feeds = tuple(
            tuple(row.token_ids[row.num_cached_tokens : row.num_cached_tokens + takes[row.slot]]) for row in rows
        )
        room = tuple(self._room(row, len(feed)) for row, feed in zip(rows, feeds, strict=True))
        return Batch(
            seqs=tuple(rows),
            start=tuple(row.num_cached_tokens for row in rows),
            feed=feeds,
            draft_budget=room,
            forced_budget=room,
            num_waiting=len(self._running) - len(rows) + min(len(self._waiting), len(self._free)),
        )

    def preempt(self) -> int:
        """Let the row that comes last wait again; returns its slot, which is to be released."""
        assert len(self._running) > 1, "a text that fits the context has memory when it is alone"
        row = self._running.pop()
        slot, row.slot, row.num_cached_tokens = row.slot, -1, 0
        heapq.heappush(self._free, slot)
        self._wait(row)
        self.preempted += 1
        return slot

    def record_round(self, batch: Batch, seconds: float) -> None:
        """How long the round of a batch was."""
        self._tempo.learn(sum(len(feed) for feed in batch.feed if len(feed) > 1), seconds)

    def commit(self, round: Round) -> list[SequenceState]:
        """Append what was emitted to the rows' texts; return the rows that are done."""
        self._rounds += 1
        for b, row in enumerate(round.batch.seqs):
            row.num_cached_tokens = round.batch.start[b] + len(round.batch.feed[b]) + len(round.path[b])
            if round.failed[b]:
                row.finish_reason, row.error = FinishReason.ERROR, round.reasons.get(b, _NO_NUMBERS)
            elif round.emitted[b]:
                self._extend(row, round, b)
        return self._retire([row for row in round.batch.seqs if row.finish_reason])

    def abort(self, id: int) -> SequenceState | None:
        """Take a request back; returns its row if it was running."""
        for _, row in self._waiting:
            if row.request.id == id:
                row.finish_reason = FinishReason.ABORT
        self._waiting = [(rank, row) for rank, row in self._waiting if not row.finish_reason]
        heapq.heapify(self._waiting)
        for row in self._running:
            if row.request.id == id:
                row.finish_reason = FinishReason.ABORT
                return self._retire([row])[0]
        return None

    def _formed(self, row: SequenceState) -> bool:
        """Whether a row stands where its form begins, if it is to have one; else it is done."""
        if row.request.grammar is not None and row.matcher is None:
            try:
                row.matcher = row.request.grammar.start(row.request.end_ids)
            except OutriderError as error:
                row.finish_reason, row.error = FinishReason.ERROR, str(error)
        return row.finish_reason is None

    def _wait(self, row: SequenceState) -> None:
        heapq.heappush(self._waiting, (row.rank, row))

    def _owed(self) -> int:
        """Tokens of prompts that wait to be fed."""
        missing = (len(row.token_ids) - row.num_cached_tokens for row in self._running)
        return sum(count for count in missing if count > 1)

    def _left(self) -> int:
        """Tokens of prompts that a round takes beside the rows that decode."""
        return self._tempo.chunk(sum(len(row.token_ids) - row.num_cached_tokens == 1 for row in self._running))

    def _ahead(self, row: SequenceState) -> int:
        """How long a row's text may be before long."""
        return min(
            len(row.token_ids) + _AHEAD, len(row.request.prompt_token_ids) + row.request.max_tokens, self._context
        )

    def _room(self, row: SequenceState, feed: int) -> int:
        """Guesses that could become part of the completion: the bonus token takes the last place."""
        if row.num_cached_tokens + feed < len(row.token_ids):
            return 0
        room = max(min(row.request.max_tokens - row.num_output_tokens, self._context - len(row.token_ids)) - 1, 0)
        most = row.request.params.k
        return room if most is None else min(room, most)

    def _extend(self, row: SequenceState, round: Round, b: int) -> None:
        kept, before = len(round.path[b]), row.num_output_tokens
        for i, token in enumerate(round.emitted[b]):
            row.token_ids.append(token)
            row.from_draft.append(i < kept)
            try:
                row.finish_reason = self._finish(row, token)
            except OutriderError as error:
                row.finish_reason, row.error = FinishReason.ERROR, str(error)
            if row.finish_reason:
                break
        emitted = row.num_output_tokens - before
        row.rounds.append((round.draft.depth[b], min(kept, emitted), emitted))
        row.num_draft_tokens += round.draft.width[b]

    def _finish(self, row: SequenceState, token: int) -> FinishReason | None:
        request = row.request
        if token in request.end_ids:
            return FinishReason.STOP
        if row.stream and row.stream.push(token, stoppable=row.num_output_tokens >= request.params.min_tokens):
            return FinishReason.STOP
        if row.matcher:
            row.matcher.push(token)
            if row.matcher.done:
                return FinishReason.STOP
        full = row.num_output_tokens >= request.max_tokens or len(row.token_ids) >= self._context
        return FinishReason.LENGTH if full else None

    def _retire(self, rows: list[SequenceState]) -> list[SequenceState]:
        for row in rows:
            self._running.remove(row)
            heapq.heappush(self._free, row.slot)
        return rows
