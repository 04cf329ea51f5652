"""What the console and the page word alike: under what a document was measured, and figures as text."""

from __future__ import annotations

from outrider.report.console import NONE, Document

_PARTS = {
    "target weights": "target_weight_bytes",
    "target cache": "target_cache_bytes",
    "draft weights": "draft_weight_bytes",
    "draft cache": "draft_cache_bytes",
    "other": "other_bytes",
}


def median_text(values: dict[str, float] | None) -> str:
    """The median, rounded; a dash where nothing was measured."""
    return f"{values['median']:.0f}" if values else NONE


def latency_text(values: dict[str, float] | None) -> str:
    """All percentiles, in milliseconds."""
    return " ".join(f"{value:.1f}" for value in values.values()) if values else NONE


def conditions(document: Document) -> list[tuple[str, str]]:
    """Hardware, versions, commit, rates, needs and arguments."""
    hardware, limits = document["hardware"], document["limits"]
    pairs = [
        ("processor", f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"),
        ("memory", _size(hardware["memory_bytes"])),
    ]
    if hardware["gpu"]:
        pairs.append(("GPU", f"{hardware['gpu']}, {_size(hardware['gpu_memory_bytes'])}"))
    pairs += rates(document)
    pairs += [
        (
            "bytes a pass",
            f"{_size(limits['bytes_per_pass'])}, of which weights {_size(limits['weight_bytes_per_pass'])}",
        ),
        ("bytes a token, plain", _size(limits["bytes_per_token"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())),
        ("commit", document["commit"] or "not from a checkout"),
        ("proposer, verifier", f"{document['proposer']}, {document['verifier']}"),
        ("precision, kernels, device", f"{document['dtype']}, {document['kernels']}, {hardware['device']}"),
        ("bits of a weight", str(document["weight_bits"])),
    ]
    if document["kernels"].startswith("native"):
        took = document["compile_seconds"]
        pairs.append(("compiling the kernels", f"{took:.1f} s" if took else "done by an earlier run"))
    return pairs + [(f"--{name.replace('_', '-')}", text) for name, text in arguments(document).items()]


def rates(document: Document) -> list[tuple[str, str]]:
    """What the machine delivered before the benchmark and after it."""
    before, after = (document["rates"][moment] for moment in ("before", "after"))
    pairs = [
        (
            f"reads from {kind.replace('_', ' ')}",
            f"{speed / 1e9:.1f} GB/s, then {after['read_bytes_per_s'][kind] / 1e9:.1f}",
        )
        for kind, speed in before["read_bytes_per_s"].items()
    ]
    products = f"{before['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s, then {after['gemm_flops_per_s'] / 1e9:.0f}"
    return [*pairs, (f"multiplies in {document['dtype']}", products)]


def memory(document: Document) -> list[tuple[str, str]]:
    """What lies in memory, and what the draft's part of it could hold instead."""
    held = document["memory"]
    pairs = [(name, _size(held[key])) for name, key in _PARTS.items() if held[key]]
    pairs.append(("sequences", f"{held['sequences']} of {held['context']} tokens"))
    if held["draft_weight_bytes"]:
        formula = "(draft weights + draft cache) / (target cache / rows)"
        pairs.append(("without the draft", f"room for {held['draft_in_sequences']:.1f} more sequences: {formula}"))
    return pairs


def arguments(document: Document) -> dict[str, str]:
    """Those that were given or have a default, the swept ones with all their values."""
    given = {name: value for name, value in document["arguments"].items() if name != "sweep"}
    swept = {name: values for name, values in document["arguments"]["sweep"].items() if values}
    both = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in given.items()
        if value is not None
    }
    for name, values in swept.items():
        both["sweep k" if name == "k" else name] = ", ".join(f"{value:g}" for value in values)
    return both


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
