"""The commands for drafts: `fit`, `train`, `inspect`, `convert`, `export`, `index` and `layers`."""

import json

import typer
from rich.console import Console

from outrider.cli.derive import spread
from outrider.cli.options import Printing
from outrider.drafting.propose.present import check_present
from outrider.lab.fit.settings import Settings as FitSettings
from outrider.runtime.report.console import print_document
from outrider.scale.ray.train_settings import RayWorkers
from outrider.tools.settings import ConvertSettings, ExportSettings, HeadSettings, IndexSettings, LayersSettings
from outrider.train.settings import KindSettings
from outrider.train.settings import Settings as TrainSettings


@spread
def index(*, settings: IndexSettings, printing: Printing) -> None:
    """Build a datastore from files, for `--proposer retrieval:DIR`.

    Texts are stored as tokens of the target. With --json, the last line of standard output is a JSON document.
    """
    from outrider.tools.index import run_index

    summary = run_index(settings, console=Console(stderr=printing.json))
    if printing.json:
        typer.echo(json.dumps(summary))


@spread
def train(*, kind: KindSettings, settings: TrainSettings, workers: RayWorkers, printing: Printing) -> None:
    """Train a draft on the target's own answers and hidden states.

    The same command resumes an interrupted training. Prints the result, then one JSON document as
    the last line if the output is not a terminal or with --json.
    """
    check_present(settings.engine.target)
    from outrider.scale.ray.training import train_on_ray
    from outrider.train import command

    if workers.ray_workers is None:
        command.train(kind.kind, settings, as_json=printing.json)
    else:
        train_on_ray(kind.kind, settings, workers, as_json=printing.json)


@spread
def fit(*, settings: FitSettings, printing: Printing) -> None:
    """Find the fastest configuration of a target for your prompts: measure, train a head, measure again, certify.

    Writes --out/fit.json, for --config of `outrider run`, `serve` and `bench`. The same command resumes an interrupted
    fit; Ctrl-C keeps the best so far. Prints a table, then one JSON document as the last line if the output is not a
    terminal or with --json. The exit code is 1 if a test of the certificate fails.
    """
    check_present(settings.engine.target, *settings.proposers, prompts=settings.prompts)
    from outrider.lab.fit import command

    command.fit(settings, as_json=printing.json)


@spread
def inspect(*, settings: HeadSettings, printing: Printing) -> None:
    """Describe a trained draft head. With --target, measure how often its first draft token is right."""
    from outrider.tools.inspect_draft import run_inspect

    run_inspect(settings.folder, target=settings.target, as_json=printing.json)


@spread
def convert(*, settings: ConvertSettings) -> None:
    """Convert a trained draft head to another format, and read it back."""
    from outrider.tools.convert import run_convert

    run_convert(settings.folder, to=settings.to, out=settings.out, target=settings.target, console=Console())


@spread
def export(*, settings: ExportSettings, printing: Printing) -> None:
    """Write a draft as another engine reads it, with the command that runs it there.

    Drafts that the engine does not run are refused. A draft that was not run with an engine is labeled untested.
    """
    from outrider.tools.export.run import run_export

    summary = run_export(settings, console=Console(stderr=printing.json))
    if printing.json:
        typer.echo(json.dumps(summary))


@spread
def layers(*, settings: LayersSettings, printing: Printing) -> None:
    """Find the layers that a target can skip when it drafts for itself, for --proposer exit:N or skip:A+B+C.

    Half of the prompts are used for the search, and the figures are from the other half. Prints a
    table, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    from outrider.tools.layers import run_layers, show_layers

    document = run_layers(settings)
    print_document(document, show_layers, as_json=printing.json)
