"""Who keeps the cores busy: what idle workers use, and what strangers take from the one that is measured."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time, sleep

_PROC = Path("/proc")
_WINDOW = 0.5  # seconds that are looked at to call the machine quiet
_QUIET = 0.1  # cores
_SLACK = 0.03  # seconds: the system counts in ticks of 10 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds so far; nothing where the system does not say."""

    all: float  # of the whole machine, and what its host withheld from it
    sessions: Mapping[int, float]  # by session: a worker and all that it started share one
    own: float  # of this process

    @classmethod
    def now(cls) -> Usage:
        """As /proc says at this moment."""
        if not _PROC.is_dir():
            return cls(all=0.0, sessions={}, own=0.0)
        tick = os.sysconf("SC_CLK_TCK")
        sessions: dict[int, float] = defaultdict(float)
        for file in _PROC.glob("[0-9]*/stat"):
            with suppress(OSError):  # a process that has just ended
                # After the name in parentheses: state, parent, group, session, ...; 12th and 13th user and system time.
                after = file.read_text("utf-8", "replace").rpartition(")")[2].split()
                sessions[int(after[3])] += (int(after[11]) + int(after[12])) / tick
        user, nice, system, _idle, _waiting, *interrupts = _whole_machine()
        whole = (user + nice + system + sum(interrupts)) / tick
        return cls(all=whole, sessions=sessions, own=process_time())

    def since(self, before: Usage) -> Usage:
        """What was spent after `before`."""
        spent = {id: seconds - before.sessions.get(id, 0.0) for id, seconds in self.sessions.items()}
        return Usage(all=self.all - before.all, sessions=spent, own=self.own - before.own)

    def strangers(self, ours: Collection[int]) -> float:
        """Seconds that went neither to one of these sessions nor to this process."""
        return self.all - self.own - sum(seconds for id, seconds in self.sessions.items() if id in ours)


def disturbed(foreign: float, seconds: float) -> bool:
    """Whether strangers took so much that an engine with a thread on every core must have waited."""
    return foreign > max(_SLACK, _QUIET * seconds)


def wait_until_quiet(limit: float) -> None:
    """Wait, at most `limit` seconds, until nobody uses the cores."""
    end = monotonic() + limit
    while monotonic() < end:
        before = Usage.now()
        sleep(_WINDOW)
        if Usage.now().since(before).all < _QUIET * _WINDOW:
            return


def _whole_machine() -> list[int]:
    """user, nice, system, idle, waiting for disks, two kinds of interrupts, and stolen by the host, in ticks."""
    return [int(field) for field in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
