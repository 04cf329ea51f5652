"""The engine. `Engine.step` runs one round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import Protocol

import torch

from outrider.core import tree
from outrider.core.cache import CacheUsage, prompts_that_fit
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.proposer import Proposer, check_budget
from outrider.core.stats import Stats
from outrider.core.target import ExpertCounter, Target
from outrider.core.text import TextStream
from outrider.core.types import Batch, Draft, DraftBudget, FinishReason, Request, Round, SequenceState
from outrider.engine.accounting import Accounting
from outrider.engine.constraints import ConstrainedDraft, apply_constraints
from outrider.engine.logprobs import add_logprobs
from outrider.engine.scheduler import Scheduler
from outrider.engine.stopwatch import RoundSeconds, RoundTimer, RoundTimes, Stopwatch, find_stopwatch
from outrider.engine.turns import Turns
from outrider.engine.verification import Verification
from outrider.errors import NotEnoughMemory, OutriderError
from outrider.models.cache.memory import out_of_memory
from outrider.runtime.forks import check_fork
from outrider.runtime.ranks import Ranks
from outrider.verify.rules import Verifier
from outrider.verify.sampling import TORCH, SamplingKernels


class Followers(Protocol):
    """Repeats the calls of an engine in the other ranks of tensor parallelism."""

    def add(self, request: Request) -> None:
        """Queue the request there."""

    def abort(self, id: int) -> None:
        """Remove the request there."""

    def step(self) -> None:
        """Begin a round there."""


class Engine:
    """Runs rounds of propose, score, verify and commit for the requests of a scheduler.

    Threads may share it: `add`, `abort` and `step` may be called at any time. For other methods, a thread takes a turn.
    """

    def __init__(
        self,
        *,
        target: Target,
        proposer: Proposer,
        verifier: Verifier,
        planner: Planner,
        scheduler: Scheduler,
        sampling: SamplingKernels = TORCH,
        ranks: Ranks | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Connect the parts.

        `sampling` computes target probabilities and log-probabilities from logits. `ranks` are the processes that
        run the same rounds, each with a part of the target; None: this process has the whole
        target. `stopwatch` measures the rounds; None: that of the target's device.
        """
        self._target = target
        self._inference_mode = torch.inference_mode()  # of `step`; as a decorator it is made anew in each call
        self._stopwatch = stopwatch or find_stopwatch(target.device)
        self._expert_counter = target if isinstance(target, ExpertCounter) and target.expert_bytes() else None
        self._proposer = proposer
        self.sampling = sampling
        self._verification = Verification(verifier, vocab=target.vocab, device=target.device, kernels=sampling)
        self._planner = planner
        self._scheduler = scheduler
        self.turns = Turns()  # of the threads that use this engine
        self._accounting = Accounting(
            alternatives=proposer.needs.alternatives, exact=verifier.exact, bound=verifier.bound
        )
        self.ranks = ranks
        self.followers: Followers | None = None  # repeat the calls of this engine in the other ranks
        self.on_round: Callable[[Round], None] | None = None  # called after each round, to show what was drafted
        self.on_times: Callable[[Sequence[SequenceState], RoundTimes], None] | None = None  # called after each round
        self._open: Batch | None = None  # the batch of the current round
        self._refused: list[SequenceState] = []  # requests that failed at admission in this round
        self._committing = False  # whether this round has begun to commit
        self._blocked = ""  # why no round may run
        self._weight_version = 0

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._accounting.total.total

    @property
    def alternative_stats(self) -> tuple[Stats, ...]:
        """Sums over the rounds with draft tokens, by the alternative of the proposer that drafted them."""
        return tuple(stats.total for stats in self._accounting.by_alternative)

    def add(self, request: Request, stream: TextStream | None = None) -> SequenceState:
        """Queue a request and return its state, which later calls of `step` update."""
        check_fork()
        seq = self._scheduler.prepare(request, stream)
        self.turns.call(lambda: self._queue(seq))
        return seq

    def _queue(self, seq: SequenceState) -> None:
        self._scheduler.queue(seq)
        if self.followers:
            self.followers.add(seq.request)

    def abort(self, id: int) -> None:
        """Remove a waiting or running request: now, or after the round that another thread runs."""
        self.turns.call(lambda: self._abort(id))

    @torch.inference_mode()
    def _abort(self, id: int) -> None:
        if self.followers:
            self.followers.abort(id)
        if seq := self._scheduler.abort(id):
            self._release(seq.slot)

    def cache_usage(self) -> CacheUsage:
        """Return the memory use of the target's cache, its prefix-cache hits, and the number of preemptions."""
        return replace(self._target.cache.usage(), preempted=self._scheduler.preempted)

    def prefilling(self) -> bool:
        """Return whether the next round prefills prompts. Such a round takes longer."""
        return self._scheduler.prefilling()

    def busy(self) -> bool:
        """Return whether a request runs or waits."""
        return self.turns.called or self._scheduler.busy()

    @property
    def weight_version(self) -> int:
        """The version of the target's weights; 0 before the first update."""
        return self._weight_version

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights into the target, between two rounds.

        Unfinished requests go on with the new weights. Their KV cache is computed again from their
        tokens so far. `SequenceState.weight_versions` tells which tokens come from which version.

        Raises:
            OutriderError: a weight does not fit. The old ones stay in use.
        """
        self._target.update_weights(weights, version)
        self._weight_version = version
        self.suspend()

    @property
    def verifier(self) -> Verifier:
        """The verifier of requests that name none."""
        return self._verification.default

    def replace_verifier(self, verifier: Verifier) -> None:
        """Use another implementation of the same verifier from the next round on."""
        self._verification.replace_default(verifier)

    @torch.inference_mode()
    def suspend(self) -> None:
        """Free the slots and the KV cache of all running requests. The next round prefills them again."""
        for slot in self._scheduler.suspend():
            self._release(slot)

    def idle_slot(self) -> int:
        """Suspend all requests, and return a slot that none of them holds until the next round."""
        self.suspend()
        return self._scheduler.free_slot

    def block(self, reason: str) -> None:
        """Make `step` raise an error with this reason; "" ends that. Requests can be queued in the meantime."""
        self._blocked = reason

    def step(self) -> tuple[SequenceState, ...]:
        """Run one round, after that of another thread.

        Returns:
            The sequences that took part. Those that are done have a `finish_reason`.

        Raises:
            NotEnoughMemory: the device ran out of memory. The message says what to change.
        """
        self.turns.take()
        try:
            return self._step()
        finally:
            self.turns.give()

    def _step(self) -> tuple[SequenceState, ...]:
        if self._blocked:
            raise OutriderError(self._blocked)
        if self.followers:
            self.followers.step()
        self._open = None
        self._committing = False
        timer = RoundTimer(self._stopwatch)
        try:
            with self._inference_mode:
                self._admit()
                batch = self._open = self._next_batch()
                if batch.seqs:
                    seconds = self._run_round(batch, self._planner, timer)
                    self._scheduler.record_round(batch, seconds.total)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error
        return (*self._refused, *batch.seqs)

    def _run_round(self, batch: Batch, planner: Planner, timer: RoundTimer) -> RoundSeconds:
        """Plan, propose, score, verify and commit. Returns the seconds of the parts."""
        batch = self._fit_memory(planner.plan(batch, self._accounting.proposed))
        draft = planner.trim(batch, self._propose(batch, timer))
        constrained = apply_constraints(batch, draft, self._target.vocab)
        round = self._verify(batch, constrained, timer)
        if round.draft.size and any(round.failed):
            # A draft token may be the cause, and plain decoding does not score it. Run the round without drafts.
            empty = tree.empty(len(batch.seqs), self._target.device)
            without = batch.with_budget(DraftBudget((0,) * len(batch.seqs)))
            constrained = apply_constraints(without, empty, self._target.vocab)
            round = self._verify(batch, constrained, timer)
        timer.verified()
        self._commit(round)
        seconds = timer.committed()
        if self.on_times:
            self.on_times(batch.seqs, timer.times(sum(round.draft.width)))
        if self.ranks:
            seconds = self._agree(self.ranks, round, seconds)
        self._accounting.add(constrained, round, seconds, experts=self._touched_experts())
        return seconds

    def _propose(self, batch: Batch, timer: RoundTimer) -> Draft:
        draft = timer.draft(self._proposer.propose, batch)
        check_budget(batch, draft)
        if not draft.chain and not self.verifier.trees:
            raise OutriderError(
                f"verifier {self.verifier.name} verifies chains only; use walk, coupled, siblings or traversal"
            )
        return draft

    def _verify(self, batch: Batch, constrained: ConstrainedDraft, timer: RoundTimer) -> Round:
        scores = timer.score(self._target.score, batch, constrained.draft)
        return self._verification.verify(batch, constrained, scores)

    def _commit(self, round: Round) -> None:
        self._committing = True
        self._target.cache.commit(round)
        self._proposer.commit(round)
        add_logprobs(round, self.sampling)
        if self.on_round:
            self.on_round(round)
        for seq in self._scheduler.commit(round):
            self._release(seq.slot)

    @staticmethod
    def _agree(ranks: Ranks, round: Round, seconds: RoundSeconds) -> RoundSeconds:
        """Return the seconds that all ranks use, because decisions depend on them."""
        draft, target, total = ranks.agree(round.emitted, (seconds.draft, seconds.target, seconds.total))
        return RoundSeconds(draft, target, total - draft - target)

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> NotEnoughMemory:
        return out_of_memory(error, slots=self._target.slots, context=self._target.context)

    @torch.inference_mode()
    def recover(self, error: Exception) -> tuple[SequenceState, ...]:
        """Continue after `step` raised `error`. Only the sequence that causes the error ends with it.

        Each sequence runs the round again, alone and without draft tokens. A sequence that raises again ends with that
        error. If the round had begun to commit, all its sequences end with `error`.

        Returns:
            The sequences that took part, as `step` does.

        Raises:
            Exception: `error`, if no round had begun, or if other ranks run the same rounds,
                because this rank does not know whether they failed.
        """
        if self.ranks:
            raise error
        batch = self._open
        committing = self._committing
        self._open = None
        if batch is None:
            raise error
        for b, seq in enumerate(batch.seqs):
            if committing:
                self._end(seq, error)
                continue
            try:
                single = Batch(seqs=(seq,), start=(batch.start[b],), feed=(batch.feed[b],), budget=DraftBudget((0,)))
                self._run_round(single, FixedPlanner(0), RoundTimer(self._stopwatch))
            except torch.OutOfMemoryError as error_alone:
                self._end(seq, self._out_of_memory(error_alone))
            except Exception as error_alone:
                self._end(seq, error_alone)
        return (*self._refused, *batch.seqs)

    def _touched_experts(self) -> float:
        """Return the distinct experts of a layer that the target's last pass used; 0: they are not counted."""
        return (self._expert_counter and self._expert_counter.touched_experts()) or 0.0

    def _end(self, seq: SequenceState, error: Exception) -> None:
        self._scheduler.abort(seq.request.id)
        seq.finish_reason = FinishReason.ERROR
        seq.error = f"the engine failed: {error}"
        self._release(seq.slot)

    def _admit(self) -> None:
        self._refused = []
        for seq in self._scheduler.admit(self._target.cache):
            if seq.finish_reason:
                self._refused.append(seq)
            else:
                # All sequences are admitted again after an update of the weights.
                self._record_version(seq)
                # After a preemption, the proposer receives all tokens so far as the prompt.
                self._proposer.admit(seq.slot, replace(seq.request, prompt_token_ids=tuple(seq.token_ids)))

    def _next_batch(self) -> Batch:
        """Return the batch of this round. Preempt sequences until the cache of the others fits."""
        while True:
            batch = self._scheduler.next()
            if self._target.cache.fits(_feed_ends(batch)):
                return batch
            self._release(self._scheduler.preempt())

    def _fit_memory(self, batch: Batch) -> Batch:
        """Drop draft tokens that do not fit into the cache. Speculation never preempts a request."""
        more = list(batch.draft_budget)
        for b, seq in enumerate(batch.seqs):
            if seq.matcher:
                more[b] = batch.budget.most(b)
        if not any(more):  # the feeds fit, or sequences would have been preempted
            return batch
        ends = _feed_ends(batch)
        wanted = dict(zip(ends, map(add, ends.values(), more), strict=True))
        fitting = prompts_that_fit(self._target.cache, ends, wanted)
        if len(fitting) == len(ends):
            return batch
        return batch.with_budget(batch.budget.only([seq.slot in fitting for seq in batch.seqs]))

    def _record_version(self, seq: SequenceState) -> None:
        """Note the version of the weights that sample the next tokens of a sequence."""
        versions = seq.weight_versions
        first = seq.num_output_tokens
        if versions and versions[-1][0] == first:  # no token is from that version
            versions.pop()
        if not versions or versions[-1][1] != self._weight_version:
            versions.append((first, self._weight_version))

    def _release(self, slot: int) -> None:
        self._target.cache.release(slot)
        self._proposer.release(slot)


def _feed_ends(batch: Batch) -> dict[int, int]:
    """Return the cached length after the feed, by slot."""
    return dict(zip([seq.slot for seq in batch.seqs], batch.ends, strict=True))
