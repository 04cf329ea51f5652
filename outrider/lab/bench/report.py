"""Computes the reported numbers from trials."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from statistics import median
from typing import Any

import torch

from outrider.core.stats import Stats
from outrider.drafting.plan import speedup
from outrider.lab.bench.variants import Trial
from outrider.lab.common.clock import DecodeSpeed
from outrider.models.loader.embedded import model_name
from outrider.models.torch.checkpoint import precision_text
from outrider.runtime.grouping import group_by
from outrider.runtime.report.console import count_text

PLAIN = "plain"
SPECULATIVE = "speculative"
OVERALL = "overall"
DEFINITIONS: Mapping[str, str] = {
    "tokens_per_s": "decoding only: the tokens after the first round at whose end every sequence had one, over the time"
    " from the end of that round to the end of the last; pooled over prompts, then the median over repeats",
    "speedup": "tokens_per_s over that of plain: the median of this ratio over repeats",
    "tau": "tokens per pass of a decoding sequence, with the bonus token; 1 is plain decoding",
    "acceptance_by_position": "the share of draft tokens that were accepted, among those whose ancestors were all"
    " accepted",
    "latency_ms": "time between the tokens of a sequence; the tokens of one round arrive together, so the first one"
    " waits for the whole round and the others do not wait",
    "draft_ms, target_ms, host_ms": "a round of decoding: drafting, the target's forward pass, and the rest; on a GPU"
    " the wait for the device counts as host",
    "experts": "distinct routed experts of a layer that a pass of the target used, the mean over layers and rounds; 0:"
    " the target has none, or they are not counted on this device",
    "expected_speedup": "E[tau] / (k c + v + h) of Leviathan et al. 2023, theorem 3.8, with the measured acceptance,"
    " draft cost c, verification cost v and host cost h, in units of a plain round",
}


def summary(document: Mapping[str, Any]) -> str:
    """Return one line that says what was measured, and where."""
    hardware = document["hardware"]
    arguments = document["arguments"]
    device = hardware["gpu"] or f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"
    sampling = f"temperature {arguments['temperature']:g}" if arguments["temperature"] else "greedy"
    target = model_name(arguments["target"]) if arguments["target"] else "the embedded target"
    exact = "exact" if document["exact"] else f"not exact{bound_text(document)}"
    return (
        f"{target} with {document['proposer']}, k {arguments['k']}, verifier {document['verifier']} ({exact});"
        f" {sampling}, {precision_text(document)}, {document['kernels']} kernels, {arguments['batch']} at once,"
        f" {count_text(arguments['repeats'], 'repeat')} on {device}"
    )


def bound_text(document: Mapping[str, Any]) -> str:
    """Return ", " and the bound of a document's verifier; empty if it declares none."""
    bound = document.get("bound")
    return f", {bound['kind']} {bound['value']}" if bound else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trial, with its category, variant and repeat."""

    category: str
    name: str  # of the variant
    repeat: int
    trial: Trial


def report(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return the figures of each category, and those of all categories under "overall"."""
    categories = group_by(samples, lambda sample: sample.category)
    figures = {category: _figures(group) for category, group in categories.items()}
    return {**figures, OVERALL: _figures(samples)}


def compare(samples: Sequence[Sample], *, name: str = SPECULATIVE) -> dict[str, dict[str, Any]]:
    """Return the figures of plain decoding and of the variant `name`, which is called "speculative" in the result."""
    plain = [sample for sample in samples if sample.name == PLAIN]
    other = [replace(sample, name=SPECULATIVE) for sample in samples if sample.name == name]
    return report([*plain, *other])


def mean_cached(samples: Sequence[Sample], *, seqs: int) -> float:
    """Return the mean number of cached tokens of a sequence during plain decoding."""
    trials = [sample.trial.stats for sample in samples if sample.name == PLAIN and sample.trial.stats]
    return sum(stats.prompt_tokens + stats.output_tokens / 2 for stats in trials) / seqs / len(trials)


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    by_name: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_name[sample.name].append(sample)
    rates = {name: _rates(group) for name, group in by_name.items()}
    figures = {name: _variant(group, rates[name], rates[PLAIN]) for name, group in by_name.items()}
    plain = _stats(by_name[PLAIN])
    speculative = _stats(by_name[SPECULATIVE])
    figures[SPECULATIVE]["expected_speedup"] = expected_speedup(plain, speculative)
    return figures


def _variant(samples: Sequence[Sample], rates: Sequence[float | None], plain: Sequence[float | None]) -> Any:
    ratios = [rate / base if rate and base else None for rate, base in zip(rates, plain, strict=True)]
    figures: dict[str, Any] = {"tokens_per_s": _spread(rates), "speedup": _spread(ratios)}
    figures["latency_ms"] = _percentiles([gap for sample in samples for gap in sample.trial.inter_token_latencies])
    stats = _stats(samples)
    return figures | (stats.as_dict() if stats.passes else {})


def _rates(samples: Sequence[Sample]) -> list[float | None]:
    """Return the tokens/s of each round."""
    speeds: dict[int, DecodeSpeed] = {}
    for sample in samples:
        speeds[sample.repeat] = speeds.get(sample.repeat, DecodeSpeed(tokens=0, seconds=0.0)) + sample.trial.speed
    return [speeds[round].rate for round in sorted(speeds)]


def _stats(samples: Sequence[Sample]) -> Stats:
    return reduce(add, (sample.trial.stats for sample in samples if sample.trial.stats), Stats())


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return median and range, or None if every completion ended in its first round."""
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None


def _percentiles(gaps: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles in milliseconds of gaps in seconds."""
    if not gaps:
        return None
    ordered = torch.tensor(sorted(gaps), dtype=torch.float64)
    shares = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
    return {name: 1e3 * float(ordered[round(share * (len(ordered) - 1))]) for name, share in shares.items()}


def expected_speedup(plain: Stats, speculative: Stats) -> float | None:
    """Return the speedup that follows from measured acceptance and costs, or None if too little was measured.

    A pass without a draft counts as one whose first draft token was rejected. The formula so holds without a case for
    it.
    """
    if not plain.rounds or not speculative.rounds or not plain.seconds:
        return None
    reached = (speculative.passes, *speculative.accepted[:-1])
    acceptance = [
        accepted / count if count else 0.0 for accepted, count in zip(speculative.accepted, reached, strict=False)
    ]
    unit = plain.seconds / plain.rounds * speculative.rounds  # seconds of as many plain rounds
    return speedup.speedup(
        speedup.expected_tau(acceptance),
        k=1,  # the draft cost is that of all draft tokens of a round
        draft=speculative.draft_seconds / unit,
        verify=speculative.target_seconds / unit,
        host=speculative.host_seconds / unit,
    )
