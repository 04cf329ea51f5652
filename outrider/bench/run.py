"""The benchmark from beginning to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider import machine
from outrider.bench.contest import Contestant, Job, Own, SwitchPlanner
from outrider.bench.memory import bytes_per_pass, read_bandwidth
from outrider.bench.prompts import BenchPrompt, by_category, read_prompts
from outrider.bench.report import DEFINITIONS, OVERALL, PLAIN, SPECULATIVE, Sample, report
from outrider.bench.settings import Settings
from outrider.build import default_proposer, embedded
from outrider.cost import decode_limit
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.noise import mix_int
from outrider.params import SamplingParams

_WARM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heat:
    """Prompts that run together."""

    category: str
    jobs: tuple[Job, ...]


def run_bench(settings: Settings, *, progress: Console) -> dict[str, Any]:
    """Measure plain and speculative decoding in turns.

    Args:
        settings: what to measure.
        progress: where to show how far it is.

    Returns:
        The document to report, fit for JSON.

    Raises:
        OutriderError: what was asked for cannot be measured; the message says why.
    """
    prompts = read_prompts(settings.prompts, limit=settings.limit)
    planner = SwitchPlanner(settings.k)
    with progress.status("loading models"):
        llm = LLM(
            settings.target,
            proposer=settings.proposer,
            k=settings.k,
            verifier=settings.verifier,
            dtype=settings.dtype,
            device=settings.device,
            threads=settings.threads,
            rows=settings.batch,
            context=settings.context,
            planner=planner,
        )
        heats = _heats(llm, prompts, settings)
        contestants = _contestants(llm, planner, settings)
    samples = list(_race(contestants, heats, settings.rounds, progress))
    with progress.status("measuring memory"):
        return _document(llm, settings, report(samples, k=settings.k))


def _contestants(llm: LLM, planner: SwitchPlanner, settings: Settings) -> list[Contestant]:
    own: list[Contestant] = [
        Own(PLAIN, llm, planner, speculate=False),
        Own(SPECULATIVE, llm, planner, speculate=True),
    ]
    if settings.peer is None:
        return own
    from outrider.bench.peer import load_peers

    return [*own, *load_peers(llm, _target(settings), _draft(settings))]


def _heats(llm: LLM, prompts: Sequence[BenchPrompt], settings: Settings) -> list[_Heat]:
    """Batches within each category; its prompts are repeated until they fill the last one."""
    heats, number = [], 0
    for category, group in by_category(prompts).items():
        missing = -len(group) % settings.batch
        padded = [*group, *(group[i % len(group)] for i in range(missing))]
        for start in range(0, len(padded), settings.batch):
            some = padded[start : start + settings.batch]
            jobs = tuple(_job(llm, prompt, settings, number + i) for i, prompt in enumerate(some))
            heats.append(_Heat(category=category, jobs=jobs))
            number += len(jobs)
    return heats


def _job(llm: LLM, prompt: BenchPrompt, settings: Settings, number: int) -> Job:
    tokens = llm.chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")
    if len(tokens) + settings.max_tokens > llm.house.context:
        raise OutriderError(
            f"prompt {prompt.id} is {len(tokens)} tokens long, and with max_tokens {settings.max_tokens} the context of"
            f" {llm.house.context} is too small; leave it out or lower max_tokens"
        )
    seed = mix_int(settings.seed, number)
    return Job(
        prompt=tokens,
        params=SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=seed),
    )


def _race(contestants: Sequence[Contestant], heats: Sequence[_Heat], rounds: int, console: Console) -> Iterator[Sample]:
    """Every contestant over every heat, round by round; who begins changes from heat to heat."""
    for contestant in contestants:
        contestant.run([_short(job) for job in heats[0].jobs])  # to warm up
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=rounds * len(heats) * len(contestants))
        for round in range(rounds):
            for h, heat in enumerate(heats):
                for contestant in contestants[:: 1 if (round + h) % 2 == 0 else -1]:
                    bar.update(task, description=f"round {round + 1}  {heat.category}")
                    trial = contestant.run([_seeded(job, round) for job in heat.jobs])
                    yield Sample(category=heat.category, name=contestant.name, round=round, trial=trial)
                    bar.advance(task)


def _short(job: Job) -> Job:
    limit = min(_WARM_TOKENS, job.params.max_tokens or _WARM_TOKENS)
    return replace(job, params=replace(job.params, max_tokens=limit))


def _seeded(job: Job, round: int) -> Job:
    return replace(job, params=replace(job.params, seed=mix_int(job.params.seed or 0, round)))


def _document(llm: LLM, settings: Settings, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    house = llm.house
    return {
        "benchmark": "outrider bench",
        "arguments": asdict(settings),
        "proposer": type(house.proposer).__name__,
        "verifier": house.verifier.name,
        "exact": house.verifier.exact,
        "dtype": str(house.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(house.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "memory": _memory(llm, settings, figures),
        "results": figures,
        "definitions": dict(DEFINITIONS),
    }


def _memory(llm: LLM, settings: Settings, figures: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How close plain decoding comes to reading its weights as fast as this machine can."""
    weights = bytes_per_pass(llm, _target(settings))
    bandwidth = read_bandwidth(llm.house.device)
    limit = decode_limit(weights, bandwidth)
    speed = figures[OVERALL][PLAIN]["tokens_per_s"]
    return {
        "weight_bytes_per_pass": weights,
        "read_bytes_per_s": bandwidth,
        "limit_passes_per_s": limit,
        "plain_share_of_limit": speed["median"] / settings.batch / limit if speed else None,
    }


def _target(settings: Settings) -> Path:
    return Path(settings.target or embedded("mini")).expanduser()


def _draft(settings: Settings) -> Path | None:
    head, _, folder = (settings.proposer or default_proposer(settings.target)).partition(":")
    return Path(folder).expanduser() if head == "draft" else None
