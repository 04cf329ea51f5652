"""The commands of `outrider`. Each one imports what it needs when it runs, so --help is fast."""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from outrider._version import __version__
from outrider.cli import drafts, options
from outrider.cli.audit_options import AuditOptions
from outrider.cli.bench_options import BenchOptions, check_calibration
from outrider.cli.constraint_options import ConstraintOptions
from outrider.cli.media import media
from outrider.cli.mistakes import Commands, print_mistake
from outrider.cli.sampling_options import SamplingOptions
from outrider.cli.source import SourceOptions, read_source
from outrider.cli.tune_options import MeasureOptions
from outrider.errors import OutriderError
from outrider.lab.audit.server.settings import ServerOptions, check_given
from outrider.lab.common.number_lists import parse_figures, parse_real, parse_whole
from outrider.lab.loadgen.settings import Settings as LoadSettings
from outrider.lab.tune.options import TuneOptions
from outrider.lab.tune.server.settings import ServerOptions as TuneServer
from outrider.lab.tune.server.settings import check_given as check_tune_given
from outrider.models.loader.embedded import check_present
from outrider.runtime.atomic_files import check_writable
from outrider.runtime.report.console import INTERRUPTED, print_document
from outrider.runtime.torch_import import defer_meta_kernels
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.fleet.options import FleetOptions
from outrider.scale.fleet.options import check_given as check_fleet_given
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.settings import Settings as ServeSettings

# New objects before Python searches for cycles. Imports make a million objects that stay, and by default, Python would
# search them many times.
_COLLECT_AFTER = 100_000
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)
# Fields of an engine's configuration that are options of `outrider serve`.
_SERVER_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_round_ms", "cache_gb", "prefix_caching")
_Models = TypeVar("_Models", bound=options.EngineOptions)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The program `outrider`."""
    defer_meta_kernels()
    gc.set_threshold(_COLLECT_AFTER)
    try:
        try:
            app()
        finally:
            gc.freeze()  # objects that live to the end need no search for cycles
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that flushing at exit does not fail again
        if error.errno != errno.EPIPE:  # the reader has closed the pipe
            print_mistake(f"the output cannot be written ({error.strerror}); free some space, or write it elsewhere")
        raise SystemExit(1) from None


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
    """Exact speculative decoding: the text of your own model, faster."""


@app.command()
@options.spread
def run(
    ctx: typer.Context,
    prompt: options.PromptText = None,
    *,
    source: SourceOptions,
    chat: options.ChatOptions,
    models: options.ModelOptions,
    config: options.Config = None,
    sampling: SamplingOptions,
    form: ConstraintOptions,
    show: options.Show = False,
    as_json: options.Json = False,
) -> None:
    """Complete a prompt and report what speculation did.

    The text goes to standard output, everything else to standard error. With --json the text goes to standard error,
    too, and standard output has only the JSON document.
    """
    params = replace(sampling.params(unlimited=chat.chat), constraint=form.constraint())
    given = read_source(source)
    _check_present(models, config)
    from outrider.cli.output import Output
    from outrider.cli.ranks import joined
    from outrider.cli.run import ROWS, converse, load
    from outrider.cli.transcribe import with_default_length

    models, others = _merge(ctx, models, config)
    with joined(models.tp, models.device):
        llm = load(models, **{"max_num_seqs": min(params.n, ROWS), **others})
        output = Output(llm, show=show, as_json=as_json)
        if sampling.max_tokens is None:
            params = with_default_length(llm, params)
        if not converse(llm, params, prompt=prompt, options=source, given=given, chat=chat, output=output):
            raise typer.Exit(1)


@app.command()
@options.spread
def bench(
    ctx: typer.Context,
    *,
    models: options.EngineOptions,
    config: options.Config = None,
    asked: BenchOptions,
    as_json: options.BenchJson = False,
) -> None:
    """Benchmark speculation against plain decoding, interleaved, beside the limits of this machine.

    Prints tables, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    _check_present(models, config)
    from outrider.cli.ranks import joined
    from outrider.lab.bench import command

    models, others = _merge(ctx, models, config, min_k=1)
    if others:
        raise OutriderError(f"config {config}: {next(iter(others))} is no setting of outrider bench; leave it out")
    settings = asked.settings(models)
    if asked.calibrate:
        check_calibration(_given(ctx))
    with joined(settings.tp, settings.device):
        if asked.calibrate:
            command.calibrate(settings, as_json=as_json)
        else:
            command.measure(settings, report=asked.report, as_json=as_json)


@app.command()
@options.spread
def serve(
    ctx: typer.Context, *, models: options.ModelOptions, config: options.Config = None, settings: ServeSettings
) -> None:
    """Serve OpenAI's API over HTTP."""
    _check_present(models, config)
    from outrider.cli.ranks import joined
    from outrider.cli.run import load
    from outrider.serve.command import serve
    from outrider.serve.ranks import follow

    models, others = _merge(ctx, models, config)
    limits = {name: others.pop(name) for name in _SERVER_LIMITS if name in others}
    settings = replace(settings, **limits)
    loaded = partial(
        load,
        models,
        **{**_limits(settings), "isolate_faults": True, **others},
    )
    if models.tp > 1 and settings.weight_updates is not None:
        raise OutriderError("--weight-updates loads weights into one process, and not into --tp ranks; leave one out")
    with joined(models.tp, models.device) as ranks:
        if ranks is None or ranks.first:
            serve(loaded, settings, target=models.target, ranks=ranks)
        else:
            follow(loaded(), ranks)


@app.command()
@options.spread
def scale(
    ctx: typer.Context,
    *,
    models: options.ModelOptions,
    config: options.Config = None,
    replicas: ScaleSettings,
    settings: ServeSettings,
) -> None:
    """Serve OpenAI's API with several replicas of the engine, on Ray.

    Needs pip install "outrider\\[ray]".
    """
    _check_present(models, config)
    from outrider.core.config import EngineConfig
    from outrider.scale.ray.command import scale

    models, others = _merge(ctx, models, config)
    settings = replace(settings, **{name: others.pop(name) for name in _SERVER_LIMITS if name in others})
    threads = models.threads or max(int(replicas.replica_cpus), 1)
    engine_config = EngineConfig(
        **{**asdict(models), "threads": threads, **_limits(settings), "isolate_faults": True, **others}
    )
    scale(engine_config, settings, replicas)


@app.command()
@options.spread
def load(*, settings: LoadSettings, as_json: options.BenchJson = False) -> None:
    """Generate load for a server of OpenAI's API and measure its latency.

    The exit code is 1 if all requests to a server fail.
    """
    from outrider.lab.loadgen import command

    if not command.load(settings, as_json=as_json):
        raise typer.Exit(1)


def _limits(settings: ServeSettings) -> dict[str, Any]:
    """Return the fields of an engine's configuration that are options of a server."""
    return {
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_round_ms": settings.max_round_ms or None,
        "cache_gb": settings.cache_gb,
        "prefix_caching": settings.prefix_caching,
    }


def _check_present(models: options.EngineOptions, config: str | None) -> None:
    """Report a missing target before packages are imported, which takes seconds. `config` may name another one."""
    if config is None:
        check_present(models.target)


def _merge(
    ctx: typer.Context, models: _Models, config: str | None, *, min_k: int = 0
) -> tuple[_Models, dict[str, Any]]:
    """Return the options with the settings of `--config`, and the settings that are no options of the command."""
    from outrider.cli.config_file import merge_config

    return merge_config(models, config, given=_given(ctx), min_k=min_k)


def _given(ctx: typer.Context) -> set[str]:
    """Return the names of the options on the command line, without those of environment variables."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


@app.command()
@options.spread
def audit(
    ctx: typer.Context,
    *,
    asked: AuditOptions,
    server: ServerOptions,
    as_json: options.Json = False,
) -> None:
    """Test that speculation leaves the text of this target and proposer unchanged.

    With --server, test whether the output of a running server is that of the target. The exit code is 1 if a test
    fails.
    """
    from outrider.cli.ranks import joined

    console = Console(stderr=as_json)
    check_given(server.server, _given(ctx))
    with joined(asked.tp, asked.device):
        if server.server is None:
            from outrider.lab.audit.run import run_audit

            report = run_audit(**asked.for_pair(), console=console)
        else:
            from outrider.lab.audit.server.run import run_server_audit

            report = run_server_audit(options=server, **asked.for_server(), console=console)
        if as_json:
            typer.echo(json.dumps(report))
        if not report["passed"]:
            raise typer.Exit(1)


@app.command()
@partial(options.spread, environment=False)  # they describe other machines than this one
def project(*, asked: ProjectOptions, as_json: options.BenchJson = False) -> None:
    """Estimate the speedup on a machine and for a model that you do not have, with a roofline model.

    Prints tables, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    from outrider.scale.estimate.run import ParsedLists, run_project
    from outrider.scale.estimate.table import show

    shares = ("bandwidth_share", "arithmetic_share", "exposed", "round_ms", "layer_us", "draft_pass_us", "allreduce_us")
    given = {name: getattr(asked, name) for name in shares}
    document = run_project(
        asked,
        ParsedLists(
            batch=parse_whole("--batch", asked.batch),
            context=parse_whole("--context", asked.context),
            k=parse_whole("--k", asked.k) if asked.k else (),
            alpha=parse_figures("--alpha", asked.alpha) if asked.alpha else (),
            shares={
                name.removesuffix("_share"): parse_figures(f"--{name.replace('_', '-')}", text)
                for name, text in given.items()
                if text
            },
        ),
    )
    print_document(document, show, as_json=as_json)


@app.command()
@partial(options.spread, environment=False)  # they describe other machines than this one
def fleet(ctx: typer.Context, *, asked: FleetOptions, as_json: options.BenchJson = False) -> None:
    """Simulate a fleet of servers: arrivals, routing, continuous batching, and speculation by load."""
    from outrider.scale.fleet.command import run_fleet
    from outrider.scale.fleet.report import show

    check_fleet_given(asked, _given(ctx))

    document = run_fleet(
        asked, alpha=parse_figures("--alpha", asked.alpha), replicas=parse_whole("--replicas", asked.replicas)
    )
    print_document(document, show, as_json=as_json)


@app.command()
@options.spread
def tune(
    ctx: typer.Context,
    *,
    target: options.Target = None,
    asked: TuneOptions,
    measured: MeasureOptions,
    server: TuneServer,
    as_json: options.BenchJson = False,
) -> None:
    """Measure proposers on your prompts and recommend one, with its k, or plain decoding.

    With --server, measure a running server and say what to set there.

    Prints tables and a summary, then one JSON document as the last line if the output is not a terminal or
    with --json. --out writes that document, for --config of `outrider run`, `serve` and `bench`.
    """
    check_tune_given(server.server, _given(ctx))
    if server.server is not None:
        _tune_server(server, asked, measured, as_json=as_json)
        return
    from outrider.lab.tune.run import run_tune, write
    from outrider.lab.tune.table import show

    settings = measured.settings(target, asked)
    if asked.out:
        check_writable(asked.out)  # before the measurement rather than after it
    progress = Console(stderr=True)
    runs = Path(f"{asked.out}.runs").expanduser() if asked.out else None
    document = run_tune(settings, progress=progress, file=runs)
    print_document(document, show, as_json=as_json, write=partial(write, file=asked.out) if asked.out else None)
    if not document["complete"]:
        kept = f"its runs are in {runs}, and the same command continues" if runs else "with --out it could continue"
        print_mistake(f"the measurement was interrupted; {kept}")
        raise typer.Exit(INTERRUPTED)


def _tune_server(server: TuneServer, asked: TuneOptions, measured: MeasureOptions, *, as_json: bool) -> None:
    """Measure a running server."""
    from outrider.lab.tune.server.run import run_server_tune, show

    temperatures = parse_real("--temperature", asked.temperature)
    if len(temperatures) > 1:
        raise OutriderError(f"--temperature is {asked.temperature}, and --server measures one temperature; give one")
    document = run_server_tune(
        server,
        batches=parse_whole("--batch", asked.batch),
        temperature=temperatures[0],
        prompts=measured.prompts,
        limit=measured.limit,
        max_tokens=measured.max_tokens,
        seed=measured.seed,
        progress=Console(stderr=True),
    )
    print_document(document, show, as_json=as_json)


for command in (drafts.fit, drafts.train, drafts.inspect, drafts.convert, drafts.export, drafts.index, drafts.layers):
    app.command()(command)
app.add_typer(media, name="media", cls=Commands)
