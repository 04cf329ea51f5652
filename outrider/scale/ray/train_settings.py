"""The options of `outrider train` for Ray Train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError
from outrider.scale.ray.options import address_option

_PANEL = "Ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """The processes of a training on Ray. The values are checked when the record is made."""

    ray_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train with so many processes on Ray. Each reserves --threads CPUs, or 1. Needs pip install"
            ' "outrider\\[ray]". Default: one process without Ray.',
            rich_help_panel=_PANEL,
        ),
    ] = None
    ray_gpus: Annotated[
        int | None,
        typer.Option(
            "--ray-gpus", min=0, max=1, help="GPUs that each process reserves. Default: 0.", rich_help_panel=_PANEL
        ),
    ] = None
    ray_address: Annotated[str | None, address_option(_PANEL)] = None

    def __post_init__(self) -> None:
        for option, value in {"--ray-gpus": self.ray_gpus, "--ray-address": self.ray_address}.items():
            if value is not None and self.ray_workers is None:
                raise OutriderError(f"{option} belongs to --ray-workers; give --ray-workers, or leave {option} out")
