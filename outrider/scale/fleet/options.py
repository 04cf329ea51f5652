"""The options of `outrider fleet`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError
from outrider.scale.fleet.arrivals import is_trace

# Options of random arrivals. A trace has its own times, lengths and prefixes.
_NOT_FOR_TRACE = ("seconds", "prompt_tokens", "output_tokens", "prefixes", "prefix_tokens")
_REPLICA = "Replica"
_LOAD = "Load"
_FLEET = "Fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of `outrider fleet`, as strings and numbers of the command line."""

    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Measured costs of a server, from benchmarks/server/fleet.py.",
            rich_help_panel=_REPLICA,
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|SIZE", help="Compute the costs as outrider project does: 8B, ...", rich_help_panel=_REPLICA
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(metavar="DIR|SIZE", help="Draft model. Default: lookup drafts.", rich_help_panel=_REPLICA),
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="H100, RTX-4090, ...; an unknown name lists all.", rich_help_panel=_REPLICA),
    ] = None
    devices: Annotated[int, typer.Option(help="Tensor-parallel devices.", rich_help_panel=_REPLICA)] = 1
    alpha: Annotated[
        str,
        typer.Option(
            metavar="RATES",
            help="Acceptance: one value for all positions, such as 0.8, or one for each, such as 0.85,0.8,0.7.",
            rich_help_panel=_REPLICA,
        ),
    ] = "0.7"
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_REPLICA)] = 16
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of a round.", rich_help_panel=_REPLICA)
    ] = 512
    max_round_ms: Annotated[
        float,
        typer.Option(
            min=0.0, help="Milliseconds of a round while sequences decode. 0: no limit.", rich_help_panel=_REPLICA
        ),
    ] = 60.0
    prefix_cache_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of shared prefixes that are kept.", rich_help_panel=_REPLICA)
    ] = 100_000
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="poisson:RATE, bursts:RATE:PEAK:PERIOD (PEAK times the mean rate in a fifth of each PERIOD seconds),"
            " or a file of JSON lines. RATE is requests/s for each replica.",
            rich_help_panel=_LOAD,
        ),
    ] = "poisson:1"
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds in which requests arrive.", rich_help_panel=_LOAD)
    ] = 120.0
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Mean tokens of a prompt.", rich_help_panel=_LOAD)] = 256
    output_tokens: Annotated[int, typer.Option(min=1, help="Mean tokens of an output.", rich_help_panel=_LOAD)] = 128
    prefixes: Annotated[
        int, typer.Option(min=0, help="Shared prefixes for each replica. 0: none.", rich_help_panel=_LOAD)
    ] = 0
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a shared prefix.", rich_help_panel=_LOAD)] = 512
    replicas: Annotated[str, typer.Option(metavar="LIST", help="Numbers of replicas.", rich_help_panel=_FLEET)] = "10"
    routing: Annotated[
        str,
        typer.Option(metavar="LIST", help="round-robin, least-loaded, prefix.", rich_help_panel=_FLEET),
    ] = "least-loaded"
    speculation: Annotated[str, typer.Option(metavar="LIST", help="off, fixed:K, load.", rich_help_panel=_FLEET)] = (
        "load"
    )
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.", rich_help_panel=_FLEET)] = 0


def check_given(options: FleetOptions, given: Collection[str]) -> None:
    """Refuse options that would have no effect.

    Args:
        options: the options.
        given: names of those that the user has set.

    Raises:
        OutriderError: an option is for random arrivals and there is a trace, or a prefix has a length and no number.
    """
    for name in _NOT_FOR_TRACE:
        if name in given and is_trace(options.arrivals):
            raise OutriderError(
                f"--{name.replace('_', '-')} is for random arrivals, and the trace {options.arrivals} has its own;"
                " leave it out"
            )
    if "prefix_tokens" in given and not options.prefixes:
        raise OutriderError(
            "--prefix-tokens is the length of shared prefixes; give --prefixes as well, or leave it out"
        )
