"""Print the result of an audit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from outrider.core.placement import describe_placement
from outrider.models.loader.check_store import CheckResult
from outrider.models.torch.checkpoint import precision_text


class Row(NamedTuple):
    """A row of the table."""

    done: str
    found: str
    passed: bool | None  # None: the row is for comparison, and is not judged


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a table with a verdict beside each test, and the overall verdict."""
    table = Table(title=f"Audit of {report['target']} with {report['proposer']}, verifier {report['verifier']}")
    for heading in ("section", "what was done", "what was found", "verdict"):
        table.add_column(heading)
    for name, rows_of in (("replay", _replay_rows), ("distribution", distribution_rows), ("flips", flip_rows)):
        rows = rows_of(report[name])
        for row in rows:
            section = name if row is rows[0] else ""
            table.add_row(section, row.done, row.found, _verdict(row.passed), end_section=row is rows[-1])
    console.print(table)
    console.print(f"Load check: {CheckResult(**report['load_check'])}.", highlight=False)
    for detail in report["replay"]["details"]:
        console.print(_mismatch(detail))
    if not report["exact"]:
        console.print(f"The verifier {report['verifier']} is lossy by design, so no pair passes with it.")
    for placement in report["draft_placements"]:
        console.print(describe_placement(placement), highlight=False, markup=False)
    console.print(f"Verdict: {_verdict(report['passed'])}, after {report['seconds']:.0f} s.")


def _replay_rows(section: Mapping[str, Any]) -> list[Row]:
    done = (
        f"{section['texts']} texts, {section['tokens']} tokens, {section['dtype']}, {section['kernels']} kernels:"
        f" {len(section['cases'])} configurations for {section['prompts']} prompts"
    )
    found = f"{section['mismatches']} texts differ from plain decoding, {section['unexplained']} by more than rounding"
    return [Row(done, found, section["passed"])]


def distribution_rows(section: Mapping[str, Any]) -> list[Row]:
    """Return a row for each sampling test."""
    rows = []
    for test in section["tests"]:
        tokens = f"top_k {test['top_k']}" if test["top_k"] else "all tokens"
        done = f"{test['verifier']}, k {test['k']}, {tokens}, {section['samples']} samples"
        found = (
            f"p = {test['p_value']:.2g} (fails below {section['significance']:.1g}), {test['outcomes']} outcomes,"
            f" {test['acceptance']:.0%} of draft tokens accepted, tau {test['tau']:.2f}"
        )
        rows.append(Row(done, found, test["passed"]))
    return rows


def flip_rows(section: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the flip test: a summary, plain decoding beside it, and each flip that fails."""
    low, high = section["flips_per_1000_95"]
    speculative = (
        f"{section['flips_per_1000']:.1f} flips per 1000 tokens ({low:.1f} to {high:.1f}),"
        f" largest margin {section['largest_margin']:.3f} logits"
    )
    plain = (
        f"{section['plain_batched_flips_per_1000']:.1f} flips per 1000 tokens,"
        f" largest margin {section['plain_batched_largest_margin']:.3f} logits"
    )
    failures = [
        Row(
            f"prompt {flip['prompt']}, token {flip['position']}",
            f"margin {flip['margin']:.3f} logits, at most {flip['tolerance']:.3f} allowed",
            False,
        )
        for flip in section["details"]
        if not flip["near_tie"]
    ]
    # A flip fails by itself, so the summary has a verdict only where none fails.
    summary = f"{section['tokens']} tokens, greedy, {precision_text(section)}, {section['kernels']} kernels"
    return [
        Row(summary, speculative, None if failures else True),
        Row("the same by plain decoding in a batch", plain, None),
        *failures,
    ]


def _mismatch(detail: Mapping[str, Any]) -> str:
    unit = "probability" if detail["temperature"] else "logits"
    return (
        f"replay: prompt {detail['prompt']}, token {detail['position']}, verifier {detail['verifier']},"
        f" k {detail['k']}, {'batched' if detail['batched'] else 'alone'}, temperature {detail['temperature']}:"
        f" {detail['speculative_token']} in place of {detail['plain_token']}, gap {detail['gap']:.2g} {unit}"
    )


def _verdict(passed: bool | None) -> str:
    if passed is None:
        return ""
    return "[bold green]passed[/]" if passed else "[bold red]FAILED[/]"
