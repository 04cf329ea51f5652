"""The command `outrider fleet`: from the options to the JSON document."""

from itertools import product
from typing import Any

from outrider._version import __version__
from outrider.core.option import as_json
from outrider.errors import OutriderError
from outrider.scale.estimate.machines import MachineOverrides
from outrider.scale.estimate.pair import Acceptance
from outrider.scale.fleet.arrivals import Arrival, Lengths, parse_arrivals
from outrider.scale.fleet.costs import ServerCosts, projected_costs, read_costs
from outrider.scale.fleet.options import FleetOptions
from outrider.scale.fleet.replica import ReplicaSettings
from outrider.scale.fleet.report import NOTE, summarize
from outrider.scale.fleet.simulation import Fleet
from outrider.scale.fleet.speculation import parse_policy

_MAX_REPLICAS = 10_000


def run_fleet(options: FleetOptions) -> dict[str, Any]:
    """Simulate each number of replicas with each router and each policy of speculation.

    Raises:
        OutriderError: an option is invalid, or SimPy is not installed.
    """
    for count in options.replicas:
        if not 1 <= count <= _MAX_REPLICAS:
            raise OutriderError(f"--replicas is {count}; use numbers from 1 to {_MAX_REPLICAS}")
    server = _costs(options)
    acceptance = Acceptance(rates=options.alpha, repeat_last=True)
    settings = ReplicaSettings(
        server=server,
        acceptance=acceptance,
        max_num_seqs=options.engine.max_num_seqs,
        max_num_batched_tokens=options.engine.max_num_batched_tokens,
        max_round_seconds=options.engine.max_round_ms / 1e3,
        prefix_cache_tokens=options.prefix_cache_tokens,
    )
    results = []
    for count in options.replicas:
        arrivals = _arrivals(options, count)
        for routing, speculation in product(options.routing.split(","), options.speculation.split(",")):
            policy = parse_policy(speculation, server.costs, acceptance)
            fleet = Fleet(settings, policy, replicas=count, routing=routing, seed=options.seed)
            figures = summarize(fleet.run_open(arrivals))
            results.append({"replicas": count, "routing": routing, "speculation": speculation, **figures})
    alpha = ",".join(f"{rate:g}" for rate in options.alpha)
    source = options.costs or f"{options.target} on {options.machine}"
    return {
        "benchmark": "outrider fleet",
        "simulation": NOTE,
        "description": f"costs of {source}, requests {options.arrivals}, acceptance {alpha}",
        "arguments": as_json(options),
        "results": results,
        "versions": {"outrider": __version__},
    }


def _costs(options: FleetOptions) -> ServerCosts:
    if options.costs and (options.target or options.machine or options.draft or options.devices != 1):
        raise OutriderError("--costs has the costs of a machine; leave --target, --draft, --machine and --devices out")
    if options.costs:
        return read_costs(options.costs)
    if options.target is None:
        raise OutriderError("no costs are given; use --costs FILE, or --target and --machine")
    return projected_costs(options.target, options.draft, options.machine, MachineOverrides(devices=options.devices))


def _arrivals(options: FleetOptions, replicas: int) -> list[Arrival]:
    lengths = Lengths(
        prompt=options.prompt_tokens,
        output=options.output_tokens,
        prefixes=options.prefixes * replicas,
        prefix_tokens=options.prefix_tokens,
    )
    arrivals = parse_arrivals(
        options.arrivals, seconds=options.seconds, lengths=lengths, seed=options.seed, replicas=replicas
    )
    if not arrivals:
        raise OutriderError("no request arrives; use a higher rate in --arrivals, or more --seconds")
    return arrivals
