"""Run a command in all ranks of tensor parallelism."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from outrider.errors import OutriderError
from outrider.runtime.processes import rank, world_size
from outrider.runtime.ranks import RankError, Ranks, is_network_error, join


@contextmanager
def joined(tp: int, device: str) -> Iterator[Ranks | None]:
    """Join the ranks of `--tp`, run the body in each of them, and leave. Yields the ranks; None: there is one process.

    Only rank 0 prints. A rank that fails ends the others.

    Raises:
        OutriderError: torchrun has not started `tp` processes.
    """
    if tp == 1:
        if (processes := world_size()) > 1:
            raise OutriderError(
                f"torchrun has started {processes} processes, and each would run the whole model; add --tp {processes}"
            )
        yield None
        return
    if rank():
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    ranks = _join(tp, device)
    try:
        yield ranks
    except typer.Exit:
        ranks.leave()
        raise
    except OutriderError as error:
        if isinstance(error, RankError):
            ranks.abandon(str(error))
        ranks.fail(str(error))
        raise
    except Exception as error:
        if is_network_error(error):
            ranks.abandon("another rank has failed, or the connection to it is lost; start all ranks again")
        else:
            traceback.print_exc(file=sys.__stderr__)
            ranks.abandon(f"rank {ranks.rank} cannot go on: {str(error).splitlines()[0] if str(error) else error!r}")
        raise typer.Exit(1) from error  # the watchdog is about to end the process, which must not end with status 0
    except BaseException:
        ranks.fail("it was interrupted")
        raise
    else:
        ranks.leave()


def _join(tp: int, device: str) -> Ranks:
    """Join the ranks and return them. A rank that fails prints its error on the standard error of the process."""
    try:
        ranks = join(tp, device)
    except OutriderError:  # all ranks have it, and rank 0 prints it
        raise
    except Exception as error:
        print(f"error: rank {rank()} cannot join the others: {error}", file=sys.__stderr__, flush=True)
        raise
    assert ranks is not None
    return ranks
