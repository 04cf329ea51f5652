"""The command `outrider scale`."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from outrider.errors import OutriderError
from outrider.models.loader.embedded import model_folder, model_name
from outrider.models.loader.load import check_model
from outrider.runtime.report.console import count_text
from outrider.scale.ray.application import APP, build_application
from outrider.scale.ray.cluster import connect
from outrider.scale.ray.package import import_ray, import_serve
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.listening import base_url, bind, check_tls
from outrider.serve.settings import Settings


def scale(settings: Settings, scale: ScaleSettings) -> None:
    """Start the replicas with Ray Serve, and serve until a signal arrives.

    Raises:
        OutriderError: Ray is not installed or cannot be reached, the port is in use, or the replicas do not start.
    """
    # Ray Serve starts its proxy again if it does not answer in this time. The default of 5 seconds
    # is too short for a busy machine.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray runs batch jobs, with less priority than a server needs
    ray, serve = import_ray(), import_serve()
    check_model(model_folder(settings.engine.target))
    check_tls(settings.tls_cert, settings.tls_key)
    name = settings.served_model_name or model_name(settings.engine.target)
    application = build_application(settings, scale, name=name)
    sockets = bind(settings.host, settings.port)
    port = sockets[0].getsockname()[1]
    for each in sockets:
        each.close()  # Ray Serve's proxy opens the port again
    stopped = threading.Event()
    connect(
        ray,
        scale.address,
        processes=scale.max_replicas or scale.replicas,
        cpus=scale.replica_cpus,
        kind="replicas",
        log_to_driver=False,
    )
    try:
        try:
            serve.start(proxy_location="HeadOnly", http_options=_http_options(settings, port))
            serve.run(application, name=APP, route_prefix="/")
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise OutriderError(f"the replicas did not start: {str(error).strip().splitlines()[-1]}") from error
        _handle_signals(stopped)
        typer.echo(f"{name} at {base_url(settings, port)}, {_replicas(scale)}", err=True)
        stopped.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


def _http_options(settings: Settings, port: int) -> dict[str, Any]:
    """Return the options of Ray Serve's proxy."""
    options: dict[str, Any] = {"host": settings.host, "port": port}
    if settings.tls_cert and settings.tls_key:
        # The proxy has another working directory.
        options["ssl_certfile"] = str(Path(settings.tls_cert).resolve())
        options["ssl_keyfile"] = str(Path(settings.tls_key).resolve())
    return options


def _handle_signals(stopped: threading.Event) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


def _replicas(scale: ScaleSettings) -> str:
    if not scale.autoscales:
        return count_text(scale.replicas, "replica")
    return f"{scale.replicas} to {scale.max_replicas} replicas"
