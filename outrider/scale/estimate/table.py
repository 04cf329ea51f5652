"""Print a projection as tables."""

from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.runtime.report.console import NONE, bytes_text, count_text, new_table
from outrider.scale.estimate.machines import MIDDLE


def show(document: dict[str, Any], console: Console) -> None:
    """Print the assumptions, a table for each context, where speculation stops paying, and the memory."""
    for line in _assumptions(document):
        console.print(line, highlight=False)
    for memory in document["memory"]:
        results = [result for result in document["results"] if result["context"] == memory["context"]]
        console.print(_table(memory, results, with_steps="rl" in document))
    note = f"This is {document['projection']}."
    for line in (*_limits(document), *_steps(document), *_separate(document), *_memory(document), note):
        console.print(line, highlight=False)


def _assumptions(document: dict[str, Any]) -> list[str]:
    machine = document["machine"]
    target = document["target"]
    acceptance = document["acceptance"]
    memory = NONE if machine["memory_bytes"] is None else f"{machine['memory_bytes'] / 1e9:.0f} GB"
    note = f" ({machine['note']})" if machine["note"] else ""
    lines = [
        f"[bold]Estimate[/bold], not a measurement: {target['name']} on {machine['name']}{note}.",
        f"Datasheet: {machine['read_bytes_per_s'] / 1e9:.1f} GB/s, {machine['bf16_flops_per_s'] / 1e12:.4g} TFLOP/s in"
        f" bf16, {machine['int8_ops_per_s'] / 1e12:.4g} in 8 bits, memory {memory}.",
        f"Target: {_size(target)}. {_draft(document['arguments']['proposer'], document['draft'])}",
        f"Acceptance, {acceptance['source']}: {_rates(acceptance)}.",
    ]
    if acceptance.get("exact") is False:
        lines.append("[red]The verifier of the benchmark was lossy[/red], and so is this estimate.")
    if acceptance.get("other"):
        lines.append(f"[red]Another proposer[/red]: {acceptance['other']}.")
    return [*lines, *_layout(document), *(_case(document, case) for case in document["efficiency"])]


def _layout(document: dict[str, Any]) -> list[str]:
    """Return how the model is spread over devices, and where the draft runs."""
    layout = document["layout"]
    lines = []
    link = layout["link"]
    if link:
        connected = f"linked by {link['bandwidth'] / 1e9:g} GB/s and {1e6 * link['latency']:g} µs per message"
        if layout["pipeline"] > 1:
            stages = "streamed over the link" if layout["streamed"] else "bound to devices"
            filled = ", filled with draft tokens" if layout["filled"] else ""
            lines.append(f"Pipeline of {layout['pipeline']} stages, {stages}{filled}, {connected}.")
        elif layout["expert"] > 1:
            lines.append(f"Experts spread over {layout['expert']} devices, {connected}.")
        elif document["machine"]["devices"] > 1:
            lines.append(f"Devices {connected}.")
    if device := document["draft_machine"]:
        what = {"none": "waits during verification", "continue": "goes on during verification"}
        doing = what.get(device["overlap"], f"has {device['hit']:.0%} of the next drafts ready")
        lines.append(f"The draft runs on its own {device['machine']['name']} and {doing}.")
    return lines


def _separate(document: dict[str, Any]) -> list[str]:
    """Return the devices of separate prefill and decode, in the middle case."""
    if "separate" not in document:
        return []
    separate = document["separate"]
    case = separate["cases"][MIDDLE]
    return [
        f"Separate prefill, {separate['rate']:g} requests/s of {separate['prompt_tokens']} +"
        f" {separate['output_tokens']} tokens, middle case: {count_text(case['prefill_groups'], 'prefill group')} and"
        f" {count_text(case['decode_groups'], 'decode group')} of batch {case['decode_batch']}"
        f" ({case['decode_groups_plain']} without a draft); first token after {1e3 * case['ttft_seconds']:.0f} ms;"
        f" {bytes_text(separate['cache_bytes_per_request'])} of KV cache per request,"
        f" {separate['transfer_bytes_per_s'] / 1e9:.2f} GB/s."
    ]


def _table(memory: dict[str, Any], results: list[dict[str, Any]], *, with_steps: bool) -> Table:
    """Return the table of one context. `with_steps` adds the speedup of a training step."""
    title = (
        f"Estimate, {memory['context']} cached tokens per sequence; tokens/s of one sequence, plain"
        " and speculative, and of all"
    )
    table = new_table(title)
    for name in ("batch", "case", "k", "tau", "plain", "speculative", "total", "speedup", "draft, verify ms", "GB"):
        table.add_column(name, justify="left" if name == "case" else "right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    if with_steps:
        table.add_column("step", justify="right", no_wrap=True)
    for result in results:
        table.add_section()
        batch = result["batch"]
        held_bytes = memory["held_bytes"][str(batch)]
        for i, (name, case) in enumerate(result["cases"].items()):
            is_first = i == 0
            table.add_row(
                str(batch) if is_first else "",
                name,
                str(case["k"]),
                f"{case['tau']:.2f}",
                _number(case["plain_tokens_per_s_per_sequence"]),
                _number(case["tokens_per_s_per_sequence"]),
                _number(case["tokens_per_s"]),
                f"{case['speedup']:.2f}",
                f"{case['draft_ms']:.2f} {case['verify_ms']:.2f}",
                f"{held_bytes / 1e9:.1f}" if is_first else "",
                case["bound"],
                _fits(memory, batch) if is_first else "",
                *([f"{case['step_speedup']:.2f}"] if with_steps else []),
                style="bold" if name == MIDDLE else "dim",
            )
    return table


def _limits(document: dict[str, Any]) -> list[str]:
    """Return where speculation stops paying, and what parallel drafting could gain."""
    lines = []
    for entry in document["stops_paying"]:
        limits = {name: batch for name, batch in entry.items() if name != "context"}
        cases = (f"{name} {'above 65536' if batch is None else batch}" for name, batch in limits.items())
        lines.append(f"Batch from which no draft pays, {entry['context']} cached tokens: {', '.join(cases)}.")
    middle = [result["cases"][MIDDLE] for result in document["results"]]
    gains = [case["ahead"] for case in middle if case["k"]]
    if gains and gains[0] and max(gains) > 1:
        lines.append(
            "Drafting in parallel on other hardware could gain at most another factor of"
            f" {max(gains):.2f} (1 + draft / verify, middle case)."
        )
    return lines


def _steps(document: dict[str, Any]) -> list[str]:
    """Return what the speedup of a training step is limited by."""
    if "rl" not in document:
        return []
    training = document["rl"]
    share = f"{training['generation_share']:.0%}"
    overlap = f", and other work hides it during {training['overlap']:.0%} of the step" if training["overlap"] else ""
    limit = "" if training["limit"] is None else f"; the speedup is at most {training['limit']:.2f}"
    return [f"step: speedup of a training step. Generation takes {share} of it{overlap}{limit}."]


def _memory(document: dict[str, Any]) -> list[str]:
    lines = []
    for entry in document["memory"]:
        parts = [
            f"target weights {bytes_text(entry['target_weight_bytes'])}",
            f"its cache {bytes_text(entry['target_cache_bytes_per_sequence'])} per sequence",
        ]
        if entry["draft_weight_bytes"]:
            parts.append(f"draft weights {bytes_text(entry['draft_weight_bytes'])}")
            parts.append(f"its cache {bytes_text(entry['draft_cache_bytes_per_sequence'])} per sequence")
        if entry["sequences"] is None:
            sequences = "the memory is unknown; give --memory in GB"
        else:
            sequences = (
                f"{count_text(entry['sequences'], 'sequence')} fit in {bytes_text(entry['usable_bytes'])}, and"
                f" {entry['sequences_without_draft']} without a draft"
            )
        lines.append(f"Memory with {entry['context']} cached tokens: {', '.join(parts)}; {sequences}.")
    return lines


def _size(model: dict[str, Any]) -> str:
    weights = model["weight_bytes"] * 8 / model["bits"]
    experts = f", {model['active_weights'] / 1e9:.3g}B active per token" if model["experts"] else ""
    count = f"{weights / 1e9:.3g}B" if weights >= 1e9 else f"{weights / 1e6:.3g}M"
    return f"{count} weights of {model['bits']:g} bits{experts}"


def _draft(name: str, draft: dict[str, Any]) -> str:
    if draft["model"] is None:
        return f"Draft by {name}: {1e6 * draft['host_seconds_per_sequence']:g} µs of host time per sequence and round."
    return f"Draft by {name}: {_size(draft['model'])}, {draft['passes']}."


def _rates(acceptance: dict[str, Any]) -> str:
    rates, nodes = acceptance["rates"], acceptance["nodes"]
    text = " ".join(f"{100 * rate:.0f}%" for rate in rates) + (" at each position" if len(rates) == 1 else "")
    return text if nodes == 1 else f"{text}, {nodes:.2f} draft tokens per position"


def _case(document: dict[str, Any], case: dict[str, Any]) -> str:
    parts = [
        f"{case['bandwidth']:.0%} of the bandwidth",
        f"{case['arithmetic']:.0%} of the arithmetic",
        f"{case['exposed']:.0%} of the shorter time exposed",
        f"{1e3 * case['round_seconds']:g} ms per round",
        f"{1e6 * case['layer_seconds']:g} µs per layer",
    ]
    if document["draft"]["measured_pass_seconds"] is None:
        what = "per pass of the draft" if document["draft"]["model"] else "per call of the lookup"
        parts.append(f"{1e6 * case['draft_pass_seconds']:g} µs {what}")
    if document["machine"]["devices"] > 1:
        parts.append(f"{1e6 * case['allreduce_seconds']:g} µs per layer for all-reduces")
    free = document["free_tokens"][case["name"]]
    limit = "" if free is None else f"; arithmetic takes as long as reading the weights at {free:.0f} tokens per pass"
    return f"{case['name'].capitalize()}: {', '.join(parts)}{limit}."


def _fits(memory: dict[str, Any], batch: int) -> str:
    if memory["sequences"] is None:
        return NONE
    return "yes" if batch <= memory["sequences"] else "[red]no[/red]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
