"""The variants that a benchmark compares: plain and speculative decoding with the same loaded weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Protocol

from outrider.core.planner import FixedPlanner, Planner
from outrider.core.proposer import NoProposer, Proposer
from outrider.core.stats import Stats, StatsAccumulator
from outrider.core.types import Batch, Draft, SequenceState
from outrider.drafting.propose.renew import without_outputs
from outrider.engine.build import assemble
from outrider.lab.common.clock import DecodeSpeed
from outrider.lab.common.jobs import Job
from outrider.lab.common.timeline import Timeline, run_jobs
from outrider.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a variant over one batch of prompts."""

    speed: DecodeSpeed
    inter_token_latencies: tuple[float, ...]  # seconds between tokens
    stats: Stats | None = None  # passes of the whole run; rounds and seconds of decoding only. None: a peer


class Variant(Protocol):
    """One way to complete prompts."""

    name: str

    def forget_outputs(self) -> None:
        """Forget all outputs, so that a prompt that is measured again is new."""

    def run(self, jobs: Sequence[Job]) -> Trial:
        """Complete the prompts in one batch."""


class SwitchPlanner:
    """A planner whose draft length can be changed between runs.

    One process with one copy of the weights can so measure plain and speculative decoding.
    """

    def __init__(self) -> None:
        self.k: int | str = 0
        self.auto: Planner | None = None  # the planner for k auto

    def plan(self, batch: Batch, stats: Stats | StatsAccumulator) -> Batch:
        if isinstance(self.k, str):
            assert self.auto is not None
            return self.auto.plan(batch, stats)
        return FixedPlanner(self.k).plan(batch, stats)

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        return self.auto.trim(batch, draft) if isinstance(self.k, str) and self.auto else draft


class OutriderRunner:
    """Outrider's engine with k draft tokens per round. k = 0 is plain decoding.

    All runners of an `LLM` share its models. Each has a proposer of its own, so that none drafts from the outputs of
    another one.
    """

    def __init__(self, name: str, llm: LLM, planner: SwitchPlanner, *, k: int | str) -> None:
        self.name = name
        self._base = llm
        self._planner = planner
        self._k = k
        self.forget_outputs()

    def forget_outputs(self) -> None:
        """Begin again with a proposer that knows no outputs. The planner of k auto keeps what it has learned."""
        parts = self._base.parts
        if self._k == 0:
            proposer: Proposer = NoProposer(parts.setup)
        else:
            proposer = without_outputs(parts.proposer, parts.proposer_spec, parts.setup)
        engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=self._planner)
        self._llm = LLM.from_parts(replace(parts, engine=engine, proposer=proposer))

    def run(self, jobs: Sequence[Job]) -> Trial:
        self._planner.k = self._k
        timeline = run_jobs(self._llm, jobs)
        counts = [_counts(seq, timeline) for seq in timeline.seqs]
        stats = timeline.with_times(reduce(add, counts))
        return Trial(speed=timeline.speed(), inter_token_latencies=timeline.token_gaps(), stats=stats)


def _counts(seq: SequenceState, timeline: Timeline) -> Stats:
    return Stats.of_passes(
        seq.rounds,
        drafted=seq.num_draft_tokens,
        prompt=len(seq.request.prompt_token_ids),
        exact=timeline.exact,
        bound=timeline.bound,
    )
