"""Where a number was measured: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider import __version__

_PACKAGE = Path(__file__).resolve().parent


def versions() -> dict[str, str]:
    """Of Python and of the packages that speed depends on."""
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "outrider": __version__,
    }


def hardware(device: str) -> dict[str, Any]:
    """The CPU, its usable cores and its memory, torch's threads, and the GPU with its memory when `device` is one."""
    import torch

    gpu = torch.cuda.get_device_properties(torch.device(device)) if device.startswith("cuda") else None
    return {
        "cpu": _cpu(),
        "cores": _cores(),
        "memory_bytes": _memory(),
        "threads": torch.get_num_threads(),
        "gpu": gpu and gpu.name,
        "gpu_memory_bytes": gpu and gpu.total_memory,
        "device": device,
    }


def commit() -> str | None:
    """The commit of the checkout that this package runs from, "+dirty" when it was changed; None outside of one."""
    try:
        top, head = _git("rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(top).resolve() != _PACKAGE.parent:  # installed inside somebody else's checkout
            return None
        return head + ("+dirty" if _git("status", "--porcelain", "--", _PACKAGE.name) else "")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_PACKAGE.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
