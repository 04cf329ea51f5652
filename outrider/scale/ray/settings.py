"""The options of `outrider scale`, besides those of `outrider serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError
from outrider.scale.ray.options import address_option

_PANEL = "Replicas"
_AUTOSCALING = "Autoscaling"
_UPSCALE_SECONDS = 5.0
_DOWNSCALE_SECONDS = 60.0
_WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """How many replicas there are, and what each of them gets. The values are checked when the record is made."""

    replicas: Annotated[
        int,
        typer.Option(
            min=1,
            help="Replicas of the engine. With --max-replicas: at the start, and at least.",
            rich_help_panel=_PANEL,
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Replicas of the engine, at most. A number above --replicas turns autoscaling on. Default: as"
            " --replicas.",
            rich_help_panel=_AUTOSCALING,
        ),
    ] = None
    target_requests: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Requests per replica, running and waiting, that the number of replicas is adjusted to. Default: half"
            " of --max-num-seqs.",
            rich_help_panel=_AUTOSCALING,
        ),
    ] = None
    target_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Output tokens per second and replica that the number of replicas is adjusted to. If requests and"
            " tokens/s ask for different numbers of replicas, the larger one counts. Default: only requests count.",
            rich_help_panel=_AUTOSCALING,
        ),
    ] = None
    upscale_delay: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"How long the load must ask for more replicas. Default: {_UPSCALE_SECONDS:g}.",
            rich_help_panel=_AUTOSCALING,
        ),
    ] = None
    downscale_delay: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"How long the load must ask for fewer replicas. Default: {_DOWNSCALE_SECONDS:g}.",
            rich_help_panel=_AUTOSCALING,
        ),
    ] = None
    load_window: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help=f"Time over which requests and tokens/s are averaged. Default: {_WINDOW_SECONDS:g}.",
            rich_help_panel=_AUTOSCALING,
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
    address: Annotated[str | None, address_option(_PANEL)] = None

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise OutriderError(
                f"--max-replicas is {self.max_replicas}, and --replicas is {self.replicas}; use at least as many"
            )
        targets = {
            "--target-requests": self.target_requests,
            "--target-tokens-per-second": self.target_tokens_per_second,
            "--load-window": self.load_window,
        }
        delays = {"--upscale-delay": self.upscale_delay, "--downscale-delay": self.downscale_delay}
        for option, value in targets.items():
            if value is not None and not value > 0:
                raise OutriderError(f"{option} is {value:g}; use a number above 0")
        for option, value in delays.items():
            if value is not None and not value >= 0:
                raise OutriderError(f"{option} is {value:g}; use at least 0")
        for option, value in {**targets, **delays}.items():
            if value is not None and not self.autoscales:
                raise OutriderError(
                    f"{option} needs a number of replicas that may change; set --max-replicas above"
                    f" --replicas, which is {self.replicas}, or leave {option} out"
                )

    @property
    def autoscales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.max_replicas is not None and self.max_replicas > self.replicas

    @property
    def upscale_seconds(self) -> float:
        """`upscale_delay`, or its default."""
        return _UPSCALE_SECONDS if self.upscale_delay is None else self.upscale_delay

    @property
    def downscale_seconds(self) -> float:
        """`downscale_delay`, or its default."""
        return _DOWNSCALE_SECONDS if self.downscale_delay is None else self.downscale_delay

    @property
    def window_seconds(self) -> float:
        """`load_window`, or its default."""
        return _WINDOW_SECONDS if self.load_window is None else self.load_window
