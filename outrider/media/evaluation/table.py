"""Prints the figures of routers."""

from collections.abc import Sequence

from rich.table import Table

from outrider.media.evaluation.bootstrap import Interval
from outrider.media.evaluation.summary import Summary
from outrider.runtime.report.console import NONE, new_table


def summary_table(title: str, summaries: Sequence[Summary]) -> Table:
    """Return a table with a row for each router. Quality, held-out, target, accepted and overhead are in percent."""
    table = new_table(title)
    table.add_column("router", no_wrap=True)
    headings = ("score", "quality", "held-out", "distance", "target", "accepted", "ms", "speedup", "overhead")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for each in summaries:
        speedup = each.speedup
        table.add_row(
            each.router,
            f"{each.score:.3f}",
            _short(each.quality),
            _short(each.held_out),
            f"{each.distance:.3f}",
            f"{100 * each.target_share:.0f}",
            _percent(each.accepted_share),
            f"{each.ms:.0f}",
            f"{speedup.median:.2f} ({speedup.min:.2f}–{speedup.max:.2f})",
            _percent(each.overhead),
        )
    return table


def interval_text(interval: Interval) -> str:
    """Return a share in percent with its confidence interval."""
    return f"{100 * interval.value:.1f} ({100 * interval.low:.1f}–{100 * interval.high:.1f})"


def _short(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ±{50 * (interval.high - interval.low):.1f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f}"
