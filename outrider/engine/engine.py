"""The engine. `Engine.step` runs one round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from outrider.core import tree
from outrider.core.cache import CacheUsage, prompts_that_fit
from outrider.core.planner import Planner
from outrider.core.proposer import Proposer, check_budget
from outrider.core.stats import Stats
from outrider.core.target import ExpertCounter, Target
from outrider.core.text import TextStream
from outrider.core.types import Batch, Draft, FinishReason, Request, Round, SequenceState
from outrider.engine.accounting import Accounting, RoundSeconds
from outrider.engine.constraints import MAX_FORCED, ConstrainedDraft, apply_constraints
from outrider.engine.logprobs import add_logprobs
from outrider.engine.readback import read_greedy, read_verdict
from outrider.engine.scheduler import Scheduler
from outrider.engine.stopwatch import Span, Stopwatch, find_stopwatch
from outrider.errors import NotEnoughMemory, OutriderError
from outrider.models.cache.memory import out_of_memory
from outrider.models.native.rules import fastest_verifier
from outrider.runtime.ranks import Ranks
from outrider.verify.rules import EXACT, Verifier
from outrider.verify.sampling import (
    BatchSampling,
    ProbsFunction,
    apply_sampling,
    apply_sampling_packed,
    target_probs,
)
from outrider.verify.verdict import select_by_name


class Followers(Protocol):
    """Repeats what an engine does in the other ranks of tensor parallelism."""

    def add(self, request: Request) -> None:
        """Queue the request there."""

    def abort(self, id: int) -> None:
        """Remove the request there."""

    def step(self) -> None:
        """Begin a round there."""


class RoundTimes(NamedTuple):
    """When the phases of a round ended, in seconds of `perf_counter`."""

    began: float
    drafted: float
    verified: float
    committed: float
    draft_tokens: int  # verified draft tokens of all sequences


class Engine:
    """Runs rounds of propose, score, verify and commit for the requests of a scheduler."""

    def __init__(
        self,
        *,
        target: Target,
        proposer: Proposer,
        verifier: Verifier,
        planner: Planner,
        scheduler: Scheduler,
        probs_function: ProbsFunction = target_probs,
        ranks: Ranks | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        """Connect the parts.

        `probs_function` computes target probabilities from logits. `ranks` are the processes that run the same rounds,
        each with a part of the target; None: this process has the whole target. `stopwatch` measures the rounds; None:
        that of the target's device.
        """
        self._target = target
        self._stopwatch = stopwatch or find_stopwatch(target.device)
        self._expert_counter = target if isinstance(target, ExpertCounter) else None
        self._proposer = proposer
        self._verifier = verifier
        self._planner = planner
        self._scheduler = scheduler
        self._probs_function = probs_function
        self._accounting = Accounting(
            alternatives=proposer.needs.alternatives, exact=verifier.exact, bound=verifier.bound
        )
        self.ranks = ranks
        self.followers: Followers | None = None  # ranks that this engine tells what to do
        self.on_round: Callable[[Round], None] | None = None  # called after each round, to show what was drafted
        self.on_times: Callable[[Sequence[SequenceState], RoundTimes], None] | None = None  # called after each round
        self._verifiers = {verifier.name: verifier}  # the default verifier and those of requests, by name
        self._sampling = BatchSampling(target.vocab, target.device)
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
        seq = self._scheduler.add(request, stream)
        if self.followers:
            self.followers.add(request)
        return seq

    @torch.inference_mode()
    def abort(self, id: int) -> None:
        """Remove a waiting or running request."""
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
        return self._scheduler.busy()

    @property
    def weight_version(self) -> int:
        """The version of the target's weights; 0 before the first update."""
        return self._weight_version

    @torch.no_grad()
    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load new weights into the target, between two rounds.

        Unfinished requests go on with the new weights. Their KV cache is computed again from their tokens so far.
        `SequenceState.weight_versions` tells which tokens come from which version.

        Raises:
            OutriderError: a weight does not fit. The old ones stay in use.
        """
        self._target.update_weights(weights, version)
        self._weight_version = version
        self.suspend()

    def replace_verifier(self, verifier: Verifier) -> None:
        """Use another implementation of the verifier, which has its name, from the next round on."""
        assert verifier.name == self._verifier.name
        self._verifier = verifier
        self._verifiers[verifier.name] = verifier

    @torch.inference_mode()
    def suspend(self) -> None:
        """Free the slots and the KV cache of all running requests. The next round prefills them again."""
        for slot in self._scheduler.suspend():
            self._release(slot)

    def block(self, reason: str) -> None:
        """Make `step` raise an error with this reason; "" ends that. Requests can be queued in the meantime."""
        self._blocked = reason

    @torch.inference_mode()
    def step(self) -> tuple[SequenceState, ...]:
        """Run one round.

        Returns:
            The sequences that took part. Those that are done have a `finish_reason`.

        Raises:
            NotEnoughMemory: the device ran out of memory. The message says what to change.
        """
        if self._blocked:
            raise OutriderError(self._blocked)
        try:
            return self._step()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> NotEnoughMemory:
        return out_of_memory(error, slots=self._target.slots, context=self._target.context)

    def _step(self) -> tuple[SequenceState, ...]:
        """Do what `step` does."""
        if self.followers:
            self.followers.step()
        watch = self._stopwatch
        began = watch.now()
        self._open = None
        self._committing = False
        self._admit()
        batch = self._open = self._next_batch()
        if not batch.seqs:
            return tuple(self._refused)
        batch = self._fit_memory(self._planner.plan(batch, self._accounting.proposed))
        planned = watch.now()
        draft, drafting = self._propose(batch)
        self._check(batch, draft)
        draft = self._planner.trim(batch, draft)
        constrained = apply_constraints(batch, draft, self._target.vocab)
        round, scoring = self._verify(batch, constrained)
        target_seconds = watch.seconds(scoring)
        if round.draft.size and any(round.failed):
            # A draft token may be the cause, which plain decoding would not score. Run the round without drafts.
            empty = tree.empty(len(batch.seqs), self._target.device)
            constrained = apply_constraints(replace(batch, forced_budget=()), empty, self._target.vocab)
            round, scoring = self._verify(batch, constrained)
            target_seconds += watch.seconds(scoring)
        draft_seconds = watch.seconds(drafting)
        verified = watch.now()
        self._commit(round)
        committed = watch.now()
        if self.on_times:
            drafted = min(planned + draft_seconds, verified)
            self.on_times(batch.seqs, RoundTimes(began, drafted, verified, committed, sum(round.draft.width)))
        round_seconds = committed - began
        if self.ranks:  # decisions depend on the times, so all ranks use the same ones
            measured = (draft_seconds, target_seconds, round_seconds)
            draft_seconds, target_seconds, round_seconds = self.ranks.agree(round.emitted, measured)
        host_seconds = round_seconds - draft_seconds - target_seconds
        seconds = RoundSeconds(draft=draft_seconds, target=target_seconds, host=host_seconds)
        self._accounting.add(constrained, round, seconds, experts=self._touched_experts())
        self._scheduler.record_round(batch, round_seconds)
        return (*self._refused, *batch.seqs)

    @torch.inference_mode()
    def recover(self, error: Exception) -> tuple[SequenceState, ...]:
        """Continue after `step` raised `error`. Only the sequence that causes the error ends with it.

        Each sequence runs the round again, alone and without draft tokens. A sequence that raises again ends with that
        error. If the round had begun to commit, all its sequences end with `error`.

        Returns:
            The sequences that took part, as `step` does.

        Raises:
            Exception: `error`, if no round had begun, or if other ranks run the same rounds: whether they have failed,
                too, is unknown.
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
                self._step_alone(batch, b)
            except torch.OutOfMemoryError as error_alone:
                self._end(seq, self._out_of_memory(error_alone))
            except Exception as error_alone:
                self._end(seq, error_alone)
        return (*self._refused, *batch.seqs)

    def _step_alone(self, batch: Batch, b: int) -> None:
        """Run sequence b of a batch alone and without draft tokens."""
        single = Batch(seqs=batch.seqs[b : b + 1], start=(batch.start[b],), feed=(batch.feed[b],), draft_budget=(0,))
        watch = self._stopwatch
        began = watch.now()
        draft, drafting = self._propose(single)
        constrained = apply_constraints(single, draft, self._target.vocab)
        round, scoring = self._verify(single, constrained)
        self._commit(round)
        draft_seconds = watch.seconds(drafting)
        target_seconds = watch.seconds(scoring)
        host_seconds = watch.now() - began - draft_seconds - target_seconds
        seconds = RoundSeconds(draft=draft_seconds, target=target_seconds, host=host_seconds)
        self._accounting.add(constrained, round, seconds, experts=self._touched_experts())

    def _touched_experts(self) -> float:
        """Return the distinct experts of a layer that the target's last pass used; 0: they are not counted."""
        return (self._expert_counter and self._expert_counter.touched_experts()) or 0.0

    def _end(self, seq: SequenceState, error: Exception) -> None:
        """End a sequence with an error."""
        self._scheduler.abort(seq.request.id)
        seq.finish_reason = FinishReason.ERROR
        seq.error = f"the engine failed: {error}"
        self._release(seq.slot)

    def _admit(self) -> None:
        """Give free slots to waiting requests."""
        self._refused = []
        for seq in self._scheduler.admit(self._target.cache):
            if seq.finish_reason:
                self._refused.append(seq)
            else:
                # After a preemption, the proposer receives all tokens so far as the prompt.
                self._proposer.admit(seq.slot, replace(seq.request, prompt_token_ids=tuple(seq.token_ids)))

    def _next_batch(self) -> Batch:
        """Return the batch of this round. Preempt sequences until the KV cache of the others fits."""
        while True:
            batch = self._scheduler.next()
            if self._target.cache.fits(_feed_ends(batch)):
                return batch
            self._release(self._scheduler.preempt())

    def _fit_memory(self, batch: Batch) -> Batch:
        """Drop draft tokens that do not fit into the KV cache. Speculation never preempts a request."""
        ends = _feed_ends(batch)
        forced = batch.forced_budget or (0,) * len(batch.seqs)
        wanted = {}
        for seq, forced_budget, budget in zip(batch.seqs, forced, batch.draft_budget, strict=True):
            drafted = min(forced_budget, budget + MAX_FORCED) if seq.matcher else budget
            wanted[seq.slot] = ends[seq.slot] + drafted
        fitting = prompts_that_fit(self._target.cache, ends, wanted)
        if len(fitting) == len(ends):
            return batch
        fits = [seq.slot in fitting for seq in batch.seqs]
        return replace(
            batch,
            draft_budget=tuple(count if fit else 0 for fit, count in zip(fits, batch.draft_budget, strict=True)),
            forced_budget=tuple(count if fit else 0 for fit, count in zip(fits, forced, strict=True)),
        )

    def _propose(self, batch: Batch) -> tuple[Draft, Span]:
        """Return the draft, and the span of drafting."""
        begin = self._stopwatch.mark()
        draft = self._proposer.propose(batch)
        return draft, Span(begin, self._stopwatch.mark())

    def _verify(self, batch: Batch, constrained: ConstrainedDraft) -> tuple[Round, Span]:
        """Score the draft, verify it and read the result. Also return the span of the target's pass."""
        draft = constrained.draft
        masks = constrained.masks
        begin = self._stopwatch.mark()
        scores = self._target.score(batch, draft)
        scoring = Span(begin, self._stopwatch.mark())
        sampling = self._sampling.of(batch.seqs)
        names = [seq.request.params.verifier or self._verifier.name for seq in batch.seqs]
        if sampling.plain_greedy and not any(self._verifier_of(name).relaxes_greedy for name in set(names)):
            return constrained.drop_failed(read_greedy(batch, draft, scores, masks)), scoring
        noise = self._sampling.noise(batch.seqs)
        packed = scores.packed
        if packed is None:
            logits = scores.logits if masks is None else masks.apply(scores.logits)
            p = apply_sampling(logits, sampling, draft, probs_function=self._probs_function)
            verdicts = {name: self._verifier_of(name).rule(draft, p, noise) for name in set(names)}
        else:
            packed = packed if masks is None else masks.apply_packed(packed)
            probs = apply_sampling_packed(packed, sampling, draft, probs_function=self._probs_function)
            verdicts = {name: self._verifier_of(name).verify(draft, probs, noise) for name in set(names)}
        return constrained.drop_failed(read_verdict(batch, draft, scores, select_by_name(verdicts, names))), scoring

    def _commit(self, round: Round) -> None:
        """Commit the accepted tokens to the cache, the proposer and the scheduler."""
        self._committing = True
        self._target.cache.commit(round)
        self._proposer.commit(round)
        add_logprobs(round)
        self._record_version(round)
        if self.on_round:
            self.on_round(round)
        for seq in self._scheduler.commit(round):
            self._release(seq.slot)

    def _record_version(self, round: Round) -> None:
        """Note the version of the weights in the sequences whose tokens come from another one than before."""
        version = self._weight_version
        for seq, emitted in zip(round.batch.seqs, round.emitted, strict=True):
            if emitted and (not seq.weight_versions or seq.weight_versions[-1][1] != version):
                seq.weight_versions.append((seq.num_output_tokens, version))

    def _verifier_of(self, name: str) -> Verifier:
        """Return the verifier with this name."""
        if name not in self._verifiers:
            self._verifiers[name] = fastest_verifier(EXACT[name], self._target.device)
        return self._verifiers[name]

    def _check(self, batch: Batch, draft: Draft) -> None:
        """Raise OutriderError if the draft exceeds its budget, or if the verifier does not support it."""
        check_budget(batch, draft)
        if not draft.chain and not self._verifier.trees:
            raise OutriderError(
                f"verifier {self._verifier.name} verifies chains only; use walk, coupled, siblings or traversal"
            )

    def _release(self, slot: int) -> None:
        self._target.cache.release(slot)
        self._proposer.release(slot)


def _feed_ends(batch: Batch) -> dict[int, int]:
    """Return the cached length after the feed, by slot."""
    columns = zip(batch.seqs, batch.start, batch.feed, strict=True)
    return {seq.slot: start + len(feed) for seq, start, feed in columns}
