"""Runs variants over batches of prompts in turns, so that a drift of the machine affects all of them equally."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol

from outrider.core.planner import Planner
from outrider.core.proposer import NoProposer
from outrider.drafting.propose.renew import without_outputs
from outrider.engine.build import assemble
from outrider.lab.common.jobs import Condition, PromptBatch
from outrider.lab.common.trial import WARMUP_TOKENS, GroupKey, Trial, Variant, run
from outrider.llm import LLM
from outrider.runtime.progress import Stage, stage

_LINE_SECONDS = 5.0  # between two lines about runs with a time limit, which are many and short


class Store(Protocol):
    """Keeps the runs of a measurement that is not finished."""

    groups: dict[GroupKey, Sequence[Trial]]

    def add(self, key: GroupKey, trials: Sequence[Trial]) -> None:
        """Keep the runs of a group."""


class Memory:
    """A store in memory."""

    def __init__(self) -> None:
        self.groups: dict[GroupKey, Sequence[Trial]] = {}

    def add(self, key: GroupKey, trials: Sequence[Trial]) -> None:
        """Keep the runs of a group."""
        self.groups[key] = trials


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What runs in turns: in each repeat, all variants on each batch of prompts.

    No repeat knows the outputs of another one, and no variant those of another one. Otherwise a proposer with a memory
    of outputs would draft copies.
    """

    batches: Mapping[Condition, Sequence[PromptBatch]]
    variants: Callable[[Condition], Sequence[Variant]]
    engine_for: Callable[[Variant], LLM]  # makes an engine whose proposer knows no outputs
    repeats: int
    store: Store = field(default_factory=Memory)  # runs in it are not repeated
    max_seconds: float = math.inf  # the conditions share them; the first batch of each runs in any case

    def run(self) -> Iterator[tuple[Condition, Sequence[Trial]]]:
        """Run everything, and yield the runs by batch of prompts.

        The order of the variants alternates from batch to batch.
        """
        used = sum(trial.seconds for group in self.store.groups.values() for trial in group)
        end = perf_counter() + self.max_seconds - used
        total = sum(len(group) * len(self.variants(condition)) for condition, group in self.batches.items())
        with stage("", self.repeats * total if self._counts_runs else max(end - perf_counter(), 0.0)) as runs:
            for repeat in range(self.repeats):
                for i, condition in enumerate(self.batches):
                    round_number = f"round {repeat + 1} of {self.repeats}, " if self.repeats > 1 else ""
                    runs.describe(f"{round_number}{condition}")
                    now = perf_counter()
                    if repeat and now >= end:
                        return
                    deadline = now + max(end - now, 0.0) / (len(self.batches) - i)
                    for group in self._run_once(condition, repeat, deadline, partial(self._count, runs, end)):
                        yield condition, group

    @property
    def _counts_runs(self) -> bool:
        """Whether progress is a number of runs; with a time limit it is in seconds."""
        return math.isinf(self.max_seconds)

    def _count(self, runs: Stage, end: float, trial: Trial) -> None:
        """Count a run of a stage, with what was measured."""
        total = runs.total or 0.0
        done = runs.done + 1 if self._counts_runs else max(total - max(end - perf_counter(), 0.0), runs.done)
        line = f"{done:.0f} of {total:.0f}{'' if self._counts_runs else ' s'}: {runs.title}, {trial.variant.name}:"
        line += f" {trial.rate:.0f} tokens/s with prompts"
        shown = self._counts_runs or done // _LINE_SECONDS > runs.done // _LINE_SECONDS
        runs.advance(done - runs.done, line if shown else "")

    def _run_once(
        self, condition: Condition, repeat: int, deadline: float, count: Callable[[Trial], None]
    ) -> Iterator[Sequence[Trial]]:
        """Run all variants on each batch of prompts, and yield the runs of each batch.

        A batch begins only if it ends before the deadline, assuming that it takes as long as the last one.
        """
        pairs: list[tuple[Variant, LLM]] = []
        took = 0.0  # seconds of the last batch
        batches = self.batches[condition]
        for i, batch in enumerate(batches):
            key = GroupKey(repeat, condition, batch.number)
            if key in self.store.groups:
                for trial in self.store.groups[key]:
                    count(trial)
                yield self.store.groups[key]
                continue
            if not pairs:
                pairs = [(variant, self.engine_for(variant)) for variant in self.variants(condition)]
                for variant, llm in pairs:
                    run(llm, variant, warmup(batches[0]))
            began = perf_counter()
            if (repeat or i) and began + took >= deadline:
                return
            seeded = replace(batch, jobs=tuple(job.with_seed(repeat) for job in batch.jobs))
            trials = []
            for variant, llm in pairs[:: 1 if (repeat + batch.number) % 2 == 0 else -1]:
                trials.append(run(llm, variant, seeded, repeat))
                count(trials[-1])
            took = perf_counter() - began
            self.store.add(key, trials)
            yield self.store.groups[key]


def warmup(batch: PromptBatch) -> PromptBatch:
    """Return a batch for the warm-up. Its texts are reversed, so that no proposer has seen a measured one."""
    jobs = []
    for job in batch.jobs:
        short = job.shortened(WARMUP_TOKENS)
        params = replace(short.params, ignore_eos=True)
        source = short.source[::-1] if isinstance(short.source, tuple) else short.source
        jobs.append(replace(short, prompt=short.prompt[::-1], source=source, params=params))
    return replace(batch, jobs=tuple(jobs))


def with_planner(base: LLM, planner: Planner, *, plain: bool = False) -> LLM:
    """Return an engine with the models of another one, a planner of its own, and a proposer that knows no outputs.

    Args:
        base: the engine. Only one of the two may have running sequences.
        plain: whether it has no proposer.
    """
    parts = base.parts
    spec = parts.proposer_spec
    proposer = NoProposer(parts.setup) if plain else without_outputs(parts.proposer, spec, parts.setup)
    engine = assemble(parts.loaded, proposer=proposer, verifier=parts.verifier, planner=planner)
    return LLM.from_parts(replace(parts, engine=engine, proposer=proposer, planner=planner))
