"""Runs all variants over every prompt batch in turns, so that drift of the machine affects all of them equally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.contestants import Job, Variant
from outrider.bench.report import Sample
from outrider.bench.settings import Settings
from outrider.bench.sweep import Condition
from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.prompts import Prompt

_WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that run together."""

    category: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The variants and the prompt batches of one condition."""

    condition: Condition
    variants: tuple[Variant, ...]
    batches: tuple[PromptBatch, ...]


def make_batches(
    llm: LLM, prompts: Sequence[Prompt], settings: Settings, condition: Condition
) -> tuple[PromptBatch, ...]:
    """Return batches of prompts of one category each. Prompts of the category fill up its last batch.

    Raises:
        OutriderError: a prompt does not fit into the context.
    """
    token_lists = [_tokens(llm, prompt) for prompt in prompts]
    if condition.context is not None:
        token_lists = _lengthen(token_lists, condition.context - settings.max_tokens)
    for prompt, tokens in zip(prompts, token_lists, strict=True):
        _check_length(prompt, len(tokens), settings.max_tokens, llm.parts.context)
    batches = []
    num_jobs = 0
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        group = [tokens for prompt, tokens in zip(prompts, token_lists, strict=True) if prompt.category == category]
        padded = [*group, *islice(cycle(group), -len(group) % condition.batch)]
        for start in range(0, len(padded), condition.batch):
            chunk = padded[start : start + condition.batch]
            jobs = tuple(_job(tokens, settings, condition, num_jobs + i) for i, tokens in enumerate(chunk))
            batches.append(PromptBatch(category=category, jobs=jobs))
            num_jobs += len(jobs)
    return tuple(batches)


def interleave(workloads: Sequence[Workload], rounds: int, console: Console) -> dict[Condition, list[Sample]]:
    """Run all workloads `rounds` times. The order of the variants alternates from batch to batch."""
    for workload in workloads:
        for variant in workload.variants:
            variant.run([_shortened(job) for job in workload.batches[0].jobs])  # to warm up
    samples: dict[Condition, list[Sample]] = {workload.condition: [] for workload in workloads}
    total = rounds * sum(len(workload.batches) * len(workload.variants) for workload in workloads)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        for round in range(rounds):
            for workload in workloads:
                bar.update(task, description=f"round {round + 1} of {rounds}  {workload.condition}")
                for sample in _run_once(workload, round):
                    samples[workload.condition].append(sample)
                    bar.advance(task)
    return samples


def _run_once(workload: Workload, round: int) -> Iterator[Sample]:
    for i, batch in enumerate(workload.batches):
        for variant in workload.variants[:: 1 if (round + i) % 2 == 0 else -1]:
            trial = variant.run([_seeded(job, round) for job in batch.jobs])
            yield Sample(category=batch.category, name=variant.name, repeat=round, trial=trial)


def _tokens(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    return llm.encode_chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")


def _lengthen(token_lists: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Return prompts of `size` tokens: each ends with the original one, and the other prompts precede it.

    The prompts are repeated as often as needed. Tokens before the last `size` are cut off.
    """
    repeats = 1 + size // sum(map(len, token_lists))
    lengthened = []
    for i in range(len(token_lists)):
        rotated = [*token_lists[i + 1 :], *token_lists[: i + 1]]
        lengthened.append(tuple(chain.from_iterable(rotated * repeats))[-size:])
    return lengthened


def _check_length(prompt: Prompt, length: int, max_tokens: int, context: int) -> None:
    if length + max_tokens > context:
        raise OutriderError(
            f"prompt {prompt.id} has {length} tokens, and with max_tokens {max_tokens} the context of {context} tokens"
            " is too small; remove the prompt, lower max_tokens or raise context"
        )


def _job(tokens: tuple[int, ...], settings: Settings, condition: Condition, number: int) -> Job:
    seed = derive_seed(settings.seed, number)
    params = SamplingParams(temperature=condition.temperature, max_tokens=settings.max_tokens, seed=seed)
    return Job(prompt=tokens, params=params)


def _shortened(job: Job) -> Job:
    limit = min(_WARMUP_TOKENS, job.params.max_tokens or _WARMUP_TOKENS)
    return replace(job, params=replace(job.params, max_tokens=limit))


def _seeded(job: Job, round: int) -> Job:
    return replace(job, params=replace(job.params, seed=derive_seed(job.params.seed or 0, round)))
