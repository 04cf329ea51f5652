"""The commands for drafts: `fit`, `train`, `inspect`, `convert`, `index` and `layers`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli import options
from outrider.lab.fit.settings import Settings as FitSettings
from outrider.runtime.report.console import print_document
from outrider.scale.ray.train_settings import RayWorkers
from outrider.train.settings import Settings as TrainSettings


@options.spread
def index(
    files: options.Files,
    *,
    target: options.Target = None,
    out: options.Out,
    field: options.Field = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Build a datastore from files, for `--proposer retrieval:DIR`.

    Texts are stored as tokens of the target. With --json, the last line of standard output is a JSON document.
    """
    from outrider.tools.index import run_index

    console = Console(stderr=as_json)
    summary = run_index(files, target=target, out=out, field=field, force=force, console=console)
    if as_json:
        typer.echo(json.dumps(summary))


@options.spread
def train(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="eagle3, eagle31, slim, peagle, mtp, medusa, hydra, dflash, dspark, xpress, kv-sharing or draft.",
        ),
    ],
    *,
    settings: TrainSettings,
    workers: RayWorkers,
    as_json: options.BenchJson = False,
) -> None:
    """Train a draft on the target's own answers and hidden states.

    The same command resumes an interrupted training. Prints the result, then one JSON document as the last line if the
    output is not a terminal or with --json.
    """
    from outrider.scale.ray.training import train_on_ray
    from outrider.train import command

    if workers.ray_workers is None:
        command.train(kind, settings, as_json=as_json)
    else:
        train_on_ray(kind, settings, workers, as_json=as_json)


@options.spread
def fit(*, settings: FitSettings, as_json: options.BenchJson = False) -> None:
    """Find the fastest configuration of a target for your prompts: measure, train a head, measure again, certify.

    Writes --out/fit.json, for --config of `outrider run`, `serve` and `bench`. The same command resumes an interrupted
    fit; Ctrl-C keeps the best so far. Prints a table, then one JSON document as the last line if the output is not a
    terminal or with --json. The exit code is 1 if a test of the certificate fails.
    """
    from outrider.lab.fit import command

    command.fit(settings, as_json=as_json)


@options.spread
def inspect(folder: options.DraftFolder, *, target: options.HeadTarget = None, as_json: options.Json = False) -> None:
    """Describe a trained draft head. With --target, measure how often its first draft token is right."""
    from outrider.tools.inspect_draft import run_inspect

    run_inspect(folder, target=target, as_json=as_json)


@options.spread
def convert(
    folder: options.DraftFolder, *, to: options.TargetFormat, out: options.Out, target: options.HeadTarget = None
) -> None:
    """Convert a trained draft head to another format, and read it back."""
    from outrider.tools.convert import run_convert

    run_convert(folder, to=to, out=out, target=target, console=Console())


@options.spread
def export(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT", help="Folder of a draft model or a draft head, its name on the Hub, or suffix."
        ),
    ],
    *,
    engine: Annotated[
        str,
        typer.Option("--for", metavar="ENGINE", help="vllm, sglang, llama.cpp, mlx, ollama or tensorrt-llm."),
    ],
    out: options.Out,
    target: options.HeadTarget = None,
    k: Annotated[
        int | None, typer.Option("--k", metavar="N", help="Draft tokens per round. Without it, give --advice.")
    ] = None,
    advice: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Take the k that `outrider tune --out FILE` found to be the fastest."),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="With --advice: sequences at once on the engine. Default: 1."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a draft as another engine reads it, with the command that runs it there.

    Drafts that the engine does not run are refused. What was not run with an engine is labeled untested.
    """
    from outrider.tools.export.run import run_export

    console = Console(stderr=as_json)
    summary = run_export(
        folder, engine=engine, out=out, target=target, k=k, advice=advice, batch=batch, console=console
    )
    if as_json:
        typer.echo(json.dumps(summary))


@options.spread
def layers(
    *,
    target: options.Target = None,
    prompts: options.PromptFile = None,
    limit: options.LayersLimit = 4,
    max_trials: options.MaxTrials = 100,
    max_tokens: options.BenchTokens = 64,
    seed: options.BenchSeed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    as_json: options.BenchJson = False,
) -> None:
    """Find the layers that a target can skip when it drafts for itself, for --proposer exit:N or skip:A+B+C.

    Half of the prompts are used for the search, and the figures are from the other half. Prints a table, then one JSON
    document as the last line if the output is not a terminal or with --json.
    """
    from outrider.llm import LLM
    from outrider.tools.layers import run_layers, show_layers

    llm = LLM(
        target,
        proposer="none",
        k=0,
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantize=quantize,
        threads=threads,
        prefix_caching=False,
    )
    document = run_layers(
        llm,
        prompts=prompts,
        limit=limit,
        max_trials=max_trials,
        max_tokens=max_tokens,
        seed=seed,
    )
    print_document(document, show_layers, as_json=as_json)
