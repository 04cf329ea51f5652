"""The projection as people read it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.project.machines import MIDDLE
from outrider.report.console import NONE, counted, titled


def show(document: dict[str, Any], console: Console) -> None:
    """Print what was assumed, a table for each context, where it stops paying, and the memory."""
    for line in _assumed(document):
        console.print(line, highlight=False)
    for memory in document["memory"]:
        places = [place for place in document["results"] if place["context"] == memory["context"]]
        console.print(_places(memory, places))
    for line in (*_ends(document), *_memory(document), _range(document)):
        console.print(line, highlight=False)


def _assumed(document: dict[str, Any]) -> list[str]:
    place, target, draft, kept = (document[name] for name in ("machine", "target", "draft", "acceptance"))
    memory = NONE if place["memory_bytes"] is None else f"{place['memory_bytes'] / 1e9:.0f} GB"
    note = f" ({place['note']})" if place["note"] else ""
    lines = [
        f"[bold]Estimate[/bold], not a measurement: {target['name']} on {place['name']}{note}.",
        f"Datasheet: {place['read_bytes_per_s'] / 1e9:.1f} GB/s, {place['bf16_flops_per_s'] / 1e12:.4g} TFLOP/s in"
        f" bf16, {place['int8_ops_per_s'] / 1e12:.4g} in 8 bits, memory {memory}.",
        f"Target: {_size(target)}. {_draft(document['arguments']['proposer'], draft)}",
        f"Acceptance, {kept['source']}: {_rates(document)}{_nodes(kept['nodes'])}.",
    ]
    if kept.get("exact") is False:
        lines.append("[red]The verifier of the benchmark was lossy[/red], and so is this estimate.")
    if kept.get("other"):
        lines.append(f"[red]Another proposer[/red]: {kept['other']}.")
    return [*lines, *(_case(document, each) for each in document["efficiency"])]


def _places(memory: dict[str, Any], places: list[dict[str, Any]]) -> Table:
    title = (
        f"Estimate, {memory['context']} cached tokens per sequence; tokens/s of one sequence, plain and"
        " speculative, and of all"
    )
    table = titled(title)
    for name in ("batch", "case", "k", "tau", "plain", "speculative", "total", "speedup", "draft, verify ms", "GB"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    for place in places:
        table.add_section()
        batch, held = place["batch"], memory["held_bytes"][str(place["batch"])]
        for name, each in place["cases"].items():
            first, middle = name == next(iter(place["cases"])), name == MIDDLE
            table.add_row(
                str(batch) if first else "",
                name,
                str(each["k"]),
                f"{each['tau']:.2f}",
                _number(each["plain_tokens_per_s_per_sequence"]),
                _number(each["tokens_per_s_per_sequence"]),
                _number(each["tokens_per_s"]),
                f"{each['speedup']:.2f}",
                f"{each['draft_ms']:.2f} {each['verify_ms']:.2f}",
                f"{held / 1e9:.1f}" if first else "",
                each["bound"],
                _fits(memory, batch) if first else "",
                style="bold" if middle else "dim",
            )
    return table


def _ends(document: dict[str, Any]) -> list[str]:
    lines = []
    for each in document["stops_paying"]:
        cases = (f"{name} {_end(batch)}" for name, batch in each.items() if name != "context")
        lines.append(f"Batch from which no draft pays, {each['context']} cached tokens: {', '.join(cases)}.")
    aheads = [place["cases"][MIDDLE]["ahead"] for place in document["results"] if place["cases"][MIDDLE]["k"]]
    if aheads and aheads[0]:
        lines.append(
            f"Drafting in parallel on other hardware could gain at most another factor of {max(aheads):.2f}"
            " (1 + draft / verify, middle case)."
        )
    return lines


def _memory(document: dict[str, Any]) -> list[str]:
    lines = []
    for each in document["memory"]:
        parts = [
            f"target weights {_bytes(each['target_weight_bytes'])}",
            f"its cache {_bytes(each['target_cache_bytes_per_sequence'])} per sequence",
        ]
        if each["draft_weight_bytes"]:
            parts.append(f"draft weights {_bytes(each['draft_weight_bytes'])}")
            parts.append(f"its cache {_bytes(each['draft_cache_bytes_per_sequence'])} per sequence")
        sequences = (
            "the memory is unknown; give --memory in GB"
            if each["sequences"] is None
            else f"{counted(each['sequences'], 'sequence')} fit in {_bytes(each['usable_bytes'])}, and"
            f" {each['sequences_without_draft']} without a draft"
        )
        lines.append(f"Memory with {each['context']} cached tokens: {', '.join(parts)}; {sequences}.")
    return lines


def _range(document: dict[str, Any]) -> str:
    return f"This is {document['projection']}."


def _size(model: dict[str, Any]) -> str:
    size, active = model["weight_bytes"] * 8 / model["bits"], model["active_weights"]
    experts = f", {active / 1e9:.3g}B active per token" if model["experts"] else ""
    count = f"{size / 1e9:.3g}B" if size >= 1e9 else f"{size / 1e6:.3g}M"
    return f"{count} weights of {model['bits']:g} bits{experts}"


def _draft(name: str, draft: dict[str, Any]) -> str:
    if draft["model"] is None:
        return f"Draft by {name}: {1e6 * draft['host_seconds_per_sequence']:g} µs of host time per sequence and round."
    return f"Draft by {name}: {_size(draft['model'])}, {draft['passes']}."


def _rates(document: dict[str, Any]) -> str:
    rates = document["acceptance"]["rates"]
    return " ".join(f"{100 * rate:.0f}%" for rate in rates) + (" at each position" if len(rates) == 1 else "")


def _nodes(nodes: float) -> str:
    return "" if nodes == 1 else f", {nodes:.2f} draft tokens per position"


def _case(document: dict[str, Any], each: dict[str, Any]) -> str:
    parts = [
        f"{each['bandwidth']:.0%} of the bandwidth",
        f"{each['arithmetic']:.0%} of the arithmetic",
        f"{each['exposed']:.0%} of the shorter time exposed",
        f"{1e3 * each['round_seconds']:g} ms per round",
        f"{1e6 * each['layer_seconds']:g} µs per layer",
    ]
    if document["machine"]["devices"] > 1:
        parts.append(f"{1e6 * each['allreduce_seconds']:g} µs per layer for all-reduces")
    free = document["free_tokens"][each["name"]]
    return f"{each['name'].capitalize()}: {', '.join(parts)}{'' if free is None else f'; {free:.0f} free tokens'}."


def _fits(memory: dict[str, Any], batch: int) -> str:
    if memory["sequences"] is None:
        return NONE
    return "yes" if batch <= memory["sequences"] else "[red]no[/red]"


def _end(batch: int | None) -> str:
    return "never up to 65536" if batch is None else str(batch)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _bytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
