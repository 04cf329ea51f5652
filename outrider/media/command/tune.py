"""The command `outrider media tune`: choose a threshold for a wanted quality."""

from functools import partial

from rich.console import Console

from outrider.media.calibration.tune import MAX_RUNS, Tuned, tune
from outrider.media.command.settings import TuneSettings
from outrider.media.evaluation.table import interval_text, summary_table
from outrider.media.models.store import load_models
from outrider.runtime import machine
from outrider.runtime.atomic_files import check_writable
from outrider.runtime.progress import stage
from outrider.runtime.report.console import Document, print_document


def run_tune(settings: TuneSettings, *, as_json: bool) -> None:
    """Measure thresholds, print the choice, and write it if a file is given."""
    if settings.out:
        check_writable(settings.out)  # before the measurement rather than after it
    machine.use_threads(settings.threads)
    models = load_models(settings.models, eager_commits=settings.eager_commits)
    prompts = models.language.random_captions(settings.num_prompts, settings.seed)
    outputs = len(prompts[::2]) * MAX_RUNS + len(prompts[1::2]) * 2
    with stage("thresholds", outputs) as videos:
        tuned = tune(
            models.engine,
            models.held_out_scorer,
            prompts,
            quality=settings.quality,
            aggregate=settings.aggregate,
            advance=videos.advance,
        )
    document = {
        "exact": False,
        "prompts": len(prompts),
        "calibration": tuned.calibration.to_json(),
        "candidates": [each.to_json() for each in tuned.candidates],
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
    }
    write = partial(_write, tuned, settings.out) if settings.out else None
    print_document(document, partial(_show, tuned), as_json=as_json, write=write)


def _write(tuned: Tuned, file: str, document: Document) -> None:
    tuned.calibration.write(file)


def _show(tuned: Tuned, document: Document, console: Console) -> None:
    console.print(summary_table("Thresholds, on the half of the prompts that chooses", tuned.candidates))
    chosen = tuned.calibration
    console.print(
        f"threshold {chosen.threshold:g} ({chosen.aggregate}): quality {interval_text(chosen.quality)} % of target-only"
        f" on the other half, held-out scorer {interval_text(chosen.held_out)} %, {chosen.speedup:.2f} times as fast,"
        f" {100 * chosen.accepted_share:.0f} % of drafts accepted ([red]not exact[/red])",
        highlight=False,
    )
    if not chosen.reached:
        console.print(
            f"the wanted quality, {100 * chosen.wanted:g} %, is not reached on the other half", highlight=False
        )
