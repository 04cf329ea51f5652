"""Runs a benchmark and builds its document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.core.params import AUTO
from outrider.core.planner import Planner
from outrider.core.prompts import Prompt, read_prompts
from outrider.drafting.plan.store import PlanFile, check_plan, restored
from outrider.drafting.propose.expression import command_line_form, fetch_models
from outrider.drafting.propose.leaves import draft_model
from outrider.drafting.propose.registry import parse
from outrider.engine.build import auto_planner
from outrider.engine.warm import record_passes
from outrider.errors import OutriderError
from outrider.lab.bench import limits
from outrider.lab.bench.interleave import Workload, interleave
from outrider.lab.bench.pass_work import bytes_per_pass, cache_bytes_per_token, flops_per_token
from outrider.lab.bench.rates import Rates, best_rates, measure_rates
from outrider.lab.bench.report import DEFINITIONS, OVERALL, PLAIN, SPECULATIVE, Sample, mean_cached, report
from outrider.lab.bench.settings import Settings
from outrider.lab.bench.sweep import conditions, default_condition, speculative_variants, sweeps
from outrider.lab.bench.variants import OutriderRunner, SwitchPlanner, Variant
from outrider.lab.common.jobs import Condition, make_batches
from outrider.lab.common.memory import MemoryUse, measure_memory
from outrider.llm import LLM
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import reads_sources
from outrider.models.native.target import NativeTarget
from outrider.runtime import machine
from outrider.runtime.progress import stage


def run_bench(settings: Settings, *, progress: Console) -> dict[str, Any]:
    """Measure plain and speculative decoding in turns.

    Args:
        settings: what to measure.
        progress: the console of warnings.

    Returns:
        The JSON document.

    Raises:
        OutriderError: the settings cannot be measured.
    """
    check_plan(settings.engine.plan, k=settings.engine.k)
    with_sources = reads_sources(settings.engine.target)
    if with_sources:
        _check_sources(settings)
    prompts = read_prompts(settings.prompts, limit=settings.limit, with_sources=with_sources)
    if any(prompt.category == OVERALL for prompt in prompts):
        raise OutriderError(f"a category is called {OVERALL}, which reports use for all categories; rename it")
    fetch_models(settings.engine.target, settings.engine.proposer)
    planner = SwitchPlanner()
    with stage("loading models"):
        llm = load(settings, planner)
        record_passes(llm.parts)  # before the planner measures the cost of passes
        if AUTO in speculative_variants(settings):
            planner.auto = auto_planner(llm.parts.target, llm.parts.proposer)
        plan = _restored_plan(llm, planner, settings)
        workloads = _workloads(llm, planner, prompts, settings)
    with stage("measuring the machine"):
        before = measure_rates(llm.parts.device, llm.parts.dtype)
        first_jobs = workloads[0].batches[0].jobs
        memory = measure_memory(llm, list(islice(cycle(first_jobs), settings.max_num_seqs)))
    samples = interleave(workloads, settings.repeats)
    if plan and planner.auto:
        _save_plan(plan, planner.auto, progress)
    with stage("measuring the machine"):
        after = measure_rates(llm.parts.device, llm.parts.dtype)
    return _document(llm, settings, samples, rates=(before, after), memory=memory)


def _check_sources(settings: Settings) -> None:
    """Raise OutriderError if an option does not support an encoder-decoder target."""
    if settings.max_model_len is not None:
        raise OutriderError("--context lengthens prompts, and an encoder-decoder target reads sources; leave it out")
    if settings.peer is not None:
        raise OutriderError(f"--peer {settings.peer} does not support encoder-decoder targets; leave it out")


def _restored_plan(llm: LLM, planner: SwitchPlanner, settings: Settings) -> PlanFile | None:
    if planner.auto is None:
        return None
    return restored(
        settings.engine.plan,
        planner.auto,
        target=settings.engine.target,
        proposer=llm.parts.proposer_spec,
        quantize=settings.engine.quantize,
    )


def _save_plan(plan: PlanFile, planner: Planner, progress: Console) -> None:
    """Save the plan. If that fails, print a message and go on, so that the measurement is not lost."""
    try:
        plan.save(planner)
    except OutriderError as error:
        progress.print(f"the plan was not saved: {error}", markup=False, soft_wrap=True)


def load(settings: Settings, planner: SwitchPlanner) -> LLM:
    """Load the models to measure."""
    config = replace(
        settings.engine,
        plan=None,  # the plan of k auto is restored when its planner is made
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        prefix_caching=False,  # the prefill of a prompt must cost the same each time
    )
    return LLM(config=config, planner=planner)


def _workloads(llm: LLM, planner: SwitchPlanner, prompts: Sequence[Prompt], settings: Settings) -> list[Workload]:
    # Make all batches first: a prompt that does not fit must be reported before peers are loaded.
    batches = {
        condition: make_batches(llm, prompts, condition, max_tokens=settings.max_tokens, seed=settings.seed)
        for condition in conditions(settings)
    }
    return [
        Workload(condition=condition, variants=_variants(llm, planner, settings, condition), batches=group)
        for condition, group in batches.items()
    ]


def _variants(llm: LLM, planner: SwitchPlanner, settings: Settings, condition: Condition) -> tuple[Variant, ...]:
    """Return plain and speculative decoding. The default condition also has the swept k and the peers."""
    is_default = condition == default_condition(settings)
    names = speculative_variants(settings) if is_default else {0: PLAIN, settings.engine.k: SPECULATIVE}
    runners = tuple(OutriderRunner(name, llm, planner, k=k) for k, name in names.items())
    if settings.peer is None or not is_default:
        return runners
    from outrider.lab.bench.peer import load_peers

    return (*runners, *load_peers(llm, model_folder(settings.engine.target), _draft_folder(llm)))


def _document(
    llm: LLM,
    settings: Settings,
    samples: Mapping[Condition, Sequence[Sample]],
    *,
    rates: tuple[Rates, Rates],
    memory: MemoryUse,
) -> dict[str, Any]:
    parts = llm.parts
    default = default_condition(settings)
    swept = {f"k={k}" for k in settings.sweep.k}
    figures = report([sample for sample in samples[default] if sample.name not in swept])
    roofline = _roofline(llm, settings, rates)
    cached = mean_cached(samples[default], seqs=default.batch)
    before, after = rates
    return {
        "benchmark": "outrider bench",
        "arguments": settings.arguments(),
        "proposer": command_line_form(_expression(llm)),
        "verifier": parts.verifier.name,
        "exact": parts.verifier.exact,
        "bound": parts.verifier.bound and parts.verifier.bound.as_dict(),
        "kernels": parts.target.kernels,
        "draft_placements": [placement.as_dict() for placement in parts.draft_placements],
        "compile_seconds": _compile_seconds(llm),
        **parts.precision.as_dict(),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "rates": {"before": before.as_dict(), "after": after.as_dict()},
        "limits": asdict(roofline) | limits.limits(roofline, figures[OVERALL], seqs=default.batch, cached=cached),
        "memory": memory.as_dict(),
        "results": figures,
        "sweeps": sweeps(settings, samples, roofline),
        "definitions": {**DEFINITIONS, **limits.DEFINITIONS},
    }


def _roofline(llm: LLM, settings: Settings, rates: tuple[Rates, Rates]) -> limits.Roofline:
    folder = model_folder(settings.engine.target)
    bandwidth, gemm = best_rates(rates)
    weights = bytes_per_pass(llm, folder)
    if llm.parts.source_rules is None:
        flops = flops_per_token(folder)
    else:  # the files hold the encoder as well
        flops = 2 * weights.dense / llm.parts.dtype.itemsize
    return limits.Roofline(
        weight_bytes_per_pass=weights.dense,
        expert_bytes=weights.expert,
        cache_bytes_per_token=cache_bytes_per_token(llm),
        flops_per_token=flops / settings.engine.tp,  # of this rank, as the bytes are
        read_bytes_per_s=bandwidth,
        gemm_flops_per_s=gemm,
    )


def _compile_seconds(llm: LLM) -> float:
    """Return the compile time of the native kernels. It is 0 if none run, or an earlier run has compiled them."""
    models = (llm.parts.target, draft_model(llm.parts.proposer))
    return max((model.compile_seconds for model in models if isinstance(model, NativeTarget)), default=0.0)


def _expression(llm: LLM) -> str:
    assert isinstance(llm.parts.proposer_spec, str)  # the command line takes nothing else
    return llm.parts.proposer_spec


def _draft_folder(llm: LLM) -> Path | None:
    expression = parse(_expression(llm))
    return model_folder(expression.argument) if expression.name == "draft" else None
