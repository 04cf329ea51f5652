"""Renders matplotlib figures as SVG with the colors, the font and the width of the page around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import StringIO
from types import MappingProxyType
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Placeholder colors. `_to_svg` replaces them by CSS variables, which differ between light and dark
# mode.
INK, MUTED, GRID, TRACK = "#000101", "#000102", "#000103", "#000104"
PLAIN, FAST, LIMIT = "#000105", "#000106", "#000107"
DRAFT, TARGET, HOST = "#000108", "#000109", "#000110"
SERIES = ("#000111", "#000112", "#000113", "#000114", "#000115")
_CSS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        INK: "ink",
        MUTED: "muted",
        GRID: "grid",
        TRACK: "track",
        PLAIN: "plain",
        FAST: "fast",
        LIMIT: "limit",
        DRAFT: "draft",
        TARGET: "target",
        HOST: "host",
        **{color: f"series-{i}" for i, color in enumerate(SERIES)},
    }
)
_WIDTH = 4.0  # inches of 72 units: about the width of a phone, so that text is not scaled there
_STYLE: Any = MappingProxyType(  # Any: matplotlib's type of the keys differs between versions
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "outrider",  # the same document gives the same page
        "font.size": 9.5,
        "text.color": INK,
        "axes.edgecolor": GRID,
        "axes.labelcolor": MUTED,
        "axes.labelsize": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.titlesize": 9.5,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "xtick.minor.size": 0,
        "ytick.minor.size": 0,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "legend.handlelength": 1.4,
        "legend.columnspacing": 1.2,
        "lines.linewidth": 2.0,
        "lines.markersize": 4.5,
        "lines.solid_capstyle": "round",
    }
)

_Data = TypeVar("_Data")
PlotSpec = tuple[Callable[[_Data], Figure | None], str, str]  # function (None: no data), title and caption


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """An SVG figure with its title and caption."""

    title: str
    caption: str
    svg: str


def draw_plots(specs: Iterable[PlotSpec[_Data]], data: _Data) -> list[Plot]:
    """Return the plots for which there is data, in the style of the page."""
    plots = []
    with mpl.rc_context(dict(_STYLE)):
        for draw, title, caption in specs:
            if figure := draw(data):
                svg = _to_svg(figure, name=draw.__name__.strip("_"), label=title)
                plots.append(Plot(title=title, caption=caption, svg=svg))
    return plots


def canvas(height: float, *, grid: str = "y") -> tuple[Figure, Axes]:
    """Return an empty figure.

    Args:
        height: in inches.
        grid: the axis with grid lines: x, y, or "" for neither.
    """
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    for axis in (axes.xaxis, axes.yaxis):
        axis.grid(visible=axis.axis_name == grid)
    return figure, axes


def legend(axes: Axes, columns: int = 4) -> None:
    """Draw the legend above the axes, where it covers no data."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2)


def _to_svg(figure: Figure, *, name: str, label: str) -> str:
    """Return a figure as an SVG element. `name` makes its ids unique within the page."""
    out = StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{label}">', text, count=1)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', text)
    text = text.replace("url(#", f"url(#{name}-")
    text = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*", _font, text)
    return re.sub("|".join(_CSS_NAMES), lambda match: f"var(--{_CSS_NAMES[match[0]]})", text)


def _font(match: re.Match[str]) -> str:
    """Return the CSS of a font without its family, so that the page sets the family."""
    weight = f"font-weight: {match[1]}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}px"
