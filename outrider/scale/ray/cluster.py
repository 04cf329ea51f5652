"""Connect to a Ray cluster, or start Ray on this machine."""

import os
from typing import Any

from outrider.errors import OutriderError


def connect(ray: Any, address: str | None, *, processes: int, cpus: float, kind: str, log_to_driver: bool) -> None:
    """Connect to the cluster at `address`. None: start Ray here.

    Args:
        address: of a running cluster, or "auto".
        processes: how many processes will be started.
        cpus: what each of them reserves.
        kind: what they are called in an error message, in the plural.
        log_to_driver: whether this process prints what they print.

    Raises:
        OutriderError: no cluster answers, or this machine has too few CPUs.
    """
    if address is not None:
        try:
            ray.init(address=address, log_to_driver=log_to_driver)
        except (ConnectionError, ValueError) as error:
            raise OutriderError(
                f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}); start one with ray start --head,"
                " set RAY_AUTH_MODE=token if it asks for a token, or leave the address out"
            ) from error
        return
    available = os.cpu_count() or 1
    if processes * cpus > available:
        raise OutriderError(
            f"{processes} {kind} with {cpus:g} CPUs each need more than the {available} CPUs of"
            " this machine; use fewer of them, or the address of a cluster"
        )
    try:
        ray.init(include_dashboard=False, num_cpus=available, log_to_driver=log_to_driver)
    except Exception as error:  # Ray raises nothing more specific
        raise OutriderError(
            f"Ray did not start on this machine: {str(error).splitlines()[0]} Try again, or start"
            " Ray with ray start --head and give its address"
        ) from error
