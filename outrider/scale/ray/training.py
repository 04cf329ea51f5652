"""Data-parallel training of drafts by Ray Train: `outrider train --ray-workers N`."""

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.errors import OutriderError
from outrider.runtime.bar import shown_on_stderr
from outrider.runtime.processes import world_size
from outrider.runtime.report.console import print_document
from outrider.scale.ray.cluster import connect
from outrider.scale.ray.package import import_ray, import_train
from outrider.scale.ray.train_settings import RayWorkers
from outrider.train.command import show
from outrider.train.distributed import TIMEOUT
from outrider.train.run import Training
from outrider.train.settings import Settings


def train_on_ray(kind: str, settings: Settings, workers: RayWorkers, *, as_json: bool) -> None:
    """Train with the processes of `workers`, and print the results.

    Raises:
        OutriderError: Ray is not installed or cannot be reached, or a process fails. The message says why.
    """
    num_workers = workers.ray_workers or 1
    if world_size() > 1:
        raise OutriderError("torchrun and --ray-workers both start processes; use one of them")
    ray = import_ray()
    train, torch = import_train()
    cpus = settings.engine.threads or 1
    gpus = workers.ray_gpus or 0
    connect(ray, workers.ray_address, processes=num_workers, cpus=cpus, kind="training processes", log_to_driver=True)
    try:
        with TemporaryDirectory() as storage:
            trainer = torch.TorchTrainer(
                partial(_train, kind=kind, settings=settings, folder=os.getcwd()),
                torch_config=torch.TorchConfig(timeout_s=int(TIMEOUT.total_seconds())),
                scaling_config=train.ScalingConfig(
                    num_workers=num_workers, use_gpu=gpus > 0, resources_per_worker={"CPU": cpus, "GPU": gpus}
                ),
                run_config=train.RunConfig(storage_path=storage),  # the training writes its own files
            )
            try:
                document, _ = trainer.fit().return_value
            except train.TrainingFailedError as error:
                raise OutriderError(_reason(error)) from error
    finally:
        ray.shutdown()
    print_document(document, show, as_json=as_json)


def _train(*, kind: str, settings: Settings, folder: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train in one of the processes. Return the results of rank 0, which Ray Train returns to the command."""
    if not Path(folder).is_dir():
        raise OutriderError(f"{folder} does not exist on all machines of the cluster; use a shared folder")
    os.chdir(folder)  # Ray Train uses a folder of its own, and paths are relative to that of the command
    with shown_on_stderr():
        return Training(kind, settings).run()


def _reason(error: Exception) -> str:
    """Return why a training has failed: the last line of the traceback of a process that has raised something."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    texts = [str(failure).strip() for _, failure in sorted(failures.items())]
    lines = [text.splitlines()[-1] for text in texts if text]
    name = f"{OutriderError.__module__}.{OutriderError.__name__}: "
    ours = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return ours[0] if ours else f"the training has failed: {lines[0]}"
