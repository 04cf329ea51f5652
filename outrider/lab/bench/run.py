"""Runs a benchmark."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, islice

from rich.console import Console

from outrider.core.params import AUTO
from outrider.core.planner import FixedPlanner, Planner
from outrider.core.prompts import Prompt, read_prompts
from outrider.drafting.plan.store import PlanFile, check_plan, restored
from outrider.drafting.propose.expression import command_line_form, fetch_models
from outrider.drafting.propose.leaves import draft_model
from outrider.engine.build import auto_planner
from outrider.engine.warm import record_passes
from outrider.errors import OutriderError
from outrider.lab.bench.figures import OVERALL, compare, mean_cached
from outrider.lab.bench.limits import Roofline, limits
from outrider.lab.bench.pass_work import bytes_per_pass, cache_bytes_per_token, flops_per_token
from outrider.lab.bench.rates import best_rates, measure_rates
from outrider.lab.bench.result import Result
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.sweep import Measured, conditions, default_condition, draft_lengths, sweeps
from outrider.lab.common.conversations import each_turn
from outrider.lab.common.jobs import Condition, make_batches
from outrider.lab.common.memory import measure_memory
from outrider.lab.common.trial import Trial, Variant
from outrider.lab.common.turns import Turns, with_planner
from outrider.llm import LLM
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import reads_sources
from outrider.models.native.target import NativeTarget
from outrider.runtime import machine
from outrider.runtime.progress import stage


def run_bench(settings: Settings, *, progress: Console) -> Result:
    """Return the results of plain and speculative decoding, measured in turns.

    Args:
        settings: what to measure.
        progress: the console of warnings.

    Raises:
        OutriderError: the settings cannot be measured.
    """
    check_plan(settings.engine.plan, k=settings.engine.k)
    prompts = _read_prompts(settings)
    fetch_models(settings.engine.target, settings.engine.proposer)
    with stage("loading models"):
        llm = load(settings)
        prompts = each_turn(llm, prompts, max_tokens=settings.max_tokens)
        record_passes(llm.parts)  # before the planner measures the cost of passes
        engines = _Engines(llm, settings)
        turns = Turns(
            batches={
                condition: make_batches(llm, prompts, condition, max_tokens=settings.max_tokens, seed=settings.seed)
                for condition in conditions(settings)
            },
            variants=engines.variants,
            engine_for=engines.engine_for,
            repeats=settings.repeats,
        )
    parts = llm.parts
    with stage("measuring the machine"):
        before = measure_rates(parts.device, parts.dtype)
        first_jobs = turns.batches[default_condition(settings)][0].jobs
        memory = measure_memory(llm, list(islice(cycle(first_jobs), settings.max_num_seqs)))
    trials: dict[Condition, list[Trial]] = {condition: [] for condition in turns.batches}
    for condition, group in turns.run():
        trials[condition] += group
    engines.save_plan(progress)
    with stage("measuring the machine"):
        after = measure_rates(parts.device, parts.dtype)
    bandwidth, gemm = best_rates((before, after))
    roofline = _roofline(llm, settings, bandwidth=bandwidth, gemm=gemm)
    measured = _measured(trials, roofline, llm)
    return Result(
        settings=settings,
        proposer=command_line_form(_expression(llm)),
        verifier=parts.verifier.name,
        exact=parts.verifier.exact,
        bound=parts.verifier.bound,
        kernels=parts.target.kernels,
        placements=parts.draft_placements,
        compile_seconds=_compile_seconds(llm),
        precision=parts.precision,
        hardware=machine.hardware(str(parts.device)),
        before=before,
        after=after,
        roofline=roofline,
        memory=memory,
        measured=measured(default_condition(settings), settings.engine.k),
        sweeps=sweeps(settings, measured),
    )


def _read_prompts(settings: Settings) -> list[Prompt]:
    """Return the prompts. Raises OutriderError if they cannot be measured."""
    with_sources = reads_sources(settings.engine.target)
    if with_sources and settings.max_model_len is not None:
        raise OutriderError("--context lengthens prompts, and an encoder-decoder target reads sources; leave it out")
    prompts = read_prompts(settings.prompts, limit=settings.limit, with_sources=with_sources)
    if any(prompt.category == OVERALL for prompt in prompts):
        raise OutriderError(f"a category is called {OVERALL}, which reports use for all categories; rename it")
    return prompts


def load(settings: Settings) -> LLM:
    """Return the `LLM` of the models to measure. Each draft length gets a planner of its own later."""
    config = replace(
        settings.engine,
        plan=None,  # the plan of k auto is restored when its planner is made
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        prefix_caching=False,  # the prefill of a prompt must cost the same each time
    )
    return LLM(config=config, planner=FixedPlanner(0))


class _Engines:
    """Engines for each draft length, with the same loaded weights."""

    def __init__(self, llm: LLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._auto: Planner | None = None
        self._plan: PlanFile | None = None
        if AUTO in draft_lengths(settings, default_condition(settings)):
            self._auto = auto_planner(llm.parts.target, llm.parts.proposer)
            self._plan = restored(
                settings.engine.plan,
                self._auto,
                target=settings.engine.target,
                proposer=llm.parts.proposer_spec,
                quantize=settings.engine.quantize,
            )

    def variants(self, condition: Condition) -> list[Variant]:
        """Return plain decoding and each draft length of a condition."""
        plain = Variant(proposer="", k=0, batch=condition.batch, temperature=condition.temperature)
        drafting = replace(plain, proposer=_expression(self._llm))
        return [replace(drafting, k=k) if k else plain for k in draft_lengths(self._settings, condition)]

    def engine_for(self, variant: Variant) -> LLM:
        """Return an engine whose proposer knows no outputs. The planner of k auto keeps what it has learned."""
        planner = FixedPlanner(variant.k) if isinstance(variant.k, int) else self._auto
        assert planner is not None
        return with_planner(self._llm, planner, plain=variant.plain)

    def save_plan(self, progress: Console) -> None:
        """Save the plan. If that fails, print a message and go on, so that the measurement is not lost."""
        if self._plan is None or self._auto is None:
            return
        try:
            self._plan.save(self._auto)
        except OutriderError as error:
            progress.print(f"the plan was not saved: {error}", markup=False, soft_wrap=True)


def _measured(
    trials: dict[Condition, list[Trial]], roofline: Roofline, llm: LLM
) -> Callable[[Condition, int | str], Measured]:
    """Return a function from a condition and a draft length to their figures."""

    @cache
    def measured(condition: Condition, k: int | str) -> Measured:
        by_category = compare(trials[condition], k, llm.parts.verifier.bound)
        cached = mean_cached(trials[condition], seqs=condition.batch)
        found = limits(roofline, by_category[OVERALL], seqs=condition.batch, cached=cached)
        return Measured(by_category=by_category, limits=found)

    return measured


def _roofline(llm: LLM, settings: Settings, *, bandwidth: float, gemm: float) -> Roofline:
    folder = model_folder(settings.engine.target)
    weights = bytes_per_pass(llm, folder)
    if llm.parts.source_rules is None:
        flops = flops_per_token(folder)
    else:  # the files hold the encoder as well
        flops = 2 * weights.dense / llm.parts.dtype.itemsize
    return Roofline(
        weight_bytes_per_pass=weights.dense,
        expert_bytes=weights.expert,
        cache_bytes_per_token=cache_bytes_per_token(llm),
        flops_per_token=flops / settings.engine.tp,  # of this rank, as the bytes are
        read_bytes_per_s=bandwidth,
        # Products of integers may be faster than those of floats. Then only the bandwidth is a limit.
        gemm_flops_per_s=gemm if llm.parts.precision.weights.bits >= 16 else math.inf,
    )


def _compile_seconds(llm: LLM) -> float:
    """Return the compile time of the native kernels. It is 0 if none run, or an earlier run has compiled them."""
    models = (llm.parts.target, draft_model(llm.parts.proposer))
    return max((model.compile_seconds for model in models if isinstance(model, NativeTarget)), default=0.0)


def _expression(llm: LLM) -> str:
    assert isinstance(llm.parts.proposer_spec, str)  # the command line takes nothing else
    return llm.parts.proposer_spec
