"""Print the result of the audit of a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.lab.audit.server.diagnosis import is_sure

_SHOWN = 5  # differences and causes that are printed


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tests, the real differences, the causes and the notes."""
    table = Table(title=f"Is the output of {report['model']} at {report['server']} that of {report['target']}?")
    for heading in ("section", "what was done", "what was found", "verdict"):
        table.add_column(heading)
    replay = report["replay"]
    table.add_row("replay", *_replay(replay), _verdict(replay["passed"]), end_section=True)
    distribution = report["distribution"]
    for number, test in enumerate(distribution["tests"]):
        section = "" if number else "distribution"
        table.add_row(section, *_test(test, distribution["significance"]), _verdict(test["passed"]))
    console.print(table)
    for detail in [each for each in replay["details"] if not each["near_tie"]][:_SHOWN]:
        console.print(_difference(detail), markup=False, highlight=False)
    for line in _diagnosis(report["diagnosis"]):
        console.print(line, markup=False, highlight=False)
    if report["passed"]:
        console.print(_power(distribution["power"]), markup=False, highlight=False)
    for note in report["notes"]:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"Verdict: {_verdict(report['passed'])}, after {report['seconds']:.0f} s.")


def _replay(section: Mapping[str, Any]) -> tuple[str, str]:
    done = f"{section['prompts']} prompts, {section['tokens']} greedy tokens, compared by {section['by']}"
    found = (
        f"{section['near_ties']} near-ties (largest margin {section['largest_near_tie']:.3f} logits),"
        f" {section['real_differences']} real differences"
    )
    return done, found


def _test(test: Mapping[str, Any], level: float) -> tuple[str, str]:
    done = f"{test['name']}: {test['samples']} samples"
    found = (
        f"p = {test['p_value']:.2g} (fails below {level:.1g}), {test['outcomes']} outcomes with"
        f" {test['distinguished']:.0%} of the probability"
    )
    return done, found


def _difference(detail: Mapping[str, Any]) -> str:
    return (
        f"replay: prompt {detail['prompt']}, token {detail['position']}, after {detail['before']!r}: the server has"
        f" {detail['server_text']!r}, the model {detail['model_text']!r}; margin {detail['margin']:.3f} logits, at most"
        f" {detail['tolerance']:.3f} allowed"
    )


def _diagnosis(diagnosis: Mapping[str, Any] | None) -> list[str]:
    if diagnosis is None:
        return []
    causes = diagnosis["causes"]
    lines = [
        f"cause: {each['cause']} (no test rejects it; smallest p {each['smallest_p_value']:.2g},"
        f" log-likelihood {each['gain']:+.0f} against the model's own distribution)"
        for each in causes[:_SHOWN]
    ]
    if closest := diagnosis["closest"]:
        lines.append(
            f"closest known defect: {closest['cause']} (log-likelihood {closest['gain']:+.0f}), rejected by"
            f" {', '.join(closest['rejected_by'])}"
        )
    return lines


def _power(powers: Mapping[str, float]) -> str:
    sure = sum(map(is_sure, powers.values()))
    weak = [f"{cause} ({value:.0%})" for cause, value in powers.items() if not is_sure(value)]
    text = f"{sure} of {len(powers)} known defects would have been found for certain."
    return text + (f" Less likely: {'; '.join(weak)}." if weak else "")


def _verdict(passed: bool) -> str:
    return "[bold green]passed[/]" if passed else "[bold red]FAILED[/]"
