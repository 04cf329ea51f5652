"""The Ray Serve application: replicas of the engine behind one HTTP front."""

import os
from dataclasses import replace
from typing import Any

from outrider.errors import OutriderError
from outrider.scale.ray.front import Front
from outrider.scale.ray.package import import_serve
from outrider.scale.ray.replica import Replica
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.api_keys import all_keys
from outrider.serve.monitoring.tracing import make_tracer
from outrider.serve.settings import Settings

APP = "outrider"  # name of the application
REPLICA, FRONT = "Replica", "Front"  # names of its deployments
_ROUTER = "outrider.scale.ray.router.PrefixRouter"
_POLICY = "outrider.scale.ray.autoscaling:LoadPolicy"
_FRONT_REQUESTS = 10_000  # that the front forwards at once
_WAIT_SECONDS = 0.5  # between checks whether a replica that stops has finished its requests
_REPORTS_PER_WINDOW = 3.0  # of the load, in the time over which it is averaged
_MAX_REPORT_SECONDS = 10.0  # between two reports


def build_application(settings: Settings, scale: ScaleSettings, *, name: str) -> Any:
    """Return the application, for `ray.serve.run`.

    Args:
        settings: the options of `outrider serve`: what each replica loads. Host and port belong to Ray Serve's proxy.
        scale: how many replicas there are, and what each of them gets.
        name: model name in the API.

    Raises:
        OutriderError: Ray is not installed, or a setting does not support replicas.
    """
    check_settings(settings)
    keys = all_keys(settings)
    if settings.otel:
        make_tracer().close()  # a missing package is reported before the replicas start
    serve = import_serve()
    # The front checks keys and origins, so that replicas accept what it forwards. The proxy has the certificate.
    inner = replace(settings, api_key=None, api_keys=None, allow_origin=None, tls_cert=None, tls_key=None)
    telemetry = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    engine = serve.deployment(
        Replica,
        name=REPLICA,
        ray_actor_options={"num_cpus": scale.replica_cpus, "num_gpus": scale.replica_gpus},
        max_ongoing_requests=settings.engine.max_num_seqs + settings.max_queued_requests,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        graceful_shutdown_wait_loop_s=_WAIT_SECONDS,
        health_check_period_s=2.0,
        request_router_config=serve.config.RequestRouterConfig(
            request_router_class=_ROUTER, request_router_kwargs={"max_imbalance": scale.max_imbalance}
        ),
        **_number_of_replicas(scale, settings),
    ).bind(inner, name, telemetry)
    front = serve.deployment(
        serve.ingress()(Front),
        name=FRONT,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_FRONT_REQUESTS,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        graceful_shutdown_wait_loop_s=_WAIT_SECONDS,
    )
    return front.bind(engine, replace(settings, api_key=None), keys)


def check_settings(settings: Settings) -> None:
    """Check that the options of `outrider serve` support replicas. Raises OutriderError if one of them does not."""
    if settings.engine.tp > 1:
        raise OutriderError(f"a replica is one process, and tp is {settings.engine.tp}; use tp 1")
    unsupported = {
        "--weight-updates": (settings.weight_updates, "would change one replica only; leave it out"),
        "--media": (settings.media, "makes videos in one process; use outrider serve"),
    }
    for option, (value, reason) in unsupported.items():
        if value:
            raise OutriderError(f"{option} {reason}")


def _number_of_replicas(scale: ScaleSettings, settings: Settings) -> dict[str, Any]:
    if not scale.autoscales:
        return {"num_replicas": scale.replicas}
    policy = {"policy_function": _POLICY, "policy_kwargs": {"target_tokens_per_second": scale.target_tokens_per_second}}
    return {
        "autoscaling_config": {
            "min_replicas": scale.replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_requests or max(settings.engine.max_num_seqs / 2, 1.0),
            "upscale_delay_s": scale.upscale_seconds,
            "downscale_delay_s": scale.downscale_seconds,
            "look_back_period_s": scale.window_seconds,
            "metrics_interval_s": min(scale.window_seconds / _REPORTS_PER_WINDOW, _MAX_REPORT_SECONDS),
            "policy": policy,
        }
    }
