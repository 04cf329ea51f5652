"""The options of `outrider scale`, besides those of `outrider serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError

_PANEL = "Replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """How many replicas there are, and what each of them gets. The values are checked when the record is made."""

    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the engine, at least.", rich_help_panel=_PANEL)] = 1
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replicas of the engine, at most. Ray Serve adds some while requests queue. Default: as --replicas.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    target_requests: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Requests per replica that the number of replicas is adjusted to. Default: half of --max-num-seqs.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    replica_cpus: Annotated[
        float,
        typer.Option(
            "--replica-cpus",
            min=0.0,
            help="CPUs that a replica reserves in Ray, and its threads if --threads is not set.",
            rich_help_panel=_PANEL,
        ),
    ] = 1.0
    replica_gpus: Annotated[
        float, typer.Option("--replica-gpus", min=0.0, help="GPUs that a replica reserves.", rich_help_panel=_PANEL)
    ] = 0.0
    max_imbalance: Annotated[
        int,
        typer.Option(
            min=0,
            help="A request goes to the replica that has cached most of its prompt, unless that replica has this many"
            " more requests than another one.",
            rich_help_panel=_PANEL,
        ),
    ] = 4
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a running Ray cluster; auto: the cluster of this machine. Default: start Ray here.",
            rich_help_panel=_PANEL,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise OutriderError(
                f"--max-replicas is {self.max_replicas}, and --replicas is {self.replicas}; use at least as many"
            )
        if self.target_requests is not None and not self.target_requests > 0:
            raise OutriderError(f"--target-requests is {self.target_requests}; use a number above 0")
