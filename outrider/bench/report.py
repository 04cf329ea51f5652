"""From trials to the numbers that are reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.bench.contestants import Trial
from outrider.core.stats import Stats
from outrider.measure.clock import DecodeSpeed
from outrider.plan import speedup
from outrider.report.console import counted

PLAIN, SPECULATIVE = "plain", "speculative"
OVERALL = "overall"
DEFINITIONS: Mapping[str, str] = {
    "tokens_per_s": "decoding alone: tokens after the first round by whose end every row had one, over the time from"
    " the end of that round to the end of the last; pooled over prompts, then the median over rounds of the benchmark",
    "speedup": "tokens_per_s over that of plain, the median over rounds of the benchmark of their ratio",
    "tau": "tokens a pass of a decoding row, the bonus token included; 1 is plain decoding",
    "acceptance_by_position": "of the guesses whose ancestors were all accepted, the share accepted",
    "latency_ms": "time between a row's tokens; of the tokens of one round the first waits for the whole round and the"
    " others for nothing",
    "propose_ms, target_ms, host_ms": "a round of decoding: guessing, the target's pass, and all else; on a GPU the"
    " wait for the device counts as host",
    "expected_speedup": "E[tau] / (k c + v + h) of Leviathan et al. 2023, theorem 3.8, with acceptance, draft cost c,"
    " verification cost v and host cost h as measured here, in times of a plain round",
}


def summary(document: Mapping[str, Any]) -> str:
    """What was measured and where, in a line."""
    machine, asked = document["hardware"], document["arguments"]
    where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
    law = f"temperature {asked['temperature']:g}" if asked["temperature"] else "greedy"
    target = Path(asked["target"]).name if asked["target"] else "the embedded target"
    exact = "exact" if document["exact"] else "not exact"
    return (
        f"{target} with {document['proposer']}, k {asked['k']}, verifier {document['verifier']} ({exact}); {law},"
        f" {document['dtype']}, {document['kernels']} kernels, {asked['batch']} at once,"
        f" {counted(asked['repeats'], 'repeat')} on {where}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trial with its place in the benchmark."""

    category: str
    name: str  # the contestant
    repeat: int
    trial: Trial


def report(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """The figures of each category, and of all under "overall"."""
    categories = list(dict.fromkeys(sample.category for sample in samples))
    groups = {category: [s for s in samples if s.category == category] for category in categories}
    return {name: _figures(group) for name, group in {**groups, OVERALL: list(samples)}.items()}


def compare(samples: Sequence[Sample], *, name: str = SPECULATIVE) -> dict[str, dict[str, Any]]:
    """The figures of plain decoding and of one other contestant, which then goes under "speculative"."""
    plain = [sample for sample in samples if sample.name == PLAIN]
    other = [replace(sample, name=SPECULATIVE) for sample in samples if sample.name == name]
    return report([*plain, *other])


def mean_cached(samples: Sequence[Sample], *, rows: int) -> float:
    """Tokens that a row's cache held on average while it decoded plainly."""
    trials = [sample.trial.stats for sample in samples if sample.name == PLAIN and sample.trial.stats]
    return sum(stats.prompt_tokens + stats.output_tokens / 2 for stats in trials) / rows / len(trials)


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    rates = {name: _rates(group) for name, group in by_name.items()}
    figures = {name: _variant(group, rates[name], rates[PLAIN]) for name, group in by_name.items()}
    plain, guessing = (_stats(by_name[name]) for name in (PLAIN, SPECULATIVE))
    figures[SPECULATIVE]["expected_speedup"] = expected_speedup(plain, guessing)
    return figures


def _variant(samples: Sequence[Sample], rates: Sequence[float | None], plain: Sequence[float | None]) -> Any:
    ratios = [rate / base if rate and base else None for rate, base in zip(rates, plain, strict=True)]
    figures: dict[str, Any] = {"tokens_per_s": _spread(rates), "speedup": _spread(ratios)}
    figures["latency_ms"] = _percentiles([gap for sample in samples for gap in sample.trial.inter_token_latencies])
    stats = _stats(samples)
    return figures | (stats.as_dict() if stats.passes else {})


def _rates(samples: Sequence[Sample]) -> list[float | None]:
    """Tokens a second, round by round."""
    paces: dict[int, DecodeSpeed] = {}
    for sample in samples:
        paces[sample.repeat] = paces.get(sample.repeat, DecodeSpeed(tokens=0, seconds=0.0)) + sample.trial.pace
    return [paces[round].rate for round in sorted(paces)]


def _stats(samples: Sequence[Sample]) -> Stats:
    return reduce(add, (sample.trial.stats for sample in samples if sample.trial.stats), Stats())


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """None when every completion was over in its first round."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def _percentiles(gaps: Sequence[float]) -> dict[str, float] | None:
    if not gaps:
        return None
    marks = torch.tensor(sorted(gaps), dtype=torch.float64)
    at = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    return {name: 1e3 * float(marks[round(share * (len(marks) - 1))]) for name, share in at.items()}


def expected_speedup(plain: Stats, guessing: Stats) -> float | None:
    """What acceptance and costs, as measured, should have gained; None where too little was measured.

    A pass that came without a guess counts as one whose guess was rejected, so E[tau] needs no case for it.
    """
    if not plain.rounds or not guessing.rounds or not plain.seconds:
        return None
    met = (guessing.passes, *guessing.accepted[:-1])
    acceptance = [kept / all if all else 0.0 for kept, all in zip(guessing.accepted, met, strict=False)]
    unit = plain.seconds / plain.rounds * guessing.rounds  # as many plain rounds as there were guessing ones
    return speedup.speedup(
        speedup.expected_tau(acceptance),
        k=1,  # all guesses of a round are one item here
        draft=guessing.draft_seconds / unit,
        verify=guessing.target_seconds / unit,
        host=guessing.host_seconds / unit,
    )
