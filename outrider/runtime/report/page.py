"""Builds a report as one self-contained HTML file without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.runtime.atomic_files import check_writable, write_whole

if TYPE_CHECKING:  # matplotlib is an optional dependency
    from outrider.runtime.report.svg import Plot

_SUFFIXES = (".html", ".htm")
_STYLE = Path(__file__).parent / "report.css"


def check_report(file: str | Path) -> None:
    """Check before a measurement that its report can be written.

    Raises:
        OutriderError: matplotlib is missing, or the file cannot be written or has another suffix
            than .html.
    """
    if find_spec("matplotlib") is None:
        raise OutriderError('--report needs matplotlib, which is missing; run pip install "outrider[report]"')
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OutriderError(f"--report {file} is not a file in an existing folder; use for example report.html")
    if path.suffix not in _SUFFIXES:
        raise OutriderError(f"--report {file} has another suffix than .html; use for example report.html")
    check_writable(path)


def write_report(text: str, file: str | Path) -> None:
    """Write a page to a file.

    Raises:
        OutriderError: the file cannot be written.
    """
    write_whole(Path(file).expanduser(), text)


def html_page(title: str, header: str, plots: Iterable[Plot], rest: str) -> str:
    """Return the HTML page: the header, the plots, and the rest below them. `header` and `rest` are HTML."""
    figures = "".join(
        f"<figure><h3>{escape(plot.title)}</h3>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in plots
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n{header}"
        f'<section class="plots">\n{figures}</section>\n{rest}</body>\n</html>\n'
    )


def page_header(eyebrow: str, title: str, about: str, tiles: Iterable[tuple[str, str]], *, warning: str = "") -> str:
    """Return the header of a page.

    Args:
        eyebrow: the small line above the title.
        title: the title.
        about: the line below the title.
        tiles: the most important numbers, each with its label.
        warning: a warning below `about`; "" is none.
    """
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in tiles
    )
    warning_html = f'<p class="warning">{escape(warning)}</p>' if warning else ""
    return (
        f'<header><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>'
        f'<p class="about">{escape(about)}</p>{warning_html}<div class="tiles">{boxes}</div></header>\n'
    )


def section(title: str, content: str) -> str:
    """Return `content`, which is HTML, under a heading."""
    return f"<h2>{escape(title)}</h2>{content}\n"


def pairs_table(items: Iterable[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in items)
    return f'<div class="table"><table class="pairs">{rows}</table></div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, marked: bool = False) -> str:
    """Return a table. The head is text, the cells HTML. `marked` highlights the last row."""
    body = [_row(map(escape, head), "th"), *map(_row, rows)]
    if marked:
        body[-1] = body[-1].replace("<tr>", '<tr class="overall">', 1)
    return f'<div class="table"><table>{"".join(body)}</table></div>'


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"
