"""The scheduler decides which sequences run, which tokens they feed, and when they are done."""

import heapq
from bisect import insort
from itertools import count
from operator import attrgetter

from outrider.core.cache import Cache
from outrider.core.text import TextStream
from outrider.core.types import Batch, DraftBudget, FinishReason, Request, Round, SequenceState
from outrider.engine.prefill_budget import PrefillBudget
from outrider.errors import OutriderError

_AGING_ROUNDS = 64  # rounds of waiting that equal one step of priority
_RESERVED_TOKENS = 64  # free tokens that every running sequence must have when another one is admitted
_NOT_FINITE = "the target's logits were not finite (NaN or infinite); try another dtype"


class Scheduler:
    """Schedules requests by priority, then by arrival, into slots and KV-cache memory.

    Every decoding sequence runs in every round. Prompts share the rest of the round's token budget
    in order (chunked prefill), so a long prompt does not delay decoding sequences.

    The rank of a request is `_AGING_ROUNDS * priority + arrival round`, and the lowest rank comes first. It is fixed on
    arrival, so a later request with a better priority goes first only if it arrives within `_AGING_ROUNDS` rounds for
    each step of the difference. The number of requests that a request waits for is therefore bounded.

    When the KV cache is full, the sequence with the last rank is preempted. It waits for a slot again, and its tokens
    so far become its prompt. The first sequence is never preempted, so it ends and another one becomes the first.
    """

    def __init__(self, *, slots: int, chunk: int | PrefillBudget, context: int, first: int = 0) -> None:
        """Schedule at most `slots` sequences at once, of at most `context` tokens each.

        `chunk` limits the tokens that a round feeds: a number, or a `PrefillBudget`. Engines that
        share a target use different slots, each from `first` on.
        """
        if slots < 1:
            raise OutriderError(f"max_num_seqs is {slots}; use at least 1")
        self.preempted = 0  # number of preemptions
        self._prefill_budget = chunk if isinstance(chunk, PrefillBudget) else PrefillBudget(chunk)
        self._context = context
        self._free = list(range(first, first + slots))
        self._waiting: list[tuple[tuple[int, int], SequenceState]] = []  # a heap
        self._running: list[SequenceState] = []  # ordered by rank
        self._rounds = 0
        self._arrivals = count()

    @property
    def free_slot(self) -> int:
        """The lowest slot that no sequence holds."""
        return self._free[0]

    def add(self, request: Request, stream: TextStream | None = None) -> SequenceState:
        """Queue a request and return its state. The arguments and errors are those of `prepare`."""
        seq = self.prepare(request, stream)
        self.queue(seq)
        return seq

    def prepare(self, request: Request, stream: TextStream | None = None) -> SequenceState:
        """Return the state of a request for `queue`. `stream` decodes its text and finds stop strings.

        Raises:
            OutriderError: the prompt fills the context.
        """
        if len(request.prompt_token_ids) >= self._context:
            raise OutriderError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and the context holds"
                f" {self._context}; shorten the prompt"
            )
        rank = _AGING_ROUNDS * request.params.priority + self._rounds, next(self._arrivals)
        return SequenceState(
            request=request,
            slot=-1,
            token_ids=list(request.prompt_token_ids),
            stream=stream,
            max_length=min(len(request.prompt_token_ids) + request.max_tokens, self._context),
            rank=rank,
        )

    def queue(self, seq: SequenceState) -> None:
        """Make a sequence wait for a slot."""
        heapq.heappush(self._waiting, (seq.rank, seq))

    def busy(self) -> bool:
        """Return whether a request runs or waits."""
        return bool(self._running or self._waiting)

    def prefilling(self) -> bool:
        """Return whether the next round prefills prompts."""
        return bool(self._waiting and self._free) or self._unfed_tokens() > 0

    def admit(self, cache: Cache) -> list[SequenceState]:
        """Give free slots to waiting requests, while memory and the token budget of the round allow.

        The result includes requests whose grammar cannot be started. They have a `finish_reason` and no slot.
        """
        admitted: list[SequenceState] = []
        if not self._waiting or not self._free:
            return admitted
        # Updated below. Counting all sequences again for each new one is slow with hundreds of them.
        ends = {running.slot: self._reserved_length(running) for running in self._running}
        unfed = self._unfed_tokens()
        decoding = self._num_decoding()
        while self._waiting and self._free and (unfed < self._prefill_budget.chunk(decoding) or not self._running):
            seq = self._waiting[0][1]
            slot = self._free[0]  # the lowest slot, so that running sequences are neighbors in memory
            if not self._start_grammar(seq):
                heapq.heappop(self._waiting)
                admitted.append(seq)
                continue
            seq.num_cached_tokens = cache.admit(slot, seq.token_ids, seq.request.params.scope)
            ends[slot] = self._reserved_length(seq)
            if self._running and not cache.fits(ends):
                cache.release(slot)
                break
            heapq.heappop(self._waiting)
            if seq.num_cached_prompt_tokens < 0:
                seq.num_cached_prompt_tokens = seq.num_cached_tokens
            seq.slot = heapq.heappop(self._free)
            insort(self._running, seq, key=attrgetter("rank"))
            admitted.append(seq)
            missing = len(seq.token_ids) - seq.num_cached_tokens
            unfed += missing if missing > 1 else 0
            decoding += missing == 1
        return admitted

    def next(self) -> Batch:
        """Return the batch of this round, ordered by slot. Draft budgets are the most that each sequence can use."""
        decoding = self._num_decoding()
        fed = sorted(self._running, key=attrgetter("slot"))
        if decoding == len(fed):
            feed: list[tuple[int, ...]] = [(seq.token_ids[-1],) for seq in fed]
        else:
            feeds = self._feeds(decoding)
            fed = [seq for seq in fed if seq.slot in feeds]
            feed = [feeds[seq.slot] for seq in fed]
        budget = tuple(map(_max_draft_tokens, fed, feed))
        return Batch(
            seqs=tuple(fed),
            start=tuple([seq.num_cached_tokens for seq in fed]),
            feed=tuple(feed),
            budget=DraftBudget(budget, with_forced=budget),
            num_waiting=len(self._running) - len(fed) + min(len(self._waiting), len(self._free)),
        )

    def _feeds(self, decoding: int) -> dict[int, tuple[int, ...]]:
        """Return the feed of each sequence by slot. The first `prompt_budget` prompt tokens are fed."""
        prompt_budget = self._prefill_budget.chunk(decoding)
        feeds = {}
        for seq in self._running:
            begin = seq.num_cached_tokens
            missing = len(seq.token_ids) - begin
            if missing > 1:  # a decoding sequence is not limited by the prompt budget
                missing = min(missing, prompt_budget)
                prompt_budget -= missing
            if missing:
                feeds[seq.slot] = tuple(seq.token_ids[begin : begin + missing])
        return feeds

    def preempt(self) -> int:
        """Preempt the sequence with the last rank. Returns its slot, which the caller releases."""
        assert len(self._running) > 1, "a single sequence always fits into the KV cache"
        self.preempted += 1
        return self._suspend_last()

    def suspend(self) -> list[int]:
        """Make all running sequences wait. Returns their slots, which the caller releases.

        They keep their tokens and their ranks. The next rounds prefill them again.
        """
        return [self._suspend_last() for _ in range(len(self._running))]

    def record_round(self, batch: Batch, seconds: float) -> None:
        self._prefill_budget.learn(sum([count for count in map(len, batch.feed) if count > 1]), seconds)

    def commit(self, round: Round) -> list[SequenceState]:
        """Append the emitted tokens to the sequences. Returns the sequences that are done."""
        self._rounds += 1
        batch = round.batch
        for b, (seq, feed, path) in enumerate(zip(batch.seqs, batch.feed, round.path, strict=True)):
            seq.num_cached_tokens = batch.start[b] + len(feed) + len(path)
            if round.failed[b]:
                seq.finish_reason = FinishReason.ERROR
                seq.error = round.reasons.get(b, _NOT_FINITE)
            elif round.emitted[b]:
                self._extend(seq, round, b)
        return self._retire([seq for seq in batch.seqs if seq.finish_reason])

    def abort(self, id: int) -> SequenceState | None:
        """Remove a request. Returns its state if it was running."""
        for _, seq in self._waiting:
            if seq.request.id == id:
                seq.finish_reason = FinishReason.ABORT
        self._waiting = [(rank, seq) for rank, seq in self._waiting if not seq.finish_reason]
        heapq.heapify(self._waiting)
        for seq in self._running:
            if seq.request.id == id:
                seq.finish_reason = FinishReason.ABORT
                return self._retire([seq])[0]
        return None

    def _suspend_last(self) -> int:
        """Make the running sequence with the last rank wait for a slot. Returns its slot."""
        seq = self._running.pop()
        slot = seq.slot
        seq.slot = -1
        seq.num_cached_tokens = 0
        heapq.heappush(self._free, slot)
        self.queue(seq)
        return slot

    def _start_grammar(self, seq: SequenceState) -> bool:
        """Start the grammar of a sequence. Returns False if that fails, which ends the sequence."""
        if seq.request.grammar is not None and seq.matcher is None:
            try:
                seq.matcher = seq.request.grammar.start(seq.request.end_ids)
            except OutriderError as error:
                seq.finish_reason = FinishReason.ERROR
                seq.error = str(error)
        return seq.finish_reason is None

    def _unfed_tokens(self) -> int:
        """Return the number of prompt tokens that running sequences have not fed yet."""
        missing = (len(seq.token_ids) - seq.num_cached_tokens for seq in self._running)
        return sum(count for count in missing if count > 1)

    def _num_decoding(self) -> int:
        """Return the number of running sequences that have no prompt tokens to feed."""
        return [len(seq.token_ids) - seq.num_cached_tokens for seq in self._running].count(1)

    def _reserved_length(self, seq: SequenceState) -> int:
        """Return the length that a sequence may soon have, for which memory is reserved."""
        return min(len(seq.token_ids) + _RESERVED_TOKENS, seq.max_length)

    def _extend(self, seq: SequenceState, round: Round, b: int) -> None:
        """Append the emitted tokens of sequence b, up to the token that ends it."""
        accepted = len(round.path[b])
        emitted = 0
        for token in round.emitted[b]:
            seq.token_ids.append(token)
            seq.from_draft.append(emitted < accepted)
            emitted += 1
            try:
                seq.finish_reason = self._finish(seq, token)
            except OutriderError as error:
                seq.finish_reason = FinishReason.ERROR
                seq.error = str(error)
            if seq.finish_reason:
                break
        seq.rounds.append((round.draft.depth[b], min(accepted, emitted), emitted))
        seq.num_draft_tokens += round.draft.width[b]

    def _finish(self, seq: SequenceState, token: int) -> FinishReason | None:
        """Return why the sequence ends with this token, or None if it continues."""
        request = seq.request
        if token in request.end_ids:
            return FinishReason.STOP
        if seq.stream:
            minimum = request.params.min_tokens
            if seq.stream.add_token(token, stoppable=not minimum or seq.num_output_tokens >= minimum):
                return FinishReason.STOP
        if seq.matcher:
            seq.matcher.advance(token)
            if seq.matcher.done:
                return FinishReason.STOP
        return FinishReason.LENGTH if len(seq.token_ids) >= seq.max_length else None

    def _retire(self, seqs: list[SequenceState]) -> list[SequenceState]:
        """Remove sequences from the running ones and free their slots. Returns them."""
        for seq in seqs:
            self._running.remove(seq)
            heapq.heappush(self._free, seq.slot)
        return seqs


def _max_draft_tokens(seq: SequenceState, feed: tuple[int, ...]) -> int:
    """Return the most draft tokens that the completion can use. The bonus token needs the last position."""
    length = len(seq.token_ids)
    if seq.num_cached_tokens + len(feed) < length:
        return 0
    limit = seq.max_length - length - 1
    k = seq.request.params.k
    if k is not None and k < limit:
        limit = k
    return limit if limit > 0 else 0
