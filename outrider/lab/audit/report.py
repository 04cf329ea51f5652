"""Print the result of an audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from outrider.lab.audit.distribution import DistributionResult
    from outrider.lab.audit.flips import FlipResult
    from outrider.lab.audit.replay import Mismatch, ReplayResult
    from outrider.lab.audit.result import AuditResult


class Row(NamedTuple):
    """A row of the table."""

    done: str
    found: str
    passed: bool | None  # None: the row is for comparison, and is not judged


def show(result: AuditResult, console: Console) -> None:
    """Print a table with a verdict beside each test, and the overall verdict."""
    table = new_table(f"Audit of {result.target} with {result.proposer}, verifier {result.rule.name}")
    sections = {
        "replay": [_replay_row(result.replay)],
        "distribution": _distribution_rows(result.distribution),
        "flips": flip_rows(result.flips),
    }
    for name, rows in sections.items():
        for row in rows:
            section = name if row is rows[0] else ""
            table.add_row(section, row.done, row.found, verdict(row.passed), end_section=row is rows[-1])
    console.print(table)
    console.print(f"Load check: {result.load_check}.", highlight=False)
    for mismatch in result.replay.details:
        console.print(_mismatch(mismatch))
    if not result.rule.exact:
        console.print(f"The verifier {result.rule.name} is lossy by design, so no pair passes with it.")
    for placement in result.placements:
        console.print(str(placement), highlight=False, markup=False)
    console.print(f"Verdict: {verdict(result.passed)}, after {result.seconds:.0f} s.")


def _replay_row(result: ReplayResult) -> Row:
    done = (
        f"{result.texts} texts, {result.tokens} tokens, {result.dtype}, {result.kernels} kernels:"
        f" {len(result.cases)} configurations for {result.prompts} prompts"
    )
    found = f"{result.mismatches} texts differ from plain decoding, {result.unexplained} by more than rounding"
    return Row(done, found, result.passed)


def _distribution_rows(result: DistributionResult) -> list[Row]:
    rows = []
    for test in result.tests:
        tokens = f"top_k {test.top_k}" if test.top_k else "all tokens"
        done = f"{test.verifier}, k {test.k}, {tokens}, {result.samples} samples"
        found = (
            f"p = {test.p_value:.2g} (fails below {result.significance:.1g}), {test.outcomes} outcomes,"
            f" {test.acceptance:.0%} of draft tokens accepted, tau {test.tau:.2f}"
        )
        rows.append(Row(done, found, test.passed))
    return rows


def flip_rows(result: FlipResult) -> list[Row]:
    """Return the rows of the flip test: a summary, plain decoding beside it, and each flip that fails."""
    speculative = (
        f"{result.flips_per_1000:.1f} flips per 1000 tokens ({result.flips_per_1000_95.low:.1f} to"
        f" {result.flips_per_1000_95.high:.1f}), largest margin {result.largest_margin:.3f} logits"
    )
    plain = (
        f"{result.plain_batched_flips_per_1000:.1f} flips per 1000 tokens,"
        f" largest margin {result.plain_batched_largest_margin:.3f} logits"
    )
    failures = [
        Row(
            f"prompt {flip.prompt}, token {flip.position}",
            f"margin {flip.margin:.3f} logits, at most {flip.tolerance:.3f} allowed",
            False,
        )
        for flip in result.flips
        if not flip.near_tie
    ]
    # A flip fails by itself, so the summary has a verdict only where none fails.
    summary = f"{result.tokens} tokens, greedy, {result.precision}, {result.kernels} kernels"
    return [
        Row(summary, speculative, None if failures else True),
        Row("the same by plain decoding in a batch", plain, None),
        *failures,
    ]


def _mismatch(mismatch: Mismatch) -> str:
    unit = "probability" if mismatch.temperature else "logits"
    return (
        f"replay: prompt {mismatch.prompt}, token {mismatch.position}, verifier {mismatch.verifier},"
        f" k {mismatch.k}, {'batched' if mismatch.batched else 'alone'}, temperature {mismatch.temperature}:"
        f" {mismatch.speculative_token} in place of {mismatch.plain_token}, gap {mismatch.gap:.2g} {unit}"
    )


def new_table(title: str) -> Table:
    """Return the table of an audit without rows."""
    table = Table(title=title)
    for heading in ("section", "what was done", "what was found", "verdict"):
        table.add_column(heading)
    return table


def verdict(passed: bool | None) -> str:
    """Return the words for a verdict; "" for None."""
    if passed is None:
        return ""
    return "[bold green]passed[/]" if passed else "[bold red]FAILED[/]"
