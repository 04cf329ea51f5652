"""The machine: how many threads to use, and where a number was measured (hardware, versions, commit)."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.errors import OutriderError

_PACKAGE = Path(__file__).resolve().parent.parent


def use_threads(threads: int | None) -> None:
    """Let torch run on so many CPU threads; None leaves it to OMP_NUM_THREADS, or else to `default_threads`.

    Raises:
        OutriderError: not on a single one.
    """
    import torch

    if threads is not None and threads < 1:
        raise OutriderError(f"threads is {threads}; use at least 1")
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = min(torch.get_num_threads(), default_threads())  # where torch has fewer, somebody wanted fewer
    if threads is not None:
        torch.set_num_threads(threads)


def default_threads(root: Path = Path("/")) -> int:
    """How many threads read weights fastest: one for each physical core that this process may use, on one NUMA node.

    Two threads of a core share its way to memory. Weights lie on the node where the thread that loaded them ran, and
    that node's bandwidth is all that a pass can use; of several nodes the one with the most cores counts. A CPU quota
    is rounded down: threads wait for each other, so one that is held back holds back all.

    Args:
        root: where /sys and /proc lie.
    """
    system, cpus = root / "sys/devices/system", _cpus()
    cores = {cpu: _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    nodes = [cpus & _parse_cpus(_read(path)) for path in (system / "node").glob("node*/cpulist")]
    most = max((len({cores[cpu] for cpu in node}) for node in nodes), default=0) or len(set(cores.values()))
    return max(1, int(min(most, _quota(root))))


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
        "cores": len(_cpus()),
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


def _cpus() -> set[int]:
    """Those that this process may run on."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _parse_cpus(text: str) -> set[int]:
    """Of "0-3,8": 0, 1, 2, 3 and 8."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1)}


def _quota(root: Path) -> float:
    """How many CPUs' time the control groups of this process grant it, and those that hold them."""
    grants = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():  # "0::/path", or "4:cpu,cpuacct:/path" before version 2
        controllers, _, path = line.partition(":")[2].partition(":")
        folder = root / "sys/fs/cgroup" / controllers / path.lstrip("/")
        for group in (folder, *folder.parents):
            text = _read(group / "cpu.max")
            text = text or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
            if limit := re.fullmatch(r"\s*(\d+)\s+([1-9]\d*)\s*", text):  # not "max 100000", nor "-1 100000"
                grants.append(int(limit[1]) / int(limit[2]))
    return min(grants)


def _read(path: Path) -> str:
    """What a file says, nothing where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def free_memory() -> int | None:
    """Bytes that a process may still take without others being swapped out; None on a system that does not say."""
    said = re.search(r"MemAvailable: *(\d+) kB", _read(Path("/proc/meminfo")))
    group = Path("/sys/fs/cgroup")
    most, used = _read(group / "memory.max"), _read(group / "memory.current")
    bounds = [1024 * int(said[1])] if said else []
    if most.isdecimal() and used.isdecimal():
        bounds.append(int(most) - int(used))
    return min(bounds, default=None)


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return None


def _cpu() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
