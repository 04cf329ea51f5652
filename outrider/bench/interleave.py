"""Everybody over every prompt, in turns, so that what drifts in a machine drifts for all."""

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

_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that run together."""

    category: str
    jobs: tuple[Job, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Who runs over what at one place of the sweep."""

    condition: Condition
    variants: tuple[Variant, ...]
    repeats: tuple[PromptBatch, ...]


def make_batches(llm: LLM, prompts: Sequence[Prompt], settings: Settings, place: Condition) -> tuple[PromptBatch, ...]:
    """Batches within each category; its prompts are repeated until they fill the last one.

    Raises:
        OutriderError: a prompt does not fit.
    """
    texts = [_tokens(llm, prompt) for prompt in prompts]
    if place.context is not None:
        texts = _lengthen(texts, place.context - settings.max_tokens)
    for prompt, text in zip(prompts, texts, strict=True):
        _check_room(prompt, len(text), settings.max_tokens, llm.parts.context)
    heats, number = [], 0
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        group = [text for prompt, text in zip(prompts, texts, strict=True) if prompt.category == category]
        padded = [*group, *islice(cycle(group), -len(group) % place.batch)]
        for start in range(0, len(padded), place.batch):
            some = padded[start : start + place.batch]
            jobs = tuple(_job(text, settings, place, number + i) for i, text in enumerate(some))
            heats.append(PromptBatch(category=category, jobs=jobs))
            number += len(jobs)
    return tuple(heats)


def interleave(stages: Sequence[Workload], rounds: int, console: Console) -> dict[Condition, list[Sample]]:
    """Run all, round by round; who begins changes from heat to heat."""
    for stage in stages:
        for contestant in stage.variants:
            contestant.run([_short(job) for job in stage.repeats[0].jobs])  # to warm up
    samples: dict[Condition, list[Sample]] = {stage.condition: [] for stage in stages}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rounds * sum(len(stage.repeats) * len(stage.variants) for stage in stages))
        for round in range(rounds):
            for stage in stages:
                bar.update(task, description=f"round {round + 1} of {rounds}  {stage.condition}")
                for sample in _run_once(stage, round):
                    samples[stage.condition].append(sample)
                    bar.advance(task)
    return samples


def _run_once(stage: Workload, round: int) -> Iterator[Sample]:
    for h, heat in enumerate(stage.repeats):
        for contestant in stage.variants[:: 1 if (round + h) % 2 == 0 else -1]:
            trial = contestant.run([_seeded(job, round) for job in heat.jobs])
            yield Sample(category=heat.category, name=contestant.name, repeat=round, trial=trial)


def _tokens(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    return llm.encode_chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")


def _lengthen(texts: Sequence[tuple[int, ...]], size: int) -> list[tuple[int, ...]]:
    """Each text with the others in front of it, as often as it takes, cut to its last `size` tokens."""
    repeats = 1 + size // sum(map(len, texts))
    turned = ([*texts[i + 1 :], *texts[: i + 1]] for i in range(len(texts)))
    return [tuple(chain.from_iterable(order * repeats))[-size:] for order in turned]


def _check_room(prompt: Prompt, length: int, max_tokens: int, context: int) -> None:
    if length + max_tokens > context:
        raise OutriderError(
            f"prompt {prompt.id} is {length} tokens long, and with max_tokens {max_tokens} the context of {context} is"
            " too small; leave it out, lower max_tokens or raise context"
        )


def _job(tokens: tuple[int, ...], settings: Settings, place: Condition, number: int) -> Job:
    seed = derive_seed(settings.seed, number)
    params = SamplingParams(temperature=place.temperature, max_tokens=settings.max_tokens, seed=seed)
    return Job(prompt=tokens, params=params)


def _short(job: Job) -> Job:
    limit = min(_WARM_TOKENS, job.params.max_tokens or _WARM_TOKENS)
    return replace(job, params=replace(job.params, max_tokens=limit))


def _seeded(job: Job, round: int) -> Job:
    return replace(job, params=replace(job.params, seed=derive_seed(job.params.seed or 0, round)))
