"""Draws the plots of a training from its log. A plot without data is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from outrider.runtime.report import svg

Lines = Sequence[dict[str, Any]]
_HEIGHT = 2.7  # inches


def draw(lines: Lines) -> list[svg.Plot]:
    """Return all plots for which the log has data."""
    return svg.draw_plots(_PLOTS, lines)


def _loss(lines: Lines) -> Figure | None:
    if not lines:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    axes.plot([line["cycle"] for line in lines], [line["loss"] for line in lines], color=svg.FAST)
    _label_cycles(axes, "loss")
    return figure


def _alpha(lines: Lines) -> Figure | None:
    with_alpha = [line for line in lines if line["alpha"]]
    if not with_alpha:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for position in range(max(len(line["alpha"]) for line in with_alpha)):
        points = [(line["cycle"], line["alpha"][position]) for line in with_alpha if len(line["alpha"]) > position]
        color = svg.SERIES[position % len(svg.SERIES)]
        axes.plot(*zip(*points, strict=True), color=color, label=f"draft token {position + 1}")
    _format_rates(axes)
    _label_cycles(axes, None)
    return figure


def _tau(lines: Lines) -> Figure | None:
    names = _evaluation_names(lines)
    if not names:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for i, name in enumerate(names):
        evaluations = _evaluations(lines, name)
        cycles = [cycle for cycle, _ in evaluations]
        taus = [result["tau"] for _, result in evaluations]
        axes.plot(cycles, taus, color=svg.SERIES[i], marker="o", label=name)
    svg.legend(axes, columns=2)
    _label_cycles(axes, "tokens per pass")
    return figure


def _acceptance(lines: Lines) -> Figure | None:
    names = _evaluation_names(lines)
    if not names:
        return None
    figure, axes = svg.canvas(_HEIGHT)
    for i, name in enumerate(names):
        rates = lines[-1]["evaluation"][name]["acceptance"]
        axes.plot(range(1, len(rates) + 1), rates, color=svg.SERIES[i], marker="o", label=name)
    _format_rates(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position of the draft token in its round")
    return figure


def _evaluation_names(lines: Lines) -> list[str]:
    return list(lines[-1]["evaluation"]) if lines else []


def _evaluations(lines: Lines, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the generation cycles with a new evaluation, and its results. A log line repeats the last results."""
    evaluations: list[tuple[int, dict[str, Any]]] = []
    for line in lines:
        result = line["evaluation"].get(name)
        if result and (not evaluations or evaluations[-1][1] != result):
            evaluations.append((line["cycle"], result))
    return evaluations


def _format_rates(axes: Axes) -> None:
    """Show the y axis in percent, with a legend."""
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    svg.legend(axes)


def _label_cycles(axes: Axes, label: str | None) -> None:
    """Label the x axis with generation cycles, and the y axis with `label`."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("generation cycle")
    if label:
        axes.set_ylabel(label)


_PLOTS: tuple[svg.PlotSpec[Lines], ...] = (
    (_loss, "Loss", "Mean over the steps of each generation cycle, on the training data."),
    (
        _alpha,
        "Acceptance in training",
        "The sum over tokens of min(p, q) for each draft token of a chain, given the draft tokens before it.",
    ),
    (
        _tau,
        "Tokens per pass",
        "Measured by the engine on the evaluation prompts, greedy and at temperature 1; 1 is plain decoding.",
    ),
    (
        _acceptance,
        "Acceptance by position",
        "Last evaluation: the share of draft tokens accepted, among those whose ancestors were all accepted.",
    ),
)
