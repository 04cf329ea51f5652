"""Runs `outrider tune`: measures, recommends, and builds the document."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer
from rich.console import Console

from outrider.core.config import EngineConfig
from outrider.core.option import as_json
from outrider.engine.build import proposer_of
from outrider.engine.verifiers import find_verifier
from outrider.lab.common.memory import MemoryUse
from outrider.lab.tune.advice import Advice, advise
from outrider.lab.tune.config import BENCHMARK, VERSION, settings_dict
from outrider.lab.tune.engines import other_engines
from outrider.lab.tune.figures import figures
from outrider.lab.tune.measure import Measured, measure
from outrider.lab.tune.settings import Settings
from outrider.lab.tune.wording import summary
from outrider.runtime import machine
from outrider.runtime.atomic_files import write_whole

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "seconds": "the repeat of median speed of each batch of prompts; acceptance is of all repeats",
        "prefill_share": "share of the time of plain decoding until every sequence of a batch has a token",
        "speedup": "tokens/s after the first token of every sequence, relative to plain decoding",
        "overall": "tokens/s from the prompts to the last token, relative to plain decoding; for the recommendation,"
        " the geometric mean over temperatures",
        "batches": "batches of prompts that were measured",
        "budget": "what the time limit of a fit allowed: tokens of an output, and variants with plain decoding",
        "low, high": "95% interval: 1000 resamples of the batches of prompts, pooled; null with one batch",
        "total": "tau is output tokens per pass, with the bonus token; acceptance is by position, of the draft tokens"
        " whose ancestors were all accepted",
        "output_thirds": "passes that began in the first, middle and last third of their output",
        "parts": "milliseconds of a decoding round: draft, the target's pass, and the rest",
        "break_even_tau": "time of a round over that of a plain round: output tokens per pass from which it pays",
        "stops_paying_at_batch": "the smallest measured batch from which neither it nor a larger one gains 2%;"
        " null: every batch gains",
    }
)


def run_tune(settings: Settings, *, progress: Console, file: Path | None = None) -> dict[str, Any]:
    """Measure and recommend.

    Args:
        settings: what to measure.
        file: where runs are kept until the measurement is finished; see `measure`.

    Returns:
        The JSON document. `--config` reads its `settings`.

    Raises:
        OutriderError: the settings cannot be measured.
    """
    if not settings.proposers:
        settings = replace(settings, proposers=default_proposers(settings.engine))
    return make_document(settings, measure(settings, progress, file=file))


def default_proposers(engine: EngineConfig) -> tuple[str, ...]:
    """Return the expressions to measure if the user gives none."""
    return tuple(dict.fromkeys(("ngram", "suffix", str(proposer_of(engine)))))


def make_document(settings: Settings, measured: Measured, *, every_temperature: bool = False) -> dict[str, Any]:
    """Return the JSON document of a measurement.

    It recommends for the first temperature, or for all temperatures together.
    """
    plains, cases = figures(measured.trials, seed=settings.seed)
    advice = advise(plains, cases, every_temperature=every_temperature)
    verifier = find_verifier(settings.engine.verifier, advice.proposer)
    return {
        "benchmark": BENCHMARK,
        "version": VERSION,
        "settings": settings_dict(
            settings.engine,
            proposer=advice.proposer,
            k=advice.k,
            verifier=verifier.name,
            draft_quantize=advice.draft_quantize,
        ),
        "advice": _advice(advice, measured.memory),
        "complete": measured.complete,
        "summary": [*_interrupted(measured), *summary(advice, measured.memory)],
        "plain": [asdict(plain) for plain in plains],
        "cases": [asdict(case) for case in cases],
        "memory": {proposer: use.as_dict() for proposer, use in measured.memory.items()},
        "arguments": as_json(settings),
        "budget": measured.budget._asdict(),
        **_conditions(measured),
        "definitions": dict(DEFINITIONS),
    }


def write(document: Mapping[str, Any], file: str) -> None:
    """Write the document where `--config` can read it."""
    write_whole(Path(file).expanduser(), json.dumps(document) + "\n")
    typer.echo(f"the advice is in {file}; use it as --config {file}", err=True)


def _interrupted(measured: Measured) -> list[str]:
    if measured.complete:
        return []
    return [f"The measurement was interrupted. This is from the {len(measured.trials)} runs that were done."]


def _advice(advice: Advice, memory: Mapping[str, MemoryUse]) -> dict[str, Any]:
    best = advice.best
    runner_up = None
    if advice.runner_up:
        other = advice.runner_up
        runner_up = {"proposer": other.proposer, "k": other.k, "overall": asdict(other.overall)}
    stops = advice.batches.stops_paying_at_batch
    return {
        "bottleneck": "decoding" if advice.decoding else "prefill",
        "prefill_share": advice.plain.prefill_share,
        "max_speedup": advice.max_speedup,
        "speculate": advice.worth,
        "proposer": advice.proposer,
        "k": advice.k,
        "fixed_k": advice.fixed_k if advice.worth else 0,
        "draft_quantize": advice.draft_quantize,
        "batch": best.batch,
        "temperature": best.temperature,
        "temperatures": list(advice.choice.speedups),
        "fastest": {"proposer": best.proposer, "k": best.k},
        "speedup": asdict(best.speedup) if best.speedup else None,
        "overall": asdict(advice.choice.overall),
        "break_even_tau": advice.break_even_tau,
        "tau": best.total.tau,
        "stops_paying_at_batch": stops,
        "by_batch": {str(batch): speedup for batch, speedup in advice.batches.speedups},
        "draft_in_sequences": memory[best.label].draft_in_sequences,
        "runner_up": runner_up,
        "other_engines": list(map(asdict, other_engines(advice.proposer, advice.fixed_k, stops=stops))),
    }


def _conditions(measured: Measured) -> dict[str, Any]:
    parts = measured.llm.parts
    return {
        "kernels": parts.target.kernels,
        **parts.precision.as_dict(),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
