"""The options of `outrider train` for Ray Train."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import Option
from outrider.errors import OutriderError

_PANEL = "Ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """The processes of a training on Ray. The values are checked when the record is made."""

    ray_workers: Annotated[int | None, Option(panel=_PANEL, min=1)] = None
    """Train with so many processes on Ray. Each reserves --threads CPUs, or 1. Needs pip install "outrider[ray]".
    Default: one process without Ray."""
    ray_gpus: Annotated[int | None, Option(panel=_PANEL, min=0, max=1)] = None
    """GPUs that each process reserves. Default: 0."""
    ray_address: Annotated[str | None, Option("ADDRESS", _PANEL)] = None
    """Address of a running Ray cluster; auto: the cluster of this machine. Default: start Ray here."""

    def __post_init__(self) -> None:
        for option, value in {"--ray-gpus": self.ray_gpus, "--ray-address": self.ray_address}.items():
            if value is not None and self.ray_workers is None:
                raise OutriderError(f"{option} belongs to --ray-workers; give --ray-workers, or leave {option} out")
