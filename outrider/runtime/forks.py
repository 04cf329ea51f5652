"""Refuse to compute in a process that was forked from one that has computed.

A forked process has no other threads of its parent, but the state of OpenMP says that they exist. So the first parallel
operation would wait for them forever.
"""

import os

from outrider.errors import OutriderError

_computes = False  # whether this process may have worker threads
_lost = False  # whether it was forked from one that may have them


def check_fork() -> None:
    """Call this before work that runs on several threads.

    Raises:
        OutriderError: this process was forked from one that has called this function.
    """
    global _computes
    if _lost:
        raise OutriderError(
            "this process was forked from one that has loaded a model, and lacks its threads; load the model only after"
            ' the fork, or start the process with multiprocessing.get_context("spawn")'
        )
    _computes = True


def _forked() -> None:
    global _lost
    _lost = _lost or _computes


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
