"""Starts the process that runs cells. The process that watches it imports this, and so no torch."""

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any


def start(connection: Connection, options: Mapping[str, Any], cells: Sequence[str], deadline: float) -> None:
    """Run cells with the options of the command line, as `worker.work` does."""
    import torch
    from pair import Inputs
    from worker import work

    from outrider.models.loader.embedded import embedded

    small = (options["target"] or embedded("mini"), options["draft"] or embedded("nano"))
    inputs = Inputs(
        small=small,
        like=options["like"],
        device=torch.device(options["device"]),
        dtype=getattr(torch, options["dtype"]),
        prompts=options["prompts"],
        max_tokens=options["max_tokens"],
    )
    work(connection, inputs, cells, deadline)
