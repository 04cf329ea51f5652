"""Texts that the console and the HTML page share: the conditions of a measurement, and formatted numbers."""

from __future__ import annotations

from outrider.models.torch.checkpoint import precision_text
from outrider.runtime.report.console import NONE, Document

_MEMORY_PARTS = {
    "target weights": "target_weight_bytes",
    "target cache": "target_cache_bytes",
    "draft weights": "draft_weight_bytes",
    "draft cache": "draft_cache_bytes",
    "other": "other_bytes",
}


def median_text(values: dict[str, float] | None) -> str:
    """Return the rounded median, or a dash if nothing was measured."""
    return f"{values['median']:.0f}" if values else NONE


def latency_text(values: dict[str, float] | None) -> str:
    """Return all percentiles in milliseconds, or a dash if nothing was measured."""
    return " ".join(f"{value:.1f}" for value in values.values()) if values else NONE


def conditions(document: Document) -> list[tuple[str, str]]:
    """Return the conditions of the measurement: hardware, versions, commit, rates, bytes per pass and arguments."""
    hardware = document["hardware"]
    limits = document["limits"]
    pairs = [
        ("processor", f"{hardware['cpu']}, {hardware['threads']} of {hardware['cores']} cores"),
        ("memory", _size(hardware["memory_bytes"])),
    ]
    if hardware["gpu"]:
        pairs.append(("GPU", f"{hardware['gpu']}, {_size(hardware['gpu_memory_bytes'])}"))
    pairs += rates(document)
    pairs += [
        (
            "bytes per pass",
            f"{_size(limits['bytes_per_pass'])}, of which weights {_size(limits['weight_bytes_per_pass'])}",
        ),
        ("bytes per token, plain", _size(limits["bytes_per_token"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())),
        ("commit", document["commit"] or "not from a checkout"),
        ("proposer, verifier", f"{document['proposer']}, {document['verifier']}"),
        ("precision", precision_text(document)),
        ("bits per weight", f"{document['weight_bits']:.3g}"),
        ("kernels, device", f"{document['kernels']}, {hardware['device']}"),
    ]
    if document["kernels"].startswith("native"):
        seconds = document["compile_seconds"]
        pairs.append(("compilation of the kernels", f"{seconds:.1f} s" if seconds else "done by an earlier run"))
    return pairs + [(f"--{name.replace('_', '-')}", text) for name, text in arguments(document).items()]


def rates(document: Document) -> list[tuple[str, str]]:
    """Return the memory bandwidth and the arithmetic rate before and after the benchmark."""
    before = document["rates"]["before"]
    after = document["rates"]["after"]
    pairs = []
    for kind, bandwidth in before["read_bytes_per_s"].items():
        bandwidth_after = after["read_bytes_per_s"][kind]
        text = f"{bandwidth / 1e9:.1f} GB/s, then {bandwidth_after / 1e9:.1f}"
        pairs.append((f"read bandwidth, {kind.replace('_', ' ')}", text))
    gemm = f"{before['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s, then {after['gemm_flops_per_s'] / 1e9:.0f}"
    return [*pairs, (f"matrix product in {document['dtype']}", gemm)]


def memory(document: Document) -> list[tuple[str, str]]:
    """Return the memory use, and how many more sequences would fit without the draft."""
    use = document["memory"]
    pairs = [(name, _size(use[key])) for name, key in _MEMORY_PARTS.items() if use[key]]
    pairs.append(("sequences", f"{use['sequences']} of {use['context']} tokens"))
    if use["draft_weight_bytes"]:
        formula = "(draft weights + draft cache) / (target cache / sequences)"
        pairs.append(("without the draft", f"{use['draft_in_sequences']:.1f} more sequences would fit: {formula}"))
    return pairs


def arguments(document: Document) -> dict[str, str]:
    """Return the arguments that have a value. A swept argument has all its values."""
    texts = {}
    for name, value in document["arguments"].items():
        if name != "sweep" and value is not None:
            texts[name] = f"{value:g}" if isinstance(value, float) else str(value)
    for name, values in document["arguments"]["sweep"].items():
        if values:
            texts["sweep k" if name == "k" else name] = ", ".join(f"{value:g}" for value in values)
    return texts


def _size(size: float | None) -> str:
    if size is None:
        return "unknown"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
