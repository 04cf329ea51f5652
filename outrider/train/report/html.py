"""Makes the HTML report of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.runtime.report.page import html_page, page_header, pairs_table, section


def page(document: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Return the HTML report of a training, from its document and the lines of its log."""
    from outrider.train.report.plots import draw

    conditions = section("Conditions", pairs_table(_conditions(document, lines)))
    return html_page("outrider train", _header(document), draw(lines), conditions)


def _header(document: dict[str, Any]) -> str:
    about = (
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['steps']} steps,"
        f" {document['seconds'] / 60:.1f} minutes; tau is measured with k = {document['k']}."
    )
    tiles = [(f"{result['tau']:.2f}", f"tokens per pass at {name}") for name, result in document["evaluation"].items()]
    version = document["versions"]["outrider"]
    return page_header(f"outrider {version} train", f"{document['kind']} for {document['target']}", about, tiles)


def _conditions(document: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    hardware = document["hardware"]
    tokens = sum(line["tokens"] for line in lines)
    answer_seconds = sum(line["seconds"].get("answers", 0) for line in lines)
    step_seconds = sum(line["seconds"].get("steps", 0) for line in lines)
    return [
        ("trained on", f"{tokens:,} tokens in {len(lines)} generation cycles"),
        ("time", f"{answer_seconds:.0f} s of answers, {step_seconds:.0f} s of steps"),
        ("machine", f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads"),
        ("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())),
        ("commit", document["commit"] or "none"),
    ]
