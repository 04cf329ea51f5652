"""Measures the CPU time of idle workers and of other processes while an engine is measured. Reads CPU flags."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time, sleep

_PROC = Path("/proc")
_WINDOW = 0.5  # seconds over which the machine must be quiet
_QUIET = 0.1  # cores in use on a quiet machine
_EXTENSIONS = ("sse4", "avx", "amx", "f16c", "fma", "asimd", "sve", "bf16", "i8mm")  # first letters of CPU flags
_TICK_ERROR = 0.03  # seconds: the system counts in ticks of 10 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds so far. All are 0 on a system without /proc."""

    all: float  # of the whole machine, with the time that its host has taken from it
    sessions: Mapping[int, float]  # by session; a worker and all processes that it starts share one
    own: float  # of this process

    @classmethod
    def now(cls) -> Usage:
        """Read the current usage from /proc."""
        if not _PROC.is_dir():
            return cls(all=0.0, sessions={}, own=0.0)
        tick = os.sysconf("SC_CLK_TCK")
        sessions: dict[int, float] = defaultdict(float)
        for file in _PROC.glob("[0-9]*/stat"):
            with suppress(OSError):  # the process has just ended
                # Fields after the name in parentheses: state, parent, group, session, ... Fields 12 and 13 are user
                # and system time.
                fields = file.read_text("utf-8", "replace").rpartition(")")[2].split()
                sessions[int(fields[3])] += (int(fields[11]) + int(fields[12])) / tick
        user, nice, system, _idle, _waiting, *interrupts = _machine_ticks()
        total = (user + nice + system + sum(interrupts)) / tick
        return cls(all=total, sessions=sessions, own=process_time())

    def since(self, before: Usage) -> Usage:
        """Return the usage since `before`."""
        sessions = {id: seconds - before.sessions.get(id, 0.0) for id, seconds in self.sessions.items()}
        return Usage(all=self.all - before.all, sessions=sessions, own=self.own - before.own)

    def others(self, sessions: Collection[int]) -> float:
        """Return the seconds of all processes except this one and those of `sessions`."""
        return self.all - self.own - sum(seconds for id, seconds in self.sessions.items() if id in sessions)


def disturbed(foreign: float, seconds: float) -> bool:
    """Return whether other processes used so much CPU time that an engine with a thread per core had to wait.

    Args:
        foreign: CPU seconds of other processes.
        seconds: duration of the measurement.
    """
    return foreign > max(_TICK_ERROR, _QUIET * seconds)


def wait_until_quiet(limit: float) -> None:
    """Wait until the cores are idle, at most `limit` seconds."""
    deadline = monotonic() + limit
    while monotonic() < deadline:
        before = Usage.now()
        sleep(_WINDOW)
        if Usage.now().since(before).all < _QUIET * _WINDOW:
            return


def cpu_flags() -> list[str]:
    """Return the vector and matrix extensions of the first CPU, or an empty list on a system without /proc."""
    with suppress(OSError):
        for line in (_PROC / "cpuinfo").read_text("utf-8").splitlines():
            name, _, flags = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return sorted(flag for flag in flags.split() if flag.startswith(_EXTENSIONS))
    return []


def _machine_ticks() -> list[int]:
    """Return the ticks of user, nice, system, idle, I/O wait, two kinds of interrupts, and steal."""
    return [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
