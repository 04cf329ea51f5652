"""Computes the document and the table from samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cores import disturbed
from remote import Plan
from rich import box
from rich.console import Console
from rich.table import Table

_NONE = "–"
_BUSY = 0.02  # cores: an idle worker that uses more disturbs the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn of a contestant: it completed one prompt."""

    name: str
    round: int
    category: str
    prompt: str
    answer: Mapping[str, Any]
    seconds: float  # duration of the turn
    idle: Mapping[str, float]  # CPU seconds of the other contestants during the turn
    foreign: float  # CPU seconds of other processes during the turn


def document(
    plans: Sequence[Plan], ready: Mapping[str, Any], failed: Mapping[str, str], samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    """Return one entry for each contestant, in the order of the command line."""
    first = plans[0].name
    base = [] if first in failed else _of(samples, first)
    entries = []
    for plan in plans:
        k = plan.options["k"]
        entry: dict[str, Any] = {
            "name": plan.name,
            "engine": plan.engine,
            "mode": plan.options["mode"],
            "k": k if k == "auto" else int(k),
            "dtype": plan.options["dtype"],
        }
        entry |= {name: ready.get(plan.name, {}).get(name) for name in ("versions", "settings", "load_seconds")}
        if plan.name in failed:
            entry["error"] = failed[plan.name]
        else:
            entry |= _figures(_of(samples, plan.name), base) | _disturbances(samples, plan.name)
        entries.append(entry)
    return entries


def _of(samples: Sequence[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.name == name]


def _figures(samples: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of a contestant. `base` has the samples of the first contestant."""
    rates = _rates(samples)
    base_rates = _rates(base)
    base_texts = {sample.prompt: sample.answer["text"] for sample in base}
    same_text = None
    if base_texts:
        same = [sample.answer["text"] == base_texts[sample.prompt] for sample in samples]
        same_text = sum(same) / len(same)
    by_category = {}
    for category in dict.fromkeys(sample.category for sample in samples):
        category_rates = _rates([sample for sample in samples if sample.category == category])
        by_category[category] = _spread(list(category_rates.values()))
    return {
        "tokens_per_s": _spread(list(rates.values())),
        "ratio": _spread([rates[round] / base_rates[round] for round in rates if base_rates.get(round)]),
        "by_category": by_category,
        "ttft_ms": 1e3 * median(sample.answer["ttft"] for sample in samples),
        "tokens": sum(sample.answer["tokens"] for sample in samples if sample.round == 1),
        "same_text": same_text,
    }


def _rates(samples: Sequence[Sample]) -> dict[int, float]:
    """Return the tokens/s of each round, pooled over prompts. Tokens of the first chunk are not counted."""
    rates = {}
    for round in sorted({sample.round for sample in samples}):
        answers = [sample.answer for sample in samples if sample.round == round]
        seconds = sum(answer["seconds_decode"] for answer in answers)
        if seconds > 0:
            rates[round] = sum(answer["tokens"] - answer["first_chunk_tokens"] for answer in answers) / seconds
    return rates


def _disturbances(samples: Sequence[Sample], name: str) -> dict[str, Any]:
    """Return the cores that a contestant used during turns of others, and how many of its own turns were disturbed."""
    own = _of(samples, name)
    others = [sample for sample in samples if name in sample.idle]
    seconds = sum(sample.seconds for sample in others)
    return {
        "idle_cpu": sum(sample.idle[name] for sample in others) / seconds if seconds else None,
        "turns": len(own),
        "disturbed_turns": sum(disturbed(sample.foreign, sample.seconds) for sample in own),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the table and its notes."""
    arguments = report["arguments"]
    hardware = report["hardware"]
    entries = report["contestants"]
    device = hardware["gpu"] or f"{hardware['cpu']}, {arguments['threads']} of {hardware['cores']} cores"
    console.print(
        f"Greedy, batch 1, up to {arguments['max_tokens']} tokens, {arguments['rounds']} rounds in turns on {device}",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("engine", "mode", "k", "weights"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens/s", "ratio", "ttft, ms", "same text"):
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        table.add_row(*_row(entry))
    console.print(table)
    for line in _notes(entries):
        console.print(line, highlight=False, markup=False)


def _row(entry: Mapping[str, Any]) -> list[str]:
    k = _NONE if entry["mode"] == "plain" else str(entry["k"])
    head = [entry["engine"], entry["mode"], k, entry["dtype"]]
    if "error" in entry:
        return [*head, _NONE, _NONE, _NONE, _NONE]
    same_text = _NONE if entry["same_text"] is None else f"{100 * entry['same_text']:.0f}%"
    return [
        *head,
        _spread_text(entry["tokens_per_s"], ".0f"),
        _spread_text(entry["ratio"], ".2f"),
        f"{entry['ttft_ms']:.0f}",
        same_text,
    ]


def _notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [f"{entry['name']}: {entry['error']}" for entry in entries if "error" in entry]
    for entry in entries:
        if (entry.get("idle_cpu") or 0.0) > _BUSY:
            notes.append(f"{entry['name']} used {entry['idle_cpu']:.2f} cores while others were measured")
        if entry.get("disturbed_turns"):
            turns = f"{entry['disturbed_turns']} of {entry['turns']}"
            notes.append(f"{entry['name']}: other processes disturbed {turns} turns, so its speed is too low")
    return [
        *notes,
        "tokens/s count decoding only, from the first token of a completion to its last: pooled over prompts, then the"
        " median and range over rounds. The ratio is to the first contestant, within a round. Same text: the share of"
        " completions that equal those of the first contestant; in bf16 engines round differently.",
    ]


def _spread_text(values: Mapping[str, float] | None, form: str) -> str:
    if values is None:
        return _NONE
    return f"{values['median']:{form}} [dim]{values['min']:{form}}–{values['max']:{form}}[/dim]"
