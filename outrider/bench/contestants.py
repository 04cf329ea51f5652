"""The contestants: plain and speculative decoding with the same loaded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from time import perf_counter
from typing import Protocol

from outrider.core.params import SamplingParams
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, FinishReason, SequenceState
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.clock import DecodeSpeed, EmitEvent, decode_pace, opening, timed, token_gaps
from outrider.plan.planner import FixedPlanner, Planner


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to complete."""

    prompt: tuple[int, ...]  # token ids
    params: SamplingParams  # with a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One contestant's run over one batch of prompts."""

    pace: DecodeSpeed
    inter_token_latencies: tuple[float, ...]  # seconds between tokens
    stats: Stats | None = None  # passes of the whole run, rounds and seconds of decoding; None of a peer


class Variant(Protocol):
    """One way to complete prompts."""

    name: str

    def run(self, jobs: Sequence[Job]) -> Trial:
        """Complete them together."""


class SwitchPlanner:
    """As many guesses as it is set to, so that one process with one copy of the weights does plain and speculative."""

    def __init__(self) -> None:
        self.k: int | str = 0
        self.auto: Planner | None = None  # who decides where k is auto

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        if isinstance(self.k, str):
            assert self.auto is not None
            return self.auto.plan(batch, stats)
        return FixedPlanner(self.k).plan(batch, stats)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return self.auto.trim(batch, draft) if isinstance(self.k, str) and self.auto else draft


class OutriderRunner:
    """Outrider's engine with k guesses a round; 0 is plain decoding."""

    def __init__(self, name: str, llm: LLM, planner: SwitchPlanner, *, k: int | str) -> None:
        self.name = name
        self._llm, self._planner, self._k = llm, planner, k

    def run(self, jobs: Sequence[Job]) -> Trial:
        engine = self._llm.engine
        self._planner.k = self._k
        rows: dict[int, SequenceState | None] = {
            id: None for job in jobs for id in self._llm.submit(job.prompt, job.params)
        }
        marks = [EmitEvent(at=perf_counter(), emitted=(0,) * len(rows))]
        looks = [engine.stats]
        while engine.busy():
            for row in engine.step():
                rows[row.request.id] = row
            marks.append(
                EmitEvent(
                    at=perf_counter(), emitted=tuple(row.num_output_tokens if row else 0 for row in rows.values())
                )
            )
            looks.append(engine.stats)
        counts = [_counts(row, exact=engine.stats.exact) for row in rows.values() if row]
        stats = timed(reduce(add, counts), looks[opening(marks)], looks[-1])
        return Trial(pace=decode_pace(marks), inter_token_latencies=tuple(token_gaps(marks)), stats=stats)


def _counts(row: SequenceState, *, exact: bool) -> Stats:
    if row.finish_reason is FinishReason.ERROR:
        raise OutriderError(f"a prompt could not be completed: {row.error}; try another dtype")
    return Stats.of_passes(
        row.rounds, drafted=row.num_draft_tokens, prompt=len(row.request.prompt_token_ids), exact=exact
    )
