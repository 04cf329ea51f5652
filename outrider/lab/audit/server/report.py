"""Print the result of the audit of a server."""

from collections.abc import Mapping

from rich.console import Console

from outrider.lab.audit.report import new_table, verdict
from outrider.lab.audit.server.diagnosis import Diagnosis, is_sure
from outrider.lab.audit.server.distribution import SamplingTest
from outrider.lab.audit.server.replay import Difference, ReplayResult
from outrider.lab.audit.server.result import ServerAuditResult, notes

_SHOWN = 5  # differences and causes that are printed


def show(result: ServerAuditResult, console: Console) -> None:
    """Print the tests, the real differences, the causes and the notes."""
    table = new_table(f"Is the output of {result.model} at {result.options.server} that of {result.target}?")
    table.add_row("replay", *_replay(result.replay), verdict(result.replay.passed), end_section=True)
    distribution = result.sampling.distribution
    for number, test in enumerate(distribution.tests):
        section = "" if number else "distribution"
        table.add_row(section, *_test(test, distribution.significance), verdict(test.passed))
    console.print(table)
    for difference in [each for each in result.replay.details if not each.near_tie][:_SHOWN]:
        console.print(_difference(difference), markup=False, highlight=False)
    for line in _diagnosis(result.sampling.diagnosis):
        console.print(line, markup=False, highlight=False)
    if result.passed:
        console.print(_power(distribution.power), markup=False, highlight=False)
    for note in notes(result):
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"Verdict: {verdict(result.passed)}, after {result.seconds:.0f} s.")


def _replay(result: ReplayResult) -> tuple[str, str]:
    done = f"{result.prompts} prompts, {result.tokens} greedy tokens, compared by {result.by}"
    found = (
        f"{result.near_ties} near-ties (largest margin {result.largest_near_tie:.3f} logits),"
        f" {result.real_differences} real differences"
    )
    return done, found


def _test(test: SamplingTest, level: float) -> tuple[str, str]:
    done = f"{test.name}: {test.samples} samples"
    found = (
        f"p = {test.p_value:.2g} (fails below {level:.1g}), {test.outcomes} outcomes with"
        f" {test.distinguished:.0%} of the probability"
    )
    return done, found


def _difference(found: Difference) -> str:
    return (
        f"replay: prompt {found.prompt}, token {found.position}, after {found.before!r}: the server has"
        f" {found.server_text!r}, the model {found.model_text!r}; margin {found.margin:.3f} logits, at most"
        f" {found.tolerance:.3f} allowed"
    )


def _diagnosis(diagnosis: Diagnosis | None) -> list[str]:
    if diagnosis is None:
        return []
    lines = [
        f"cause: {each.cause} (no test rejects it; smallest p {each.smallest_p_value:.2g},"
        f" log-likelihood {each.gain:+.0f} against the model's own distribution)"
        for each in diagnosis.causes[:_SHOWN]
    ]
    if closest := diagnosis.closest:
        lines.append(
            f"closest known defect: {closest.cause} (log-likelihood {closest.gain:+.0f}), rejected by"
            f" {', '.join(closest.rejected_by)}"
        )
    return lines


def _power(powers: Mapping[str, float]) -> str:
    sure = sum(map(is_sure, powers.values()))
    weak = [f"{cause} ({value:.0%})" for cause, value in powers.items() if not is_sure(value)]
    text = f"{sure} of {len(powers)} known defects would have been found for certain."
    return text + (f" Less likely: {'; '.join(weak)}." if weak else "")
