"""The report of a training as a page: one file, with nothing from outside and nothing that runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError

_STYLE = Path(__file__).parent.parent / "report.css"


def check_report(file: str | Path) -> None:
    """Say before a training what would keep its report from being written.

    Raises:
        OutriderError: matplotlib is missing, or there is no place for the file.
    """
    if find_spec("matplotlib") is None:
        raise OutriderError('--report draws with matplotlib, which is missing; pip install "outrider[report]"')
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OutriderError(f"--report {file} is no file in a folder that exists; use for example report.html")


def write_report(document: dict[str, Any], lines: Sequence[dict[str, Any]], file: str | Path) -> None:
    """Write the page of what `Training.run` returned.

    Raises:
        OutriderError: the file cannot be written.
    """
    text = page(document, lines)
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"{file} cannot be written ({error.strerror}); give --report another file") from error


def page(document: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """The page as text."""
    from outrider.train.plots import draw

    figures = "".join(
        f"<figure><h3>{escape(plot.title)}</h3>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in draw(lines)
    )
    conditions = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _conditions(document, lines)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>outrider train</title>\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n{_head(document)}"
        f'<section class="plots">\n{figures}</section>\n<h2>Conditions</h2>'
        f'<div class="table"><table class="pairs">{conditions}</table></div>\n</body>\n</html>\n'
    )


def _head(document: dict[str, Any]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{each["tau"]:.2f}</b><span>tokens a pass at {escape(name)}</span></div>'
        for name, each in document["held_out"].items()
    )
    about = (
        f"{document['parameters'] / 1e6:.1f}M parameters, {document['steps']} steps,"
        f" {document['seconds'] / 60:.1f} minutes; tau is measured with k = {document['k']}."
    )
    return (
        f'<header><p class="eyebrow">outrider {escape(document["versions"]["outrider"])} train</p>'
        f"<h1>{escape(document['kind'])} for {escape(document['target'])}</h1>"
        f'<p class="about">{escape(about)}</p><div class="tiles">{tiles}</div></header>\n'
    )


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
