"""The commands of `outrider`. Each one imports what it needs when it runs, so --help is fast."""

import errno
import gc
import json
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from outrider._version import __version__
from outrider.cli import drafts
from outrider.cli.derive import spread
from outrider.cli.media import media
from outrider.cli.mistakes import Commands, print_mistake
from outrider.cli.options import Printing, PromptOptions, TextPrinting
from outrider.cli.sampling_options import ConstraintOptions, SamplingOptions
from outrider.cli.source import SourceOptions, read_source
from outrider.core.config import ENGINE_OPTIONS, EngineConfig
from outrider.core.option import Shown
from outrider.drafting.propose.present import check_present
from outrider.lab.audit.server.settings import ServerOptions, check_given
from outrider.lab.audit.settings import Settings as AuditSettings
from outrider.lab.bench.settings import Settings as BenchSettings
from outrider.lab.bench.settings import check_mode
from outrider.lab.loadgen.settings import Settings as LoadSettings
from outrider.lab.tune.server.settings import ServerOptions as TuneServer
from outrider.lab.tune.server.settings import check_given as check_tune_given
from outrider.lab.tune.settings import Settings as TuneSettings
from outrider.runtime.report.console import INTERRUPTED, print_document
from outrider.runtime.torch_import import defer_meta_kernels
from outrider.scale.estimate.options import ProjectOptions
from outrider.scale.fleet.options import FleetOptions
from outrider.scale.fleet.options import check_given as check_fleet_given
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.settings import Settings as ServeSettings

# New objects before Python searches for reference cycles. Imports create a million objects that stay alive, and with
# the default threshold Python would search them many times.
_COLLECT_AFTER = 100_000
_WRITE_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT)


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
            gc.freeze()  # skip the search for cycles at exit
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
@spread
def run(
    *,
    prompts: PromptOptions,
    source: SourceOptions,
    engine: Annotated[EngineConfig, Shown((*ENGINE_OPTIONS, "speculative_config", "max_model_len"), config=True)],
    sampling: SamplingOptions,
    form: ConstraintOptions,
    printing: TextPrinting,
) -> None:
    """Complete a prompt and report what speculation did.

    The text goes to standard output, everything else to standard error. With --json the text goes
    to standard error, too, and standard output has only the JSON document.
    """
    if engine.target is None:
        prompts.check_text()
    params = replace(sampling.params(unlimited=prompts.chat), constraint=form.constraint())
    given = read_source(source)
    check_present(engine.target, engine.proposer)
    from outrider.cli.output import Output
    from outrider.cli.ranks import joined
    from outrider.cli.run import converse, load
    from outrider.cli.transcribe import with_default_length

    with joined(engine.tp, engine.device):
        llm = load(replace(engine, max_num_seqs=min(params.n, engine.max_num_seqs)))
        output = Output(llm, show=printing.show, as_json=printing.json)
        if sampling.max_tokens is None:
            params = with_default_length(llm, params)
        if not converse(llm, params, prompts=prompts, options=source, given=given, output=output):
            raise typer.Exit(1)


@app.command()
@spread
def bench(*, settings: BenchSettings, printing: Printing, given: set[str]) -> None:
    """Benchmark speculation against plain decoding, interleaved, beside the limits of this machine.

    Prints tables, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    check_mode(given)
    check_present(settings.engine.target, settings.engine.proposer, prompts=settings.prompts)
    from outrider.cli.ranks import joined
    from outrider.lab.bench import command

    with joined(settings.engine.tp, settings.engine.device):
        if settings.scaling:
            command.scale(settings, as_json=printing.json)
        elif settings.calibrate:
            command.calibrate(settings, as_json=printing.json)
        elif settings.ceiling:
            command.replay(settings, as_json=printing.json)
        else:
            command.measure(settings, as_json=printing.json)


@app.command()
@spread
def serve(*, settings: ServeSettings) -> None:
    """Serve OpenAI's API over HTTP."""
    engine = settings.engine
    check_present(engine.target, engine.proposer)
    from outrider.cli.ranks import joined
    from outrider.cli.run import load
    from outrider.serve.command import serve
    from outrider.serve.ranks import follow

    with joined(engine.tp, engine.device) as ranks:
        if ranks is None or ranks.first:
            serve(partial(load, engine), settings, ranks=ranks)
        else:
            follow(load(engine), ranks)


@app.command()
@spread
def scale(*, replicas: ScaleSettings, settings: ServeSettings) -> None:
    """Serve OpenAI's API with several replicas of the engine, on Ray.

    Needs pip install "outrider\\[ray]".
    """
    check_present(settings.engine.target, settings.engine.proposer)
    from outrider.scale.ray.command import scale

    threads = settings.engine.threads or max(int(replicas.replica_cpus), 1)
    scale(replace(settings, engine=replace(settings.engine, threads=threads)), replicas)


@app.command()
@spread
def load(*, settings: LoadSettings, printing: Printing) -> None:
    """Generate load for a server of OpenAI's API and measure its latency.

    The exit code is 1 if all requests to a server fail.
    """
    from outrider.lab.loadgen import command

    if not command.load(settings, as_json=printing.json):
        raise typer.Exit(1)


@app.command()
@spread
def audit(*, settings: AuditSettings, server: ServerOptions, printing: Printing, given: set[str]) -> None:
    """Test that speculation leaves the text of this target and proposer unchanged.

    With --server, test whether the output of a running server is that of the target. The exit code
    is 1 if a test fails.
    """
    check_given(server.server, given)
    check_present(settings.engine.target, settings.engine.proposer)
    from outrider.cli.ranks import joined

    console = Console(stderr=printing.json)
    with joined(settings.engine.tp, settings.engine.device):
        if server.server is None:
            from outrider.lab.audit.run import run_audit

            report = run_audit(settings, console=console)
        else:
            from outrider.lab.audit.server.run import run_server_audit

            report = run_server_audit(settings, server, console=console)
        if printing.json:
            typer.echo(json.dumps(report))
        if not report["passed"]:
            raise typer.Exit(1)


@app.command()
@partial(spread, environment=False)  # the options describe another machine
def project(*, asked: ProjectOptions, printing: Printing) -> None:
    """Estimate the speedup on a machine and for a model that you do not have, with a roofline model.

    Prints tables, then one JSON document as the last line if the output is not a terminal or with --json.
    """
    from outrider.scale.estimate.run import run_project
    from outrider.scale.estimate.table import show

    document = run_project(asked)
    print_document(document, show, as_json=printing.json)


@app.command()
@partial(spread, environment=False)  # the options describe another machine
def fleet(*, asked: FleetOptions, printing: Printing, given: set[str]) -> None:
    """Simulate many servers: arrivals, routing, continuous batching, and speculation by load."""
    check_fleet_given(asked, given)
    from outrider.scale.fleet.command import run_fleet
    from outrider.scale.fleet.report import show

    document = run_fleet(asked)
    print_document(document, show, as_json=printing.json)


@app.command()
@spread
def tune(*, settings: TuneSettings, server: TuneServer, printing: Printing, given: set[str]) -> None:
    """Measure proposers on your prompts and recommend one, with its k, or plain decoding.

    With --server, measure a running server and say what to set there.

    Prints tables and a summary, then one JSON document as the last line if the output is not a terminal or with --json.
    --out writes that document, for --config of `outrider run`, `serve` and `bench`.
    """
    check_tune_given(server.server, given)
    check_present(settings.engine.target, *settings.proposers, prompts=settings.prompts)
    from outrider.lab.tune import command

    if server.server is not None:
        command.tune_server(settings, server, as_json=printing.json)
    elif interrupted := command.tune(settings, as_json=printing.json):
        print_mistake(interrupted)
        raise typer.Exit(INTERRUPTED)


for command in (drafts.fit, drafts.train, drafts.inspect, drafts.convert, drafts.export, drafts.index, drafts.layers):
    app.command()(command)
app.add_typer(media, name="media", cls=Commands)
