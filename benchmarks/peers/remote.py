"""Workers seen from outside: starting, asking and ending them, and what they cost while they should be idle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from worker import PeerError, reason

_FOLDER = Path(__file__).resolve().parent
_LOAD_SECONDS, _ANSWER_SECONDS, _END_SECONDS = 900.0, 300.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One contestant: an engine, how it speculates, and how its worker is called."""

    name: str  # as asked for: ENGINE:MODE, and options
    engine: str
    options: Mapping[str, str]  # --NAME VALUE of the worker
    python: str

    def command(self) -> list[str]:
        named = [text for name, value in self.options.items() for text in (f"--{name}", value)]
        return [self.python, str(_FOLDER / f"{self.engine}_peer.py"), *named]


class Worker:
    """A process that loads an engine and then answers, one line for each.

    It runs in a session of its own, so that whatever it starts can be counted, and ended with it.
    """

    def __init__(self, plan: Plan) -> None:
        """Start and load.

        Raises:
            PeerError: it cannot be started or loaded; the reason, in one line.
        """
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                plan.command(), stdin=pipe, stdout=pipe, stderr=self._errors, text=True, start_new_session=True
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{plan.python} cannot be run: {error.strerror}") from error
        try:
            self.ready = self._read(_LOAD_SECONDS)
        except PeerError:
            self.close()
            raise

    @property
    def session(self) -> int:
        return self._process.pid

    def ask(self, text: str, max_tokens: int) -> dict[str, Any]:
        """Complete a prompt; every other worker must be idle meanwhile."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": text, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"its process is gone: {self._last_words()}") from error
        return self._read(_ANSWER_SECONDS)

    def close(self) -> None:
        """End it and all that it started."""
        with self._errors, self._process:  # whose pipes close behind it
            if self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        late = Timer(seconds, self._process.kill)
        late.start()
        line = self._process.stdout.readline()
        too_late = late.finished.is_set()
        late.cancel()
        if not line:
            raise PeerError(f"no answer in {seconds:.0f} s" if too_late else f"its process ended: {self._last_words()}")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerError(f"it does not speak the protocol: {line.strip()[:80]}") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return dict(answer)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self._process.wait()}, and no word of why"


def start(plans: Sequence[Plan]) -> tuple[dict[str, Worker], dict[str, str]]:
    """Workers by the names of their plans, and the reasons why others could not be started."""
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    for plan in plans:  # one after the other: they would slow each other down
        try:
            workers[plan.name] = Worker(plan)
        except PeerError as error:
            failed[plan.name] = reason(error)
    return workers, failed
