"""The cell that runs the tests of `make test-gpu`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_COMMAND = (sys.executable, "-m", "pytest", "-n", "4", "--gpu", "tests/gpu", "-p", "no:cacheprovider")
_TAIL = 3000  # characters of the output


def run(device: torch.device) -> dict[str, Any]:
    """Run the tests and return the end of their output."""
    if device.type != "cuda":
        return {"skipped": "the tests need a GPU"}
    tests = subprocess.Popen(
        _COMMAND, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = tests.communicate()
    finally:  # the time of the cell may have passed
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
    return {"passed": tests.returncode == 0, "output": output[-_TAIL:]}
