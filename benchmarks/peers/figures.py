"""From samples to the table and the document."""

from __future__ import annotations

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
_BUSY = 0.02  # of a core: an idle worker that uses more disturbs the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One turn: a contestant completed a prompt."""

    name: str
    round: int
    category: str
    prompt: str
    answer: Mapping[str, Any]
    seconds: float  # that the turn took
    idle: Mapping[str, float]  # CPU seconds that the other contestants used meanwhile
    foreign: float  # CPU seconds that went to none of them


def document(
    plans: Sequence[Plan], ready: Mapping[str, Any], failed: Mapping[str, str], samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    """One entry for each contestant, in the order in which they were named."""
    first = plans[0].name
    entries = []
    for plan in plans:
        asked = plan.options
        entry: dict[str, Any] = {"name": plan.name, "engine": plan.engine, "mode": asked["mode"]}
        entry |= {"k": int(asked["k"]), "dtype": asked["dtype"]}
        entry |= {name: ready.get(plan.name, {}).get(name) for name in ("versions", "settings", "load_seconds")}
        if plan.name in failed:
            entry["error"] = failed[plan.name]
        else:
            base = [] if first in failed else _of(samples, first)
            entry |= _figures(_of(samples, plan.name), base) | _trouble(samples, plan.name)
        entries.append(entry)
    return entries


def _of(samples: Sequence[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.name == name]


def _figures(own: Sequence[Sample], base: Sequence[Sample]) -> dict[str, Any]:
    rates, others = _rates(own), _rates(base)
    texts = {sample.prompt: sample.answer["text"] for sample in base}
    same = [sample.answer["text"] == texts[sample.prompt] for sample in own] if texts else []
    return {
        "tokens_per_s": _spread(list(rates.values())),
        "ratio": _spread([rates[round] / others[round] for round in rates if others.get(round)]),
        "by_category": {
            category: _spread(list(_rates([s for s in own if s.category == category]).values()))
            for category in dict.fromkeys(sample.category for sample in own)
        },
        "ttft_ms": 1e3 * median(sample.answer["ttft"] for sample in own),
        "tokens": sum(sample.answer["tokens"] for sample in own if sample.round == 1),
        "same_text": sum(same) / len(same) if same else None,
    }


def _rates(samples: Sequence[Sample]) -> dict[int, float]:
    """Tokens a second, round by round, pooled over prompts; tokens that came with the first one are not counted."""
    rates = {}
    for round in sorted({sample.round for sample in samples}):
        answers = [sample.answer for sample in samples if sample.round == round]
        seconds = sum(answer["seconds_decode"] for answer in answers)
        if seconds > 0:
            rates[round] = sum(answer["tokens"] - answer["opening"] for answer in answers) / seconds
    return rates


def _trouble(samples: Sequence[Sample], name: str) -> dict[str, Any]:
    """Cores that a contestant kept busy during the turns of others, and how many of its own turns were disturbed."""
    own, others = _of(samples, name), [sample for sample in samples if name in sample.idle]
    seconds = sum(sample.seconds for sample in others)
    return {
        "idle_cpu": sum(sample.idle[name] for sample in others) / seconds if seconds else None,
        "turns": len(own),
        "disturbed_turns": sum(disturbed(sample.foreign, sample.seconds) for sample in own),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    return {"median": median(values), "min": min(values), "max": max(values)} if values else None


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the table, and under it what a reader must know."""
    asked, where = report["arguments"], report["hardware"]
    entries = report["contestants"]
    place = where["gpu"] or f"{where['cpu']}, {asked['threads']} of {where['cores']} cores"
    console.print(
        f"Greedy, batch 1, up to {asked['max_tokens']} tokens, {asked['rounds']} rounds in turns on {place}",
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
    head = [entry["engine"], entry["mode"], _NONE if entry["mode"] == "plain" else str(entry["k"]), entry["dtype"]]
    if "error" in entry:
        return [*head, _NONE, _NONE, _NONE, _NONE]
    speed, ratio, same = entry["tokens_per_s"], entry["ratio"], entry["same_text"]
    shares = _NONE if same is None else f"{100 * same:.0f}%"
    return [*head, _spread_text(speed, ".0f"), _spread_text(ratio, ".2f"), f"{entry['ttft_ms']:.0f}", shares]


def _notes(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [f"{entry['name']}: {entry['error']}" for entry in entries if "error" in entry]
    for entry in entries:
        if (entry.get("idle_cpu") or 0.0) > _BUSY:
            notes.append(f"{entry['name']} kept {entry['idle_cpu']:.2f} cores busy while others were measured")
        if entry.get("disturbed_turns"):
            turns = f"{entry['disturbed_turns']} of {entry['turns']}"
            notes.append(f"{entry['name']}: other processes disturbed {turns} turns; its figures are too low")
    return [
        *notes,
        "tokens/s count decoding alone, from a completion's first token to its last: pooled over prompts, then the"
        " median and range over rounds; the ratio is to the first contestant, within a round. Same text: completions"
        " equal to those of the first contestant; in bf16 engines round differently.",
    ]


def _spread_text(values: Mapping[str, float] | None, form: str) -> str:
    if values is None:
        return _NONE
    return f"{values['median']:{form}} [dim]{values['min']:{form}}–{values['max']:{form}}[/dim]"
