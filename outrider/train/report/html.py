"""The report of a training as a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.report.page import framed, opening, pairs, section


def page(document: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The page as text."""
    from outrider.train.report.plots import draw

    rest = section("Conditions", pairs(_conditions(document, lines)))
    return framed("outrider train", _opening(document), draw(lines), rest)


def _opening(document: dict[str, Any]) -> str:
    about = (
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['steps']} steps,"
        f" {document['seconds'] / 60:.1f} minutes; tau is measured with k = {document['k']}."
    )
    tiles = [(f"{each['tau']:.2f}", f"tokens a pass at {name}") for name, each in document["held_out"].items()]
    version, title = document["versions"]["outrider"], f"{document['kind']} for {document['target']}"
    return opening(f"outrider {version} train", title, about, tiles)


def _conditions(document: dict[str, Any], lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    hardware, commit = document["hardware"], document["commit"]
    spent = {name: sum(line["seconds"].get(name, 0) for line in lines) for name in ("answers", "steps")}
    return [
        ("learned from", f"{sum(line['tokens'] for line in lines):,} tokens in {len(lines)} waves"),
        ("time", f"{spent['answers']:.0f} s of answers, {spent['steps']:.0f} s of steps"),
        ("machine", f"{hardware['gpu'] or hardware['cpu']}, {hardware['threads']} threads"),
        ("versions", ", ".join(f"{name} {version}" for name, version in document["versions"].items())),
        ("commit", commit or "none"),
    ]
