"""The command line: its verbs and nothing else. What a verb needs is imported when it runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperGroup

from outrider import __version__, options
from outrider.errors import OutriderError
from outrider.project.options import ProjectOptions
from outrider.train.settings import Settings as TrainSettings
from outrider.tune.options import TuneOptions

_Models = TypeVar("_Models", bound=options.LoadOptions)

_FILE_WIDTH = 120  # columns of tables where no terminal sets them


class _Verbs(TyperGroup):
    """Turns a user's mistake into one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutriderError as error:
            # Paths and names go out as they are: no wrapping, no markup.
            Console(stderr=True).print("[red]error:[/red]", end=" ")
            typer.echo(str(error), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The program `outrider`."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: a model's own text, faster."""


@app.command()
@options.spread
def run(
    ctx: typer.Context,
    prompt: options.PromptText = None,
    *,
    chat: options.Chat = False,
    models: options.ModelOptions,
    config: options.Config = None,
    sampling: options.SamplingOptions,
    show: options.Show = False,
    as_json: options.Json = False,
) -> None:
    """Complete a prompt, and say what speculation did.

    The text goes to standard output and all else to standard error. With --json the text goes to standard error too,
    and standard output holds the document alone.
    """
    params = sampling.params()
    from outrider.run import converse, load
    from outrider.show import Teller

    llm = load(_configured(ctx, models, config), rows=params.n)
    if not converse(llm, params, prompt=prompt, chat=chat, teller=Teller(llm, show=show, as_json=as_json)):
        raise typer.Exit(1)


@app.command()
@options.spread
def bench(
    ctx: typer.Context,
    *,
    models: options.LoadOptions,
    config: options.Config = None,
    context: options.Contexts = None,
    prompts: options.PromptFile = None,
    limit: options.Limit = None,
    rounds: options.Rounds = 3,
    batch: options.Batches = "1",
    sweep: options.Sweep = None,
    peer: options.Peer = None,
    temperature: options.Temperatures = "0",
    max_tokens: options.BenchTokens = 128,
    seed: options.BenchSeed = 0,
    report: options.Report = None,
    calibrate: options.Calibrate = False,
    as_json: options.BenchJson = False,
) -> None:
    """Measure speculation against plain decoding, the two in turns, beside what this machine can do at most.

    Prints tables, and as the last line one JSON document: always into a file or a pipe, with --json on a terminal too.
    """
    from outrider.bench import verb
    from outrider.bench.settings import Settings, Sweep, parse_real, parse_sweep, parse_whole, several

    batches, temperatures = parse_whole("--batch", batch), parse_real("--temperature", temperature)
    contexts = parse_whole("--context", context) if context else ()
    settings = Settings(
        **asdict(_configured(ctx, models, config, least=1)),
        prompts=prompts,
        limit=limit,
        rounds=rounds,
        batch=batches[0],
        peer=peer,
        temperature=temperatures[0],
        max_tokens=max_tokens,
        seed=seed,
        context=contexts[0] if len(contexts) == 1 else None,
        sweep=Sweep(
            k=parse_sweep("--sweep", sweep) if sweep else (),
            batch=several(batches),
            context=several(contexts),
            temperature=several(temperatures),
        ),
    )
    if calibrate:
        verb.calibrate(settings, as_json=as_json)
    else:
        verb.measure(settings, report=report, as_json=as_json)


def _configured(ctx: typer.Context, models: _Models, config: str | None, *, least: int = 0) -> _Models:
    if config is None:
        return models
    from outrider.tune.config import configured

    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    given = {name for name, source in sources.items() if source and not source.name.startswith("DEFAULT")}
    return configured(models, config, given=given, least=least)


@app.command()
def audit(
    *,
    target: options.Target = None,
    proposer: options.Proposer = None,
    k: options.Guesses = 4,
    verifier: options.Verifier = None,
    prompts: options.PromptFile = None,
    samples: options.Samples = 2000,
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Test that speculation leaves the text of this target and proposer unchanged.

    Ends with exit code 1 when a test fails.
    """
    from outrider.audit.run import run_audit

    people = Console(stderr=as_json)
    report = run_audit(
        target,
        proposer,
        k=k,
        verifier=verifier,
        prompts=prompts,
        samples=samples,
        device=device,
        kernels=kernels,
        quantize=quantize,
        threads=threads,
        console=people,
    )
    if as_json:
        typer.echo(json.dumps(report))
    if not report["passed"]:
        raise typer.Exit(1)


@app.command()
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
    """Make a datastore of files, from which `--proposer retrieval:DIR` guesses.

    Texts are kept as the target's tokens. With --json the document is the last line of standard output.
    """
    from outrider.indexing import run_index

    people = Console(stderr=as_json)
    summary = run_index(files, target=target, out=out, field=field, force=force, console=people)
    if as_json:
        typer.echo(json.dumps(summary))


@app.command()
@options.spread
def project(*, asked: ProjectOptions, as_json: options.BenchJson = False) -> None:
    """Project what speculation should gain on a machine and for a model that are not here: reckoned, not measured.

    Prints tables, and as the last line one JSON document: always into a file or a pipe, with --json on a terminal too.
    """
    from outrider.bench.settings import parse_real, parse_whole
    from outrider.project.run import Lists, run_project
    from outrider.project.table import show

    shares = ("bandwidth_share", "arithmetic_share", "exposed", "round_ms", "layer_us", "exchange_us")
    given = {name: getattr(asked, name) for name in shares}
    document = run_project(
        asked,
        Lists(
            batch=parse_whole("--batch", asked.batch),
            context=parse_whole("--context", asked.context),
            k=parse_whole("--k", asked.k) if asked.k else (),
            alpha=parse_real("--alpha", asked.alpha) if asked.alpha else (),
            shares={
                name.removesuffix("_share"): parse_real(f"--{name.replace('_', '-')}", text)
                for name, text in given.items()
                if text
            },
        ),
    )
    people = Console()
    if not people.is_terminal:
        people.width = _FILE_WIDTH
    show(document, people)
    if as_json or not people.is_terminal:
        typer.echo(json.dumps(document))


@app.command()
@options.spread
def train(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help="eagle3, eagle31, mtp, medusa, hydra, dflash, dspark, onlooker or draft."),
    ],
    *,
    settings: TrainSettings,
    as_json: options.BenchJson = False,
) -> None:
    """Train a draft on what a target says as it answers prompts, and on the states that it was in.

    Run again with the same options, it goes on from where it was stopped. Prints what came of it, and as the last line
    one JSON document: always into a file or a pipe, with --json on a terminal too.
    """
    from outrider.train import verb

    verb.train(kind, settings, as_json=as_json)


@app.command()
def inspect(folder: options.DraftFolder, *, target: options.Owner = None, as_json: options.Json = False) -> None:
    """Say what a trained draft is, and with --target how often its first guess is right."""
    from outrider.inspect_draft import run_inspect

    run_inspect(folder, target=target, as_json=as_json)


@app.command()
def convert(folder: options.DraftFolder, *, to: options.Form, out: options.Out, target: options.Owner = None) -> None:
    """Write a trained draft in another format, and read it again."""
    from outrider.convert import run_convert

    run_convert(folder, to=to, out=out, target=target, console=Console())


@app.command()
def layers(
    *,
    target: options.Target = None,
    prompts: options.PromptFile = None,
    limit: options.SearchLimit = 4,
    budget: options.SearchBudget = 100,
    max_tokens: options.BenchTokens = 64,
    seed: options.BenchSeed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    as_json: options.BenchJson = False,
) -> None:
    """Find the layers that a target can leave out when it drafts for itself: --proposer exit:N or skip:A+B+C.

    Half of the prompts are searched on, and the figures are of the other half. Prints a table, and as the last line one
    JSON document: always into a file or a pipe, with --json on a terminal too.
    """
    from outrider.layers import run_layers, show_layers
    from outrider.llm import LLM

    llm = LLM(
        target, proposer="none", k=0, dtype=dtype, device=device, kernels=kernels, quantize=quantize, threads=threads
    )
    document = run_layers(
        llm,
        prompts=prompts,
        limit=limit,
        budget=budget,
        max_tokens=max_tokens,
        seed=seed,
        progress=Console(stderr=True),
    )
    people = Console()
    if not people.is_terminal:
        people.width = _FILE_WIDTH
    show_layers(document, people)
    if as_json or not people.is_terminal:
        typer.echo(json.dumps(document))


@app.command()
@options.spread
def tune(
    *,
    target: options.Target = None,
    asked: TuneOptions,
    verifier: options.Verifier = None,
    prompts: options.PromptFile = None,
    limit: options.Limit = None,
    max_tokens: options.BenchTokens = 128,
    seed: options.BenchSeed = 0,
    context: options.Context = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
    quantize: options.Quantize = None,
    threads: options.Threads = None,
    as_json: options.BenchJson = False,
) -> None:
    """Measure your prompts, and say whether to speculate, with whom and how far.

    Prints tables and the answer in words, and as the last line one JSON document: always into a file or a pipe, with
    --json on a terminal too. --out writes that document, for --config of `outrider run` and `outrider bench`.
    """
    from outrider.bench.settings import parse_real, parse_whole
    from outrider.tune.run import check_out, run_tune, write
    from outrider.tune.settings import Settings, read_ks, read_proposers
    from outrider.tune.table import show

    settings = Settings(
        target=target,
        proposers=read_proposers(asked.proposers, target),
        ks=read_ks(asked.k),
        batches=parse_whole("--batch", asked.batch),
        temperatures=parse_real("--temperature", asked.temperature),
        verifier=verifier,
        prompts=prompts,
        limit=limit,
        rounds=asked.rounds,
        max_tokens=max_tokens,
        seed=seed,
        dtype=dtype,
        device=device,
        kernels=kernels,
        quantize=quantize,
        threads=threads,
        context=context,
    )
    if asked.out:
        check_out(asked.out)  # before the measurement rather than after it
    people = Console()
    if not people.is_terminal:
        people.width = _FILE_WIDTH
    document = run_tune(settings, progress=Console(stderr=True))
    show(document, people)
    if asked.out:
        write(document, asked.out)
        typer.echo(f"the advice is in {asked.out}; use it as --config {asked.out}", err=True)
    if as_json or not people.is_terminal:
        typer.echo(json.dumps(document))
