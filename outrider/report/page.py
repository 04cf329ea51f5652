"""A report as a page: one file, with nothing from outside and nothing that runs."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.errors import OutriderError
from outrider.system.atomic_files import check_writable

if TYPE_CHECKING:  # matplotlib is not there for everyone
    from outrider.report.svg import Plot

_STYLE = Path(__file__).parent / "report.css"


def check_report(file: str | Path) -> None:
    """Say before a measurement what would keep its report from being written.

    Raises:
        OutriderError: matplotlib is missing, or there is no place for the file.
    """
    if find_spec("matplotlib") is None:
        raise OutriderError('--report draws with matplotlib, which is missing; pip install "outrider[report]"')
    path = Path(file).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise OutriderError(f"--report {file} is no file in a folder that exists; use for example report.html")
    check_writable(path)


def write_report(text: str, file: str | Path) -> None:
    """Write a page.

    Raises:
        OutriderError: the file cannot be written.
    """
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"{file} cannot be written ({error.strerror}); give --report another file") from error


def framed(title: str, opening: str, plots: Iterable[Plot], rest: str) -> str:
    """The page as text: its opening, the plots, and the rest below them."""
    figures = "".join(
        f"<figure><h3>{escape(plot.title)}</h3>{plot.svg}<figcaption>{escape(plot.caption)}</figcaption></figure>"
        for plot in plots
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>\n{opening}"
        f'<section class="plots">\n{figures}</section>\n{rest}</body>\n</html>\n'
    )


def opening(eyebrow: str, title: str, about: str, tiles: Iterable[tuple[str, str]], *, warning: str = "") -> str:
    """What a page opens with; a tile is a figure that matters, and what it is."""
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(text)}</span></div>' for value, text in tiles
    )
    warned = f'<p class="warning">{escape(warning)}</p>' if warning else ""
    return (
        f'<header><p class="eyebrow">{escape(eyebrow)}</p><h1>{escape(title)}</h1>'
        f'<p class="about">{escape(about)}</p>{warned}<div class="tiles">{boxes}</div></header>\n'
    )


def section(title: str, content: str) -> str:
    """Markup under a heading."""
    return f"<h2>{escape(title)}</h2>{content}\n"


def pairs(given: Iterable[tuple[str, str]]) -> str:
    """A table of names and what they stand for."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in given)
    return f'<div class="table"><table class="pairs">{rows}</table></div>'
