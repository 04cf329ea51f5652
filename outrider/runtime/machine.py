"""Thread counts, and the facts that a benchmark reports: hardware, versions and commit."""

import math
import os
import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.errors import OutriderError

_PACKAGE = Path(__file__).resolve().parent.parent


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch. None: OMP_NUM_THREADS, or else `default_threads`.

    Raises:
        OutriderError: the number is below 1.
    """
    import torch

    if threads is not None and threads < 1:
        raise OutriderError(f"threads is {threads}; use at least 1")
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        # torch has fewer threads if the user has set another limit.
        threads = min(torch.get_num_threads(), default_threads())
    if threads is not None:
        torch.set_num_threads(threads)


def default_threads(root: Path = Path("/")) -> int:
    """Return the fastest number of threads for a memory-bound pass: the usable physical cores of one NUMA node.

    Two threads of a core share its memory path. The weights are on the node of the thread that loaded them, so a pass
    uses the bandwidth of one node. A CPU quota is rounded down, because threads wait for the slowest one.

    Args:
        root: the folder that contains sys and proc.
    """
    system = root / "sys/devices/system"
    cpus = _cpus()
    cores = {cpu: _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    nodes = [cpus & _parse_cpus(_read(path)) for path in (system / "node").glob("node*/cpulist")]
    cores_per_node = (len(set(map(cores.get, node))) for node in nodes)
    usable = max(cores_per_node, default=0) or len(set(cores.values()))
    return max(1, int(min(usable, _quota(root))))


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    return {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "outrider": __version__,
    }


@cache  # a start asks several times
def _version(package: str) -> str:
    return metadata.version(package)


def hardware(device: str) -> dict[str, Any]:
    """Return CPU, usable cores, memory, threads, and the GPU if `device` is one."""
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
    """Return the commit of the checkout, with "+dirty" after changes; None: no checkout."""
    try:
        root, head = _git("rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(root).resolve() != _PACKAGE.parent:  # installed in the checkout of another project
            return None
        return head + ("+dirty" if _git("status", "--porcelain", "--", _PACKAGE.name) else "")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _git(*arguments: str) -> str:
    """Return the output of a git command in the folder of the package."""
    command = ["git", "-C", str(_PACKAGE.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _cpus() -> set[int]:
    """Return the CPUs that this process may use."""
    return os.sched_getaffinity(0) if sys.platform == "linux" else set(range(os.cpu_count() or 1))


def _parse_cpus(text: str) -> set[int]:
    """Parse a CPU list, for example "0-3,8" to {0, 1, 2, 3, 8}."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1)}


def _quota(root: Path) -> float:
    """Return the CPU quota of the control groups of this process, in CPUs."""
    quotas = [math.inf]
    # A line is "0::/path", or "4:cpu,cpuacct:/path" in version 1 of control groups.
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        folder = root / "sys/fs/cgroup" / controllers / path.lstrip("/")
        for group in (folder, *folder.parents):
            text = _read(group / "cpu.max")
            text = text or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
            # "max 100000" and "-1 100000" mean no limit.
            if limit := re.fullmatch(r"\s*(\d+)\s+([1-9]\d*)\s*", text):
                quotas.append(int(limit[1]) / int(limit[2]))
    return min(quotas)


def _read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def free_memory() -> int | None:
    """Return the available memory in bytes; None if the system does not report it."""
    limits = []
    if available := re.search(r"MemAvailable: *(\d+) kB", _read(Path("/proc/meminfo"))):
        limits.append(1024 * int(available[1]))
    group = Path("/sys/fs/cgroup")
    maximum = _read(group / "memory.max")
    used = _read(group / "memory.current")
    if maximum.isdecimal() and used.isdecimal():
        limits.append(int(maximum) - int(used))
    return min(limits, default=None)


def _memory() -> int | None:
    """Return the physical memory in bytes; None if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cpu() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
