"""Draws speed against quality."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.core.packages import needed_by
from outrider.errors import OutriderError
from outrider.media.evaluation.summary import Summary
from outrider.runtime.atomic_files import check_writable

SUFFIXES = (".svg", ".png", ".pdf")
_SIZE = (7.6, 4.2)


def check_plot_file(path: str) -> Path:
    """Return the path of a plot that can be written.

    Raises:
        OutriderError: the suffix is unknown, the folder cannot be written, or matplotlib is missing.
    """
    file = Path(path).expanduser()
    if file.suffix.lower() not in SUFFIXES:
        raise OutriderError(f"--plot {path} is not the name of a plot; end it with {', '.join(SUFFIXES)}")
    check_writable(file)
    with needed_by("--plot", "plot"):
        import matplotlib  # noqa: F401
    return file


def draw_plot(groups: Sequence[tuple[str, str, bool, Sequence[Summary]]], file: Path) -> None:
    """Write a plot.

    Args:
        groups: label, marker, whether a line joins the points, and the figures.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {"svg.hashsalt": "outrider", "font.size": 9, "axes.grid": True, "grid.color": "#dddddd"}
    with mpl.rc_context(style):
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        for label, marker, joined, summaries in groups:
            ordered = sorted(summaries, key=lambda each: each.speedup.median)
            xs = [each.speedup.median for each in ordered]
            ys = [100 * each.quality.value for each in ordered]
            low = [y - 100 * each.quality.low for y, each in zip(ys, ordered, strict=True)]
            high = [100 * each.quality.high - y for y, each in zip(ys, ordered, strict=True)]
            axes.errorbar(
                xs,
                ys,
                yerr=[low, high],
                fmt=marker + ("-" if joined else ""),
                label=label,
                lw=1.4,
                elinewidth=0.6,
                ms=5,
            )
        axes.set_xlabel("speedup over target-only")
        axes.set_ylabel("score, % of target-only")
        figure.legend(frameon=False, loc="outside right center")  # points can be anywhere in the axes
        figure.savefig(file, metadata={"Date": None} if file.suffix.lower() == ".svg" else None)
