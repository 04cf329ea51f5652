"""The verb `tune` from beginning to end: from what is asked to the document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer
from rich.console import Console

from outrider.bench.memory import Footprint
from outrider.engine.verifiers import find_verifier
from outrider.system import machine
from outrider.system.atomic_files import write_whole
from outrider.tune.advice import Advice, advise
from outrider.tune.config import BENCHMARK, VERSION, settings_dict
from outrider.tune.engines import elsewhere
from outrider.tune.figures import Plain, case_dict, figures
from outrider.tune.measure import Measured, measure
from outrider.tune.settings import Settings
from outrider.tune.wording import sentences

DEFINITIONS: Mapping[str, str] = MappingProxyType(
    {
        "seconds": "of each batch of prompts the round of median speed; acceptance is of all rounds",
        "prefill": "share of plain decoding's time until every row of a batch had a token",
        "speedup": "tokens a second of decoding alone, after the first token of every row, over those of plain"
        " decoding",
        "overall": "tokens a second of the whole, from the prompts to the last token, over those of plain decoding",
        "low, high": "95% interval: 1000 resamples of the batches of prompts, pooled; null where there is one batch"
        " alone",
        "kept": "tau is tokens a pass of a decoding row, the bonus token included; acceptance is by position, of the"
        " guesses whose ancestors were all accepted",
        "phases": "passes that began in the first, middle and last third of their output",
        "parts": "milliseconds of a round of decoding: guessing, the target's pass, and all else",
        "needed_tau": "a round's time over that of a plain round: tokens that a pass must emit to pay",
        "stops": "the smallest measured batch from which neither it nor a larger one gains 2%; null: all do",
    }
)


def run_tune(settings: Settings, *, progress: Console) -> dict[str, Any]:
    """Measure, and answer.

    Args:
        settings: what to measure.
        progress: where to show how far it is.

    Returns:
        The document to report, fit for JSON; with `settings` in it that `--config` reads.

    Raises:
        OutriderError: what was asked for cannot be measured; the message says why.
    """
    measured = measure(settings, progress)
    plains, cases = figures(measured.trials, seed=settings.seed)
    advice = advise(plains, cases)
    verifier = find_verifier(settings.verifier, advice.proposer)
    return {
        "benchmark": BENCHMARK,
        "version": VERSION,
        "settings": settings_dict(settings, proposer=advice.proposer, k=advice.k, verifier=verifier.name),
        "advice": _advice(advice, measured.memory),
        "words": sentences(advice, measured.memory),
        "plain": [_plain(plain) for plain in plains],
        "cases": [case_dict(case) for case in cases],
        "memory": {proposer: held.as_dict() for proposer, held in measured.memory.items()},
        "arguments": asdict(settings),
        **_conditions(measured),
        "definitions": dict(DEFINITIONS),
    }


def write(document: Mapping[str, Any], file: str) -> None:
    """Write the document where `--config` can read it."""
    write_whole(Path(file).expanduser(), json.dumps(document) + "\n")
    typer.echo(f"the advice is in {file}; use it as --config {file}", err=True)


def _advice(advice: Advice, memory: Mapping[str, Footprint]) -> dict[str, Any]:
    best, rival = advice.best, advice.rival
    return {
        "bottleneck": "decoding" if advice.decoding else "prefill",
        "prefill": advice.plain.prefill,
        "ceiling": advice.ceiling,
        "speculate": advice.worth,
        "proposer": advice.proposer,
        "k": advice.k,
        "fixed_k": advice.fixed_k if advice.worth else 0,
        "batch": best.way.batch,
        "temperature": best.way.temperature,
        "fastest": {"proposer": best.way.proposer, "k": best.way.k},
        "speedup": asdict(best.speedup) if best.speedup else None,
        "overall": asdict(best.overall),
        "needed_tau": advice.needed_tau,
        "tau": best.kept.tau,
        "stops": advice.batches.stops,
        "by_batch": {str(batch): speedup for batch, speedup in advice.batches.speedups},
        "draft_in_rows": memory[best.way.proposer].draft_in_rows,
        "rival": {"proposer": rival.way.proposer, "k": rival.way.k, "overall": asdict(rival.overall)}
        if rival
        else None,
        "elsewhere": [asdict(each) for each in elsewhere(advice.proposer, advice.fixed_k, stops=advice.batches.stops)],
    }


def _plain(plain: Plain) -> dict[str, Any]:
    return {
        "batch": plain.way.batch,
        "temperature": plain.way.temperature,
        "rate": plain.rate,
        "prefill": plain.prefill,
        "parts": asdict(plain.parts),
    }


def _conditions(measured: Measured) -> dict[str, Any]:
    parts = measured.llm.parts
    return {
        "kernels": parts.target.kernels,
        "dtype": str(parts.dtype).removeprefix("torch."),
        "hardware": machine.hardware(str(parts.device)),
        "versions": machine.versions(),
        "commit": machine.commit(),
    }
