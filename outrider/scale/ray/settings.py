"""The options of `outrider scale`, besides those of `outrider serve`."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import Option
from outrider.errors import OutriderError

_PANEL = "Replicas"
_AUTOSCALING = "Autoscaling"
_UPSCALE_SECONDS = 5.0
_DOWNSCALE_SECONDS = 60.0
_WINDOW_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSettings:
    """How many replicas there are, and what each of them gets. The values are checked when the record is made."""

    replicas: Annotated[int, Option(panel=_PANEL, min=1)] = 1
    """Replicas of the engine. With --max-replicas: at the start, and at least."""
    max_replicas: Annotated[int | None, Option(panel=_AUTOSCALING, min=1)] = None
    """Replicas of the engine, at most. A number above --replicas turns autoscaling on. Default: as --replicas."""
    target_requests: Annotated[float | None, Option("N", _AUTOSCALING)] = None
    """Requests per replica, running and waiting, that the number of replicas is adjusted to. Default: half of
    --max-num-seqs."""
    target_tokens_per_second: Annotated[float | None, Option("N", _AUTOSCALING)] = None
    """Output tokens per second and replica that the number of replicas is adjusted to. If requests and tokens/s ask for
    different numbers of replicas, the larger one counts. Default: only requests count."""
    upscale_delay: Annotated[float | None, Option("SECONDS", _AUTOSCALING)] = None
    """How long the load must ask for more replicas. Default: 5."""
    downscale_delay: Annotated[float | None, Option("SECONDS", _AUTOSCALING)] = None
    """How long the load must ask for fewer replicas. Default: 60."""
    load_window: Annotated[float | None, Option("SECONDS", _AUTOSCALING)] = None
    """Time over which requests and tokens/s are averaged. Default: 30."""
    replica_cpus: Annotated[float, Option(panel=_PANEL, min=0.0)] = 1.0
    """CPUs that a replica reserves in Ray, and its threads if --threads is not set."""
    replica_gpus: Annotated[float, Option(panel=_PANEL, min=0.0)] = 0.0
    """GPUs that a replica reserves."""
    max_imbalance: Annotated[int, Option(panel=_PANEL, min=0)] = 4
    """A request goes to the replica that has cached most of its prompt, unless that replica has this many more requests
    than another one."""
    address: Annotated[str | None, Option("ADDRESS", _PANEL)] = None
    """Address of a running Ray cluster; auto: the cluster of this machine. Default: start Ray here."""

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
