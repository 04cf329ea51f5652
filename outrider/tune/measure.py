"""Everybody over every prompt, in turns, around one loaded target."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from time import perf_counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.contestants import Job
from outrider.bench.interleave import make_batches
from outrider.bench.memory import MemoryUse, measure_memory
from outrider.bench.settings import Settings as BenchSettings
from outrider.bench.sweep import Condition
from outrider.core.noise import derive_seed
from outrider.engine.build import assemble, auto_planner, make_proposer
from outrider.engine.verifiers import find_verifier
from outrider.llm import LLM
from outrider.measure.prompts import read_prompts
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.planner import FixedPlanner, Planner
from outrider.propose.base import Proposer
from outrider.propose.registry import DRAWN, Expression, parse
from outrider.tune.settings import Settings
from outrider.tune.trial import PromptBatch, Trial, Variant, run

_WARM_TOKENS = 8
_LEAST_BATCHES = 2  # batches of prompts that are measured whatever the time limit, so that there is an interval
# Those that know nothing of a finished text. Any other one is made anew before it meets the same prompt again, or it
# would remember the answer.
_FORGETFUL = DRAWN | {"draft-text", "ngram", "suffix", "retrieval", "first", "merge", "switch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found, and where."""

    llm: LLM  # plain decoding, for what is to be said of the target
    trials: tuple[Trial, ...]
    memory: dict[str, MemoryUse]  # by proposer, with all rows running


def measure(settings: Settings, progress: Console, *, max_seconds: float = math.inf) -> Measured:
    """Run plain decoding and every proposer with every k at every place.

    After `max_seconds`, the remaining batches of prompts are left out. Every proposer is measured on the same ones.

    Raises:
        OutriderError: what was asked for cannot be measured; the message says why.
    """
    with progress.status("loading models"):
        crew = VariantEngines(settings)
        places = [
            Condition(batch=batch, temperature=temperature)
            for temperature in settings.temperatures
            for batch in settings.batches
        ]
        heats = {place: _repeats(crew.base, settings, place) for place in places}
    trials = tuple(_interleave(crew, settings, heats, progress, max_seconds))
    with progress.status("weighing"):
        widest = next(heats[place][0].jobs for place in places if place.batch == settings.rows)
        memory = {
            proposer: measure_memory(crew.engine_for(_variant(proposer, settings, places[0])), widest)
            for proposer in crew.known
        }
    return Measured(llm=crew.base, trials=trials, memory=memory)


class VariantEngines:
    """Engines around one target: each way to decode has one of its own, so none learns from another's rounds."""

    def __init__(self, settings: Settings) -> None:
        self.base = LLM(
            settings.target,
            proposer="none",
            k=0,
            dtype=settings.dtype,
            device=settings.device,
            kernels=settings.kernels,
            quantize=settings.quantize,
            threads=settings.threads,
            max_num_seqs=settings.rows,
            max_model_len=settings.max_model_len,
            prefix_caching=False,  # a prompt is to cost the same each time
        )
        self._settings = settings
        self._exported: set[int] = set()  # what all of them need: they take their turns too often to ask each time
        self.known: dict[str, Proposer] = {spec: self._proposer(spec) for spec in settings.proposers}
        self._planners: dict[Variant, CostPlanner] = {}

    def engine_for(self, way: Variant) -> LLM:
        """Who decodes this way."""
        if way.plain:
            return self.base
        parts = self.base.parts
        rule = find_verifier(self._settings.verifier, way.proposer)
        proposer = self.known[way.proposer] if is_forgetful(parse(way.proposer)) else self._proposer(way.proposer)
        planner = self._planner(way)
        engine = assemble(parts.loaded, proposer=proposer, verifier=rule, planner=planner)
        return LLM.from_parts(replace(parts, engine=engine, proposer=proposer, verifier=rule, planner=planner))

    def _planner(self, way: Variant) -> Planner:
        """With k auto one for all of a place's rounds: what it learns is acceptance, not texts."""
        if not isinstance(way.k, str):
            return FixedPlanner(way.k)
        if way not in self._planners:
            self._planners[way] = auto_planner(self.base.parts.target, self.known[way.proposer])
        return self._planners[way]

    def _proposer(self, spec: str) -> Proposer:
        parts = self.base.parts
        made = make_proposer(spec, replace(parts.setup, draw=find_verifier(self._settings.verifier, spec).draw))
        if not self._exported.issuperset(made.needs.layers):
            self._exported.update(made.needs.layers)
            parts.target.export_hidden_states(sorted(self._exported))
        return made


def is_forgetful(expression: Expression) -> bool:
    """Whether a proposer knows nothing of texts that are finished."""
    if expression.name not in _FORGETFUL or (expression.name == "suffix" and expression.argument):
        return False
    return all(map(is_forgetful, expression.parts))


def variants(settings: Settings, place: Condition) -> list[Variant]:
    """All ways to decode at one place, plain decoding first."""
    plain = Variant(proposer="", k=0, batch=place.batch, temperature=place.temperature)
    return [plain, *(replace(plain, proposer=spec, k=k) for spec in settings.proposers for k in settings.ks)]


def _variant(proposer: str, settings: Settings, place: Condition) -> Variant:
    fixed = max((k for k in settings.ks if not isinstance(k, str)), default=4)
    return Variant(proposer=proposer, k=fixed, batch=place.batch, temperature=place.temperature)


def _repeats(llm: LLM, settings: Settings, place: Condition) -> list[PromptBatch]:
    """Full batches across categories; prompts beyond the last full one are left out, and repeated where none is full.

    Whoever remembers outputs would know those of prompts that return in a later batch.
    """
    asked = BenchSettings(max_tokens=settings.max_tokens, seed=settings.seed)
    prompts = read_prompts(settings.prompts, limit=settings.limit)
    singles = make_batches(llm, prompts, asked, replace(place, batch=1))
    order = list(singles)
    random.Random(settings.seed).shuffle(order)
    count = max(len(order) // place.batch, 1)
    filled = list(islice(cycle(order), count * place.batch))
    some = [filled[at : at + place.batch] for at in range(0, len(filled), place.batch)]
    return [
        PromptBatch(
            number=i,
            jobs=tuple(_own_seed(heat.jobs[0], j) for j, heat in enumerate(group)),
            categories=tuple(heat.category for heat in group),
        )
        for i, group in enumerate(some)
    ]


def _own_seed(job: Job, salt: int) -> Job:
    return replace(job, params=replace(job.params, seed=derive_seed(job.params.seed or 0, salt)))


def _interleave(
    crew: VariantEngines,
    settings: Settings,
    heats: dict[Condition, list[PromptBatch]],
    console: Console,
    max_seconds: float,
) -> Iterator[Trial]:
    """Round by round, place by place; who begins changes from heat to heat."""
    deadline = perf_counter() + max_seconds
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = settings.repeats * sum(len(some) * len(variants(settings, place)) for place, some in heats.items())
        task = bar.add_task("", total=total)
        for round in range(settings.repeats):
            for place, some in heats.items():
                bar.update(task, description=f"round {round + 1} of {settings.repeats}  {place}")
                if round and perf_counter() >= deadline:
                    return
                for trial in _run_once(crew, variants(settings, place), some, round, deadline):
                    yield trial
                    bar.advance(task)


def _run_once(
    crew: VariantEngines,
    contestants: Sequence[Variant],
    heats: Sequence[PromptBatch],
    round: int,
    deadline: float,
) -> Iterator[Trial]:
    seats = [(way, crew.engine_for(way)) for way in contestants]
    for way, llm in seats:
        run(llm, way, _warm_up(heats[0]))
    for i, heat in enumerate(heats):
        if (round or i >= _LEAST_BATCHES) and perf_counter() >= deadline:
            return
        seeded = replace(heat, jobs=tuple(_own_seed(job, round) for job in heat.jobs))
        for way, llm in seats[:: 1 if (round + heat.number) % 2 == 0 else -1]:
            yield run(llm, way, seeded)


def _warm_up(heat: PromptBatch) -> PromptBatch:
    """The prompts backwards, so that nobody has seen one when it is measured."""
    jobs = tuple(
        replace(
            job,
            prompt=job.prompt[::-1],
            params=replace(job.params, max_tokens=_WARM_TOKENS, ignore_eos=True),
        )
        for job in heat.jobs
    )
    return replace(heat, jobs=jobs)
