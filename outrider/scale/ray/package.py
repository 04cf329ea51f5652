"""Import Ray, which is optional."""

from typing import Any

from outrider.core.packages import needed_by
from outrider.errors import OutriderError


def import_ray() -> Any:
    """Return the package `ray`. Raises OutriderError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise OutriderError('Ray is not installed; run pip install "outrider[ray]"') from error
    return ray


def lost_actor_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that say that an actor is gone: its process or machine has failed, or Ray has ended it."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    return (RayActorError, OutOfMemoryError)


def no_replica_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of a broadcast that say that no replica runs, or that none answers in time.

    Ray's message says that the deployment has failed, also while its replicas still load.
    """
    from ray.serve.exceptions import DeploymentUnavailableError

    return (DeploymentUnavailableError, TimeoutError)


def import_train() -> tuple[Any, Any]:
    """Return the packages `ray.train` and `ray.train.torch`. Raises OutriderError if it is not installed."""
    import_ray()
    with needed_by("Ray Train", "ray"):
        from ray import train
        from ray.train import torch
    return train, torch


def import_serve() -> Any:
    """Return the package `ray.serve`. Raises OutriderError if it is not installed."""
    import_ray()
    with needed_by("Ray Serve", "ray"):
        from ray import serve
    return serve
