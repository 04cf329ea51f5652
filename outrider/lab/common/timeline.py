"""Runs jobs on an engine and records when their tokens were emitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.core.stats import Stats
from outrider.core.types import FinishReason, SequenceState
from outrider.engine.drive import drive
from outrider.errors import OutriderError
from outrider.lab.common.clock import DecodeSpeed, EmitEvent, decode_speed, first_decode_index, token_gaps, with_times
from outrider.lab.common.jobs import Job

if TYPE_CHECKING:
    from outrider.llm import LLM


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One run of an engine over some jobs."""

    seqs: tuple[SequenceState, ...]  # finished, in the order of the jobs
    events: tuple[EmitEvent, ...]  # the start, then the end of each round
    snapshots: tuple[Stats, ...]  # of the engine, at each event
    exact: bool  # whether the verifier is exact

    @cached_property
    def first_decode_index(self) -> int:
        """The index of the event after which there is decoding only."""
        return first_decode_index(self.events)

    @property
    def tokens(self) -> int:
        """Tokens that all sequences have emitted."""
        return sum(self.events[-1].emitted)

    @property
    def seconds(self) -> float:
        """Seconds from the start to the last token."""
        return self.events[-1].at - self.events[0].at

    @property
    def prefill_seconds(self) -> float:
        """Seconds from the start until every sequence has a token."""
        return self.events[self.first_decode_index].at - self.events[0].at

    @property
    def stats(self) -> Stats:
        """The passes of the whole run, and the rounds and seconds of decoding."""
        total = sum((self.passes(seq, seq.rounds) for seq in self.seqs), Stats())
        return with_times(total, self.snapshots[self.first_decode_index], self.snapshots[-1])

    def passes(self, seq: SequenceState, passes: Sequence[tuple[int, int, int]]) -> Stats:
        """Return the statistics of some passes of a sequence.

        Draft tokens are only known for all passes of a sequence together.
        """
        drafted = seq.num_draft_tokens if len(passes) == len(seq.rounds) else 0
        return Stats.of_passes(passes, drafted=drafted, prompt=len(seq.request.prompt_token_ids), exact=self.exact)

    def speed(self) -> DecodeSpeed:
        return decode_speed(self.events)

    def token_gaps(self) -> tuple[float, ...]:
        """Return the seconds between the tokens of a sequence, over all sequences."""
        return tuple(token_gaps(self.events))


def run_jobs(llm: LLM, jobs: Sequence[Job]) -> Timeline:
    """Complete the prompts of all jobs together, and return when their tokens came.

    Raises:
        OutriderError: a prompt does not fit the model, or could not be completed.
    """
    engine = llm.engine
    seqs: list[SequenceState] = []
    for job in jobs:
        requests = llm.request_maker.of_tokens(job.prompt, job.params, job.source, seed=job.seed)
        seqs += map(llm.add, requests)
    events = [EmitEvent(at=perf_counter(), emitted=(0,) * len(seqs))]
    snapshots = [engine.stats]
    for _ in drive(engine, seqs):
        now = perf_counter()
        events.append(EmitEvent(at=now, emitted=tuple(seq.num_output_tokens for seq in seqs)))
        snapshots.append(engine.stats)
    return Timeline(
        seqs=tuple(map(_finished, seqs)), events=tuple(events), snapshots=tuple(snapshots), exact=engine.stats.exact
    )


def _finished(seq: SequenceState) -> SequenceState:
    if seq.finish_reason is FinishReason.ERROR:
        raise OutriderError(f"a prompt could not be completed: {seq.error}")
    return seq
