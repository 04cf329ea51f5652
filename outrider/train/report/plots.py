"""The plots of a training's report, from its log; one for which there is no data is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from outrider.report import svg

Lines = Sequence[dict[str, Any]]
_HEIGHT = 2.7  # inches


def draw(lines: Lines) -> list[svg.Plot]:
    """All plots for which a log has data."""
    return svg.drawn(_PLOTS, lines)


def _loss(lines: Lines) -> Figure | None:
    if not lines:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    axes.plot([line["wave"] for line in lines], [line["loss"] for line in lines], color=svg.FAST)
    _over_waves(axes, "loss")
    return figure


def _alpha(lines: Lines) -> Figure | None:
    known = [line for line in lines if line["alpha"]]
    if not known:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for position in range(max(len(line["alpha"]) for line in known)):
        some = [(line["wave"], line["alpha"][position]) for line in known if len(line["alpha"]) > position]
        colour = svg.SERIES[position % len(svg.SERIES)]
        axes.plot(*zip(*some, strict=True), color=colour, label=f"guess {position + 1}")
    _shares(axes)
    _over_waves(axes, None)
    return figure


def _tau(lines: Lines) -> Figure | None:
    names = _measured(lines)
    if not names:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for i, name in enumerate(names):
        some = _changes(lines, name)
        waves = [wave for wave, _ in some]
        axes.plot(waves, [each["tau"] for _, each in some], color=svg.SERIES[i], marker="o", label=name)
    svg.legend(axes, columns=2)
    _over_waves(axes, "tokens a pass")
    return figure


def _acceptance(lines: Lines) -> Figure | None:
    names = _measured(lines)
    if not names:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for i, name in enumerate(names):
        shares = lines[-1]["held_out"][name]["acceptance"]
        axes.plot(range(1, len(shares) + 1), shares, color=svg.SERIES[i], marker="o", label=name)
    _shares(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the guess in its round")
    return figure


def _measured(lines: Lines) -> list[str]:
    return list(lines[-1]["held_out"]) if lines else []


def _changes(lines: Lines, name: str) -> list[tuple[int, dict[str, Any]]]:
    """The waves after which something was measured; a line repeats what the one before knows."""
    out: list[tuple[int, dict[str, Any]]] = []
    for line in lines:
        figures = line["held_out"].get(name)
        if figures and (not out or out[-1][1] != figures):
            out.append((line["wave"], figures))
    return out


def _shares(axes: Axes) -> None:
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    svg.legend(axes)


def _over_waves(axes: Axes, label: str | None) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("wave")
    if label:
        axes.set_ylabel(label)


_PLOTS: tuple[svg.Drawing[Lines], ...] = (
    (_loss, "Loss", "The mean of each wave's steps, on texts that are learned from right then."),
    (
        _alpha,
        "Kept guesses in training",
        "The sum over tokens of min(p, q) for each guess in a row, where the guesses before it are given.",
    ),
    (
        _tau,
        "Tokens a pass",
        "Measured by the engine on prompts that are not trained on, greedy and at temperature 1; 1 is plain decoding.",
    ),
    (
        _acceptance,
        "Acceptance by position",
        "As last measured: of the guesses whose ancestors were all accepted, the share accepted.",
    ),
)
