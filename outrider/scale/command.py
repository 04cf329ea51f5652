"""The command `outrider scale`."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

import typer

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from outrider.loader.checkpoint import check_model
from outrider.loader.embedded import model_folder
from outrider.scale.application import APP, build_application
from outrider.scale.package import import_ray, import_serve
from outrider.scale.settings import ScaleSettings
from outrider.serve.command import bind, model_name
from outrider.serve.settings import Settings


def scale(config: EngineConfig, settings: Settings, scale: ScaleSettings) -> None:
    """Start the replicas with Ray Serve, and serve until a signal arrives.

    Raises:
        OutriderError: Ray is not installed or cannot be reached, the port is in use, or the replicas do not start.
    """
    # Ray Serve starts its proxy again if it does not answer in this time. The default of 5 seconds is too short for a
    # busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs batch jobs, with less priority than a server needs
    ray, serve = import_ray(), import_serve()
    folder = model_folder(config.target).resolve()
    check_model(folder)
    name = settings.served_model_name or model_name(folder)
    application = build_application(config, settings, scale, name=name)
    sockets = bind(settings.host, settings.port)
    port = sockets[0].getsockname()[1]
    for each in sockets:
        each.close()  # Ray Serve's proxy opens the port again
    stopped = threading.Event()
    _start(ray, scale)
    try:
        try:
            serve.start(http_options={"host": settings.host, "port": port, "location": "HeadOnly"})
            serve.run(application, name=APP, route_prefix="/")
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise OutriderError(f"the replicas did not start: {str(error).strip().splitlines()[-1]}") from error
        _handle_signals(stopped)
        typer.echo(f"{name} at http://{settings.host}:{port}/v1, {_replicas(scale)}", err=True)
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


def _start(ray: Any, scale: ScaleSettings) -> None:
    """Connect to a cluster, or start Ray on this machine."""
    if scale.address is not None:
        try:
            ray.init(address=scale.address)
        except (ConnectionError, ValueError) as error:
            raise OutriderError(
                f"no Ray cluster answers at {scale.address} ({str(error).splitlines()[0]}); start one with ray start"
                " --head, or leave --address out"
            ) from error
        return
    cpus = os.cpu_count() or 1
    most = scale.max_replicas or scale.replicas
    if most * scale.replica_cpus > cpus:
        raise OutriderError(
            f"{most} replicas with {scale.replica_cpus:g} CPUs each need more than the {cpus} CPUs of this machine; use"
            " a smaller --replica-cpus, or a cluster with --address"
        )
    ray.init(include_dashboard=False, num_cpus=cpus, log_to_driver=False)


def _handle_signals(stopped: threading.Event) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _replicas(scale: ScaleSettings) -> str:
    if scale.max_replicas is None or scale.max_replicas == scale.replicas:
        return f"{scale.replicas} replicas"
    return f"{scale.replicas} to {scale.max_replicas} replicas"
