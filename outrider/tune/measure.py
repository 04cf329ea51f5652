"""Runs all variants over every prompt batch in turns, with one loaded target."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from time import perf_counter

from rich.console import Console

from outrider.benchmarking.jobs import Condition, make_batches
from outrider.benchmarking.memory import MemoryUse, measure_memory
from outrider.benchmarking.progress import progress_bar
from outrider.engine.build import assemble, auto_planner, make_proposer
from outrider.engine.verifiers import find_verifier
from outrider.engine.warm import record_passes
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.checkpoint import reads_sources
from outrider.measure.prompts import Prompt, read_prompts
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.planner import FixedPlanner, Planner
from outrider.propose.base import Proposer, ProposerSetup
from outrider.propose.expression import short
from outrider.propose.renew import without_outputs
from outrider.tune.settings import Settings
from outrider.tune.trial import PromptBatch, Trial, Variant, label, run

_WARMUP_TOKENS = 8
_MIN_BATCHES = 2  # batches of prompts that are measured in spite of the time limit, so that there is an interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of all runs."""

    llm: LLM  # plain decoding, for information about the target
    trials: tuple[Trial, ...]
    memory: dict[str, MemoryUse]  # by label of the variants, with the largest batch


def measure(settings: Settings, progress: Console, *, max_seconds: float = math.inf) -> Measured:
    """Run plain decoding and every proposer with every k, at every batch size and temperature.

    The batch sizes and temperatures share `max_seconds`. When a share is over, the remaining batches of prompts are
    left out there. Every variant runs the same ones.

    Raises:
        OutriderError: the settings cannot be measured.
    """
    with_sources = reads_sources(settings.target)
    prompts = read_prompts(settings.prompts, limit=settings.limit, with_sources=with_sources)
    with progress.status("loading models"):
        engines = VariantEngines(settings)
        for draft, reason in engines.left_out.items():
            progress.print(f"{draft} is left out: {reason}", highlight=False, markup=False, soft_wrap=True)
        conditions = [
            Condition(batch=batch, temperature=temperature)
            for temperature in settings.temperatures
            for batch in settings.batches
        ]
        batches = {condition: _prompt_batches(engines.base, prompts, settings, condition) for condition in conditions}
    trials = tuple(_interleave(engines, settings, batches, progress, max_seconds))
    with progress.status("measuring memory"):
        largest = next(condition for condition in conditions if condition.batch == settings.max_num_seqs)
        jobs = batches[largest][0].jobs
        memory = {
            variant.label: measure_memory(engines.engine_for(variant), jobs)
            for variant in _largest(engines, settings, conditions[0])
        }
    return Measured(llm=engines.base, trials=trials, memory=memory)


class VariantEngines:
    """Engines that share one target. Each variant has its own engine, so that none learns from another's rounds."""

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
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            prefix_caching=False,  # the prefill of a prompt must cost the same each time
        )
        self._settings = settings
        # Layers whose hidden states the target exports for any of the proposers. Changing them for each turn is slow.
        self._exported_layers: set[int] = set()
        self.drafts: list[tuple[str, str | None]] = []  # proposers, and `draft_quantize` of a variant
        self.proposers: dict[str, Proposer] = {}  # by label of a variant
        self.left_out: dict[str, str] = {}  # by label: why the draft cannot have these weights
        for spec in settings.proposers:
            for quantize in settings.draft_quantizes.get(spec, (None,)):
                self._add_draft(spec, quantize)
        record_passes(self.base.parts, self.proposers.values())
        self._planners: dict[Variant, CostPlanner] = {}

    def engine_for(self, variant: Variant) -> LLM:
        """Return the engine that runs a variant."""
        if variant.plain:
            return self.base
        parts = self.base.parts
        verifier = find_verifier(self._settings.verifier, variant.proposer)
        setup = self._setup(variant.proposer, variant.draft_quantize)
        proposer = without_outputs(self.proposers[variant.label], variant.proposer, setup)
        planner = self._planner(variant)
        engine = assemble(parts.loaded, proposer=proposer, verifier=verifier, planner=planner)
        return LLM.from_parts(replace(parts, engine=engine, proposer=proposer, verifier=verifier, planner=planner))

    def _planner(self, variant: Variant) -> Planner:
        """Return the planner of a variant. That of k auto stays for all rounds: it learns acceptance, not outputs."""
        if not isinstance(variant.k, str):
            return FixedPlanner(variant.k)
        if variant not in self._planners:
            self._planners[variant] = auto_planner(self.base.parts.target, self.proposers[variant.label])
        return self._planners[variant]

    def _add_draft(self, spec: str, quantize: str | None) -> None:
        """Make a proposer. A draft that cannot be quantized is measured with its weights as stored only."""
        try:
            proposer = self._make_proposer(spec, quantize)
        except OutriderError as error:
            if quantize is None or (spec, None) not in self.drafts:
                raise
            self.left_out[label(short(spec), quantize)] = str(error)
            return
        self.drafts.append((spec, quantize))
        self.proposers[label(spec, quantize)] = proposer

    def _make_proposer(self, spec: str, quantize: str | None) -> Proposer:
        proposer = make_proposer(spec, self._setup(spec, quantize))
        if not self._exported_layers.issuperset(proposer.needs.layers):
            self._exported_layers.update(proposer.needs.layers)
            self.base.parts.target.export_hidden_states(sorted(self._exported_layers))
        return proposer

    def _setup(self, spec: str, quantize: str | None) -> ProposerSetup:
        draw = find_verifier(self._settings.verifier, spec).draw
        return replace(self.base.parts.setup, draw=draw, **self._settings.draft_settings(spec, quantize))


def _variants(engines: VariantEngines, ks: Sequence[int | str], condition: Condition) -> list[Variant]:
    """Return all variants of a condition, plain decoding first."""
    plain = Variant(proposer="", k=0, batch=condition.batch, temperature=condition.temperature)
    drafts = [replace(plain, proposer=spec, draft_quantize=quantize) for spec, quantize in engines.drafts]
    return [plain, *(replace(draft, k=k) for draft in drafts for k in ks)]


def _largest(engines: VariantEngines, settings: Settings, condition: Condition) -> list[Variant]:
    """Return the variants with the largest fixed k."""
    largest = max((k for k in settings.ks if not isinstance(k, str)), default=4)
    return _variants(engines, (largest,), condition)[1:]


def _prompt_batches(llm: LLM, prompts: Sequence[Prompt], settings: Settings, condition: Condition) -> list[PromptBatch]:
    """Return full batches across categories.

    Prompts after the last full batch are left out. Prompts are repeated only to fill a single batch: a proposer that
    remembers outputs would know those of prompts that return in a later batch.
    """
    alone = replace(condition, batch=1)
    singles = list(make_batches(llm, prompts, alone, max_tokens=settings.max_tokens, seed=settings.seed))
    random.Random(settings.seed).shuffle(singles)
    count = max(len(singles) // condition.batch, 1)
    filled = list(islice(cycle(singles), count * condition.batch))
    batches = []
    for number in range(count):
        group = filled[number * condition.batch : (number + 1) * condition.batch]
        jobs = tuple(single.jobs[0].with_seed(i) for i, single in enumerate(group))
        categories = tuple(single.category for single in group)
        batches.append(PromptBatch(number=number, jobs=jobs, categories=categories))
    return batches


def _interleave(
    engines: VariantEngines,
    settings: Settings,
    batches: dict[Condition, list[PromptBatch]],
    console: Console,
    max_seconds: float,
) -> Iterator[Trial]:
    """Run all variants of all conditions in each round. The order of the variants alternates from batch to batch."""
    end = perf_counter() + max_seconds
    per_round = sum(
        len(group) * len(_variants(engines, settings.ks, condition)) for condition, group in batches.items()
    )
    with progress_bar(console) as bar:
        task = bar.add_task("", total=settings.repeats * per_round)
        for round in range(settings.repeats):
            for i, (condition, group) in enumerate(batches.items()):
                bar.update(task, description=f"round {round + 1} of {settings.repeats}  {condition}")
                now = perf_counter()
                if round and now >= end:
                    return
                deadline = now + max(end - now, 0.0) / (len(batches) - i)
                for trial in _run_once(engines, _variants(engines, settings.ks, condition), group, round, deadline):
                    yield trial
                    bar.advance(task)


def _run_once(
    engines: VariantEngines,
    all_variants: Sequence[Variant],
    batches: Sequence[PromptBatch],
    round: int,
    deadline: float,
) -> Iterator[Trial]:
    pairs = [(variant, engines.engine_for(variant)) for variant in all_variants]
    for variant, llm in pairs:
        run(llm, variant, _warmup(batches[0]))
    for i, batch in enumerate(batches):
        if (round or i >= _MIN_BATCHES) and perf_counter() >= deadline:
            return
        seeded = replace(batch, jobs=tuple(job.with_seed(round) for job in batch.jobs))
        for variant, llm in pairs[:: 1 if (round + batch.number) % 2 == 0 else -1]:
            yield run(llm, variant, seeded)


def _warmup(batch: PromptBatch) -> PromptBatch:
    """Return a batch for the warm-up. Its texts are reversed, so that no proposer has seen a measured one."""
    jobs = []
    for job in batch.jobs:
        short = job.shortened(_WARMUP_TOKENS)
        params = replace(short.params, ignore_eos=True)
        source = short.source[::-1] if isinstance(short.source, tuple) else short.source
        jobs.append(replace(short, prompt=short.prompt[::-1], source=source, params=params))
    return replace(batch, jobs=tuple(jobs))
