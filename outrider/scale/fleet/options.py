"""The options of `outrider fleet`."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from outrider.core.config import SERVER_ENGINE, EngineConfig
from outrider.core.option import Option, Shown
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_figures, parse_whole
from outrider.scale.fleet.arrivals import is_trace

# Options of random arrivals. A trace has its own times, lengths and prefixes.
_NOT_FOR_TRACE = ("seconds", "prompt_tokens", "output_tokens", "prefixes", "prefix_tokens")
_REPLICA = "Replica"
_LOAD = "Load"
_FLEET = "Fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of `outrider fleet`."""

    engine: Annotated[EngineConfig, Shown(("max_num_seqs", "max_num_batched_tokens", "max_round_ms"))] = SERVER_ENGINE
    costs: Annotated[str | None, Option("FILE", _REPLICA)] = None
    """Measured costs of a server, from benchmarks/server/fleet.py."""
    target: Annotated[str | None, Option("DIR|SIZE", _REPLICA)] = None
    """Compute the costs as outrider project does: 8B, ..."""
    draft: Annotated[str | None, Option("DIR|SIZE", _REPLICA)] = None
    """Draft model. Default: lookup drafts."""
    machine: Annotated[str | None, Option("NAME", _REPLICA)] = None
    """H100, RTX-4090, ...; an unknown name lists all."""
    devices: Annotated[int, Option(panel=_REPLICA)] = 1
    """Tensor-parallel devices."""
    alpha: Annotated[tuple[float, ...], Option("RATES", _REPLICA, parse=parse_figures)] = (0.7,)
    """Acceptance: one value for all positions, such as 0.8, or one for each, such as 0.85,0.8,0.7."""
    prefix_cache_tokens: Annotated[int, Option(panel=_REPLICA, min=0)] = 100000
    """Tokens of shared prefixes that are kept."""
    arrivals: Annotated[str, Option("SPEC", _LOAD)] = "poisson:1"
    """poisson:RATE, bursts:RATE:PEAK:PERIOD (PEAK times the mean rate in a fifth of each PERIOD seconds), or a file of
    JSON lines. RATE is requests/s for each replica."""
    seconds: Annotated[float, Option(panel=_LOAD, min=0.0)] = 120.0
    """Seconds in which requests arrive."""
    prompt_tokens: Annotated[int, Option(panel=_LOAD, min=1)] = 256
    """Mean tokens of a prompt."""
    output_tokens: Annotated[int, Option(panel=_LOAD, min=1)] = 128
    """Mean tokens of an output."""
    prefixes: Annotated[int, Option(panel=_LOAD, min=0)] = 0
    """Shared prefixes for each replica. 0: none."""
    prefix_tokens: Annotated[int, Option(panel=_LOAD, min=0)] = 512
    """Tokens of a shared prefix."""
    replicas: Annotated[tuple[int, ...], Option("LIST", _FLEET, parse=parse_whole)] = (10,)
    """Numbers of replicas."""
    routing: Annotated[str, Option("LIST", _FLEET)] = "least-loaded"
    """round-robin, least-loaded, prefix."""
    speculation: Annotated[str, Option("LIST", _FLEET)] = "load"
    """off, fixed:K, load."""
    seed: Annotated[int, Option(panel=_FLEET)] = 0
    """Seed of the random numbers."""


def check_given(options: FleetOptions, given: Collection[str]) -> None:
    """Refuse options that would have no effect.

    Args:
        given: names of those that the user has set.

    Raises:
        OutriderError: an option is for random arrivals and there is a trace, or a prefix has a length and no number.
    """
    for name in _NOT_FOR_TRACE:
        if name in given and is_trace(options.arrivals):
            raise OutriderError(
                f"--{name.replace('_', '-')} is for random arrivals, and the trace"
                f" {options.arrivals} has its own; leave it out"
            )
    if "prefix_tokens" in given and not options.prefixes:
        raise OutriderError(
            "--prefix-tokens is the length of shared prefixes; give --prefixes as well, or leave it out"
        )
