"""Runs all variants over every prompt batch in turns, so that drift of the machine affects all of them equally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.lab.bench.report import Sample
from outrider.lab.bench.variants import Variant
from outrider.lab.common.jobs import Condition, PromptBatch
from outrider.lab.common.progress import count_run
from outrider.runtime.progress import stage

_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The variants and the prompt batches of one condition."""

    condition: Condition
    variants: tuple[Variant, ...]
    batches: tuple[PromptBatch, ...]


def interleave(workloads: Sequence[Workload], repeats: int) -> dict[Condition, list[Sample]]:
    """Run all workloads `repeats` times. The order of the variants alternates from batch to batch.

    No repeat knows the outputs of another one. Otherwise a proposer with a memory of outputs would draft copies.
    """
    for workload in workloads:
        for variant in workload.variants:
            variant.run([job.shortened(_WARMUP_TOKENS) for job in workload.batches[0].jobs])  # to warm up
    samples: dict[Condition, list[Sample]] = {workload.condition: [] for workload in workloads}
    total = repeats * sum(len(workload.batches) * len(workload.variants) for workload in workloads)
    with stage("", total) as runs:
        for repeat in range(repeats):
            for workload in workloads:
                runs.describe(f"repeat {repeat + 1} of {repeats}, {workload.condition}")
                for sample in _run_once(workload, repeat):
                    samples[workload.condition].append(sample)
                    count_run(runs, f"{sample.category}, {sample.name}", sample.trial.speed.rate or 0.0)
    return samples


def _run_once(workload: Workload, repeat: int) -> Iterator[Sample]:
    for variant in workload.variants:
        variant.forget_outputs()
    for i, batch in enumerate(workload.batches):
        for variant in workload.variants[:: 1 if (repeat + i) % 2 == 0 else -1]:
            trial = variant.run([job.with_seed(repeat) for job in batch.jobs])
            yield Sample(category=batch.category, name=variant.name, repeat=repeat, trial=trial)
