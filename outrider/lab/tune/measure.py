"""Runs all variants over every prompt batch in turns, with one loaded target."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from time import perf_counter

from rich.console import Console

from outrider.core.config import NO_DRAFT
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.prompts import Prompt, read_prompts
from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import Target
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.known_costs import known_costs
from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.propose.expression import fetch_models, short
from outrider.drafting.propose.registry import draft_settings
from outrider.drafting.propose.renew import without_outputs
from outrider.engine.build import assemble, auto_planner, make_proposer
from outrider.engine.verifiers import find_verifier
from outrider.engine.warm import record_passes
from outrider.errors import OutriderError
from outrider.lab.common.conversations import each_turn
from outrider.lab.common.jobs import Condition, PromptBatch, make_batches
from outrider.lab.common.memory import MemoryUse, measure_memory
from outrider.lab.common.trial import Trial, Variant, label, run
from outrider.lab.common.turns import Turns, warmup
from outrider.lab.tune.budget import PLANNED, Budget, RunTime, most_promising, plan_budget
from outrider.lab.tune.settings import Settings
from outrider.lab.tune.store import TrialStore
from outrider.llm import LLM
from outrider.models.loader.load import reads_sources
from outrider.runtime.progress import stage
from outrider.runtime.report.console import print_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of all runs."""

    llm: LLM  # plain decoding, for information about the target
    trials: tuple[Trial, ...]
    memory: dict[str, MemoryUse]  # by label of the variants, with the largest batch
    budget: Budget
    complete: bool = True  # whether it was not interrupted


def measure(
    settings: Settings, progress: Console, *, max_seconds: float = math.inf, file: Path | None = None
) -> Measured:
    """Run plain decoding and every proposer with every k, at every batch size and temperature.

    The batch sizes and temperatures share `max_seconds`. If the time is short, outputs are shorter, and then variants
    are left out; see `plan_budget`. Batches of prompts that would not end in time are left out. Every variant runs the
    same ones. Ctrl-C ends the measurement; what is comparable by then is returned.

    Args:
        settings: what to measure.
        max_seconds: the time limit, with loading. Only a first batch of prompts may exceed it.
        file: where runs are kept until the measurement is finished. The same measurement resumes from it.

    Raises:
        OutriderError: the settings cannot be measured.
        KeyboardInterrupt: nothing is comparable yet.
    """
    end = perf_counter() + max_seconds
    with_sources = reads_sources(settings.engine.target)
    prompts = read_prompts(settings.prompts, limit=settings.limit, with_sources=with_sources)
    store = TrialStore(file, settings)
    fetch_models(settings.engine.target, *settings.proposers)
    with stage("loading models"):
        engines = VariantEngines(settings)
        for draft, reason in engines.left_out.items():
            print_plain(progress, f"{draft} is left out: {reason}")
        batches = _batches(engines.base, prompts, settings)
    with stage("measuring memory"):
        memory = _memory(engines, settings, batches)
    with stage("measuring passes"):  # for k auto
        for variant in _variants(engines, settings.ks, next(iter(batches))):
            engines.engine_for(variant)
    budget = _budget(engines, settings, batches, store, end - perf_counter())
    found = len(_variants(engines, settings.ks, next(iter(batches))))
    if budget != (settings.max_tokens, found):
        print_plain(
            progress,
            f"  loading took {max_seconds - (end - perf_counter()):.0f} of {max_seconds:.0f} s. In the others,"
            f" {budget.variants} of {found} variants run, with outputs of at most {budget.max_tokens} tokens",
        )
    shorten = partial(_shortened, max_tokens=budget.max_tokens)
    turns = Turns(
        batches={condition: list(map(shorten, group)) for condition, group in batches.items()},
        variants=lambda condition: most_promising(_variants(engines, settings.ks, condition), budget.variants),
        engine_for=engines.engine_for,
        repeats=settings.repeats,
        store=store,
        max_seconds=end - perf_counter(),
    )
    trials, complete = _run(turns)
    if complete:
        store.remove()
    return Measured(llm=engines.base, trials=tuple(trials), memory=memory, budget=budget, complete=complete)


class VariantEngines:
    """Engines that share one target. Each variant has its own engine, so that none learns from another's rounds."""

    def __init__(self, settings: Settings) -> None:
        config = replace(
            settings.engine,
            proposer="none",
            k=0,
            verifier=None,
            **NO_DRAFT,  # each proposer has its own
            max_num_seqs=settings.max_num_seqs,
            prefix_caching=False,  # the prefill of a prompt must cost the same each time
        )
        self.base = LLM(config=config)
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
        self._costs: dict[int, CostModel] = {}  # by id of the draft model, or of None

    def engine_for(self, variant: Variant) -> LLM:
        """Return the engine that runs a variant."""
        if variant.plain:
            return self.base
        parts = self.base.parts
        verifier = find_verifier(self._settings.engine.verifier, variant.proposer)
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
            target = self.base.parts.target
            self._planners[variant] = auto_planner(target, self.proposers[variant.label], find_costs=self._find_costs)
        return self._planners[variant]

    def _find_costs(self, target: Target, drafts: Sequence[Target | None]) -> list[CostModel]:
        """Return the costs of passes. They are measured once, and not for each variant."""
        for draft in drafts:
            if id(draft) not in self._costs:
                (self._costs[id(draft)],) = known_costs(target, [draft])
        return [self._costs[id(draft)] for draft in drafts]

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
        draw = find_verifier(self._settings.engine.verifier, spec).draw
        drafts = draft_settings(self._settings.engine, spec, draft_quantize=quantize)
        return replace(self.base.parts.setup, draw=draw, **drafts)


def _variants(engines: VariantEngines, ks: Sequence[int | str], condition: Condition) -> list[Variant]:
    """Return all variants of a condition, plain decoding first."""
    plain = Variant(proposer="", k=0, batch=condition.batch, temperature=condition.temperature)
    drafts = [replace(plain, proposer=spec, draft_quantize=quantize) for spec, quantize in engines.drafts]
    return [plain, *(replace(draft, k=k) for draft in drafts for k in ks)]


def _run(turns: Turns) -> tuple[list[Trial], bool]:
    """Return the runs, and whether all of them were made. Ctrl-C ends them."""
    trials: list[Trial] = []
    try:
        for _, group in turns.run():
            trials += group
    except KeyboardInterrupt:
        if not trials:
            raise
        return trials, False
    return trials, True


def _memory(
    engines: VariantEngines, settings: Settings, batches: Mapping[Condition, Sequence[PromptBatch]]
) -> dict[str, MemoryUse]:
    """Return the memory of each draft with the largest batch and the largest fixed k."""
    jobs = next(group[0].jobs for each, group in batches.items() if each.batch == settings.max_num_seqs)
    k = max((k for k in settings.ks if not isinstance(k, str)), default=4)
    drafts = _variants(engines, (k,), next(iter(batches)))[1:]
    return {variant.label: measure_memory(engines.engine_for(variant), jobs) for variant in drafts}


def _batches(llm: LLM, prompts: Sequence[Prompt], settings: Settings) -> dict[Condition, list[PromptBatch]]:
    """Return the batches of each condition, with a prompt for each turn of a conversation."""
    turns = each_turn(llm, prompts, max_tokens=settings.max_tokens)
    pairs = product(settings.temperatures, settings.batches)
    conditions = (Condition(batch=batch, temperature=temperature) for temperature, batch in pairs)
    return {condition: _prompt_batches(llm, turns, settings, condition) for condition in conditions}


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
        categories = tuple(single.categories[0] for single in group)
        batches.append(PromptBatch(number=number, jobs=jobs, categories=categories))
    return batches


def _budget(
    engines: VariantEngines,
    settings: Settings,
    batches: Mapping[Condition, Sequence[PromptBatch]],
    store: TrialStore,
    seconds: float,
) -> Budget:
    """Return the budget of the stored runs, or choose one with a short run of plain decoding."""
    if store.budget is None:
        condition, group = next(iter(batches.items()))
        variants = _variants(engines, settings.ks, condition)
        time = RunTime(0.0, 0.0)
        if not math.isinf(seconds):
            for _ in range(2):  # the first one is slow
                time = RunTime.of(run(engines.base, variants[0], warmup(group[0])))
        share = PLANNED * max(seconds, 0.0) / len(batches)
        store.begin(plan_budget(time, seconds=share, variants=len(variants), max_tokens=settings.max_tokens))
    assert store.budget is not None
    return store.budget


def _shortened(batch: PromptBatch, max_tokens: int) -> PromptBatch:
    return replace(batch, jobs=tuple(job.shortened(max_tokens) for job in batch.jobs))
