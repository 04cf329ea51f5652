"""The benchmark from beginning to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench import limits
from outrider.bench.contestants import OutriderRunner, SwitchPlanner, Variant
from outrider.bench.interleave import Workload, interleave, make_batches
from outrider.bench.memory import MemoryUse, bytes_per_pass, cache_bytes_per_token, flops_per_token, measure_memory
from outrider.bench.rates import Rates, best_rates, measure_rates
from outrider.bench.report import DEFINITIONS, OVERALL, PLAIN, SPECULATIVE, Sample, mean_cached, report
from outrider.bench.settings import Settings
from outrider.bench.sweep import Condition, conditions, default_condition, speculative_variants, sweeps
from outrider.core.config import weight_bits
from outrider.core.params import AUTO
from outrider.engine.build import auto_planner
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import model_folder
from outrider.measure.prompts import read_prompts
from outrider.native.target import NativeTarget
from outrider.plan.planner import Planner
from outrider.plan.store import PlanFile, restored
from outrider.propose.expression import pasted
from outrider.propose.registry import default_proposer, draft_model, parse
from outrider.system import machine


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
    if any(prompt.category == OVERALL for prompt in prompts):
        raise OutriderError(f"a category is called {OVERALL}, which is all of them in reports; name it otherwise")
    planner = SwitchPlanner()
    with progress.status("loading models"):
        llm = load(settings, planner)
        if AUTO in speculative_variants(settings):
            planner.auto = auto_planner(llm.parts.target, llm.parts.proposer)
        models = {"target": settings.target, "proposer": settings.proposer, "quantize": settings.quantize}
        plan = restored(settings.plan, planner.auto, **models) if planner.auto else None
        heats = {place: make_batches(llm, prompts, settings, place) for place in conditions(settings)}
        stages = [
            Workload(condition=place, variants=_variants(llm, planner, settings, place), repeats=some)
            for place, some in heats.items()
        ]
    with progress.status("measuring the machine"):
        before = measure_rates(llm.parts.device, llm.parts.dtype)
        first = stages[0].repeats[0].jobs
        held = measure_memory(llm, list(islice(cycle(first), settings.rows)))
    samples = interleave(stages, settings.repeats, progress)
    if plan and planner.auto:
        _keep(plan, planner.auto, progress)
    with progress.status("measuring the machine"):
        after = measure_rates(llm.parts.device, llm.parts.dtype)
    return _document(llm, settings, samples, rates=(before, after), held=held)


def _keep(plan: PlanFile, planner: Planner, progress: Console) -> None:
    """What was measured is worth more than what was learned on the way, and not lost with it."""
    try:
        plan.save(planner)
    except OutriderError as error:
        progress.print(f"what the planner has learned is not kept: {error}", markup=False, soft_wrap=True)


def load(settings: Settings, planner: SwitchPlanner) -> LLM:
    """The models to measure."""
    return LLM(
        settings.target,
        proposer=settings.proposer,
        k=settings.k,
        verifier=settings.verifier,
        dtype=settings.dtype,
        device=settings.device,
        kernels=settings.kernels,
        quantize=settings.quantize,
        threads=settings.threads,
        max_num_seqs=settings.rows,
        max_model_len=settings.capacity,
        prefix_caching=False,  # a prompt is to cost the same each time
        planner=planner,
    )


def _variants(llm: LLM, planner: SwitchPlanner, settings: Settings, place: Condition) -> tuple[Variant, ...]:
    """Plain and speculative everywhere; every k of the sweep and the peers at home."""
    at_home = place == default_condition(settings)
    names = speculative_variants(settings) if at_home else {0: PLAIN, settings.k: SPECULATIVE}
    own = tuple(OutriderRunner(name, llm, planner, k=k) for k, name in names.items())
    if settings.peer is None or not at_home:
        return own
    from outrider.bench.peer import load_peers

    return (*own, *load_peers(llm, model_folder(settings.target), _draft(settings)))


def _document(
    llm: LLM,
    settings: Settings,
    samples: Mapping[Condition, Sequence[Sample]],
    *,
    rates: tuple[Rates, Rates],
    held: MemoryUse,
) -> dict[str, Any]:
    parts, start = llm.parts, default_condition(settings)
    swept = {f"k={k}" for k in settings.sweep.k}
    figures = report([sample for sample in samples[start] if sample.name not in swept])
    roofline = _roofline(llm, settings, rates)
    cached = mean_cached(samples[start], rows=start.batch)
    return {
        "benchmark": "outrider bench",
        "arguments": asdict(settings),
        "proposer": pasted(settings.proposer or default_proposer(settings.target)),
        "verifier": parts.verifier.name,
        "exact": parts.verifier.exact,
        "kernels": parts.target.kernels,
        "weight_bits": weight_bits(settings.quantize) if settings.quantize else 8 * parts.dtype.itemsize,
        "compile_seconds": _compile_seconds(llm),
        "dtype": str(parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "rates": dict(zip(("before", "after"), (each.as_dict() for each in rates), strict=True)),
        "limits": asdict(roofline) | limits.limits(roofline, figures[OVERALL], rows=start.batch, cached=cached),
        "memory": held.as_dict(),
        "results": figures,
        "sweeps": sweeps(settings, samples, roofline),
        "definitions": {**DEFINITIONS, **limits.DEFINITIONS},
    }


def _roofline(llm: LLM, settings: Settings, rates: tuple[Rates, Rates]) -> limits.Roofline:
    folder = model_folder(settings.target)
    bandwidth, gemm = best_rates(rates)
    return limits.Roofline(
        weight_bytes_per_pass=bytes_per_pass(llm, folder),
        cache_bytes_per_token=cache_bytes_per_token(llm),
        flops_per_token=flops_per_token(folder),
        read_bytes_per_s=bandwidth,
        gemm_flops_per_s=gemm,
    )


def _compile_seconds(llm: LLM) -> float:
    """What the native kernels took to compile; 0 where none run, or an earlier run left them."""
    models = (llm.parts.target, draft_model(llm.parts.proposer))
    return max((model.compile_seconds for model in models if isinstance(model, NativeTarget)), default=0.0)


def _draft(settings: Settings) -> Path | None:
    asked = parse(settings.proposer or default_proposer(settings.target))
    return Path(asked.argument).expanduser() if asked.name == "draft" else None
