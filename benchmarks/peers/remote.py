"""Starts worker processes, sends them prompts, and ends them."""

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
    """One contestant: an engine, its options, and the command of its worker."""

    name: str  # ENGINE:MODE with options, as on the command line
    engine: str
    options: Mapping[str, str]  # values of the worker's --NAME options; a flag has an empty value
    python: str

    def command(self) -> list[str]:
        command = [self.python, str(_FOLDER / f"{self.engine}_peer.py")]
        for name, value in self.options.items():
            command += [f"--{name}", value] if value else [f"--{name}"]
        return command


class Worker:
    """A process that loads an engine and answers each request with one line.

    It has its own session, so that all processes that it starts can be measured and ended with it.
    """

    def __init__(self, plan: Plan) -> None:
        """Start the process and load the engine.

        Raises:
            PeerError: the process cannot be started, or the engine cannot be loaded.
        """
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                plan.command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{plan.python} cannot be run: {error.strerror}") from error
        try:
            self.ready = self._read_answer(_LOAD_SECONDS)
        except PeerError:
            self.close()
            raise

    @property
    def session(self) -> int:
        return self._process.pid

    def ask(self, text: str, max_tokens: int) -> dict[str, Any]:
        """Complete a prompt. All other workers must be idle."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"prompt": text, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise PeerError(f"the process has ended: {self._last_error()}") from error
        return self._read_answer(_ANSWER_SECONDS)

    def close(self) -> None:
        """End the process and all processes that it started."""
        with self._errors, self._process:  # closes the pipes
            if self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _read_answer(self, seconds: float) -> dict[str, Any]:
        """Read one answer. Kill the process if there is none within `seconds`."""
        assert self._process.stdout is not None
        timer = Timer(seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timed_out = timer.finished.is_set()
        timer.cancel()
        if not line and timed_out:
            raise PeerError(f"no answer in {seconds:.0f} s")
        if not line:
            raise PeerError(f"the process has ended: {self._last_error()}")
        try:
            answer = json.loads(line)
        except json.JSONDecodeError as error:
            raise PeerError(f"the answer is not JSON: {line.strip()[:80]}") from error
        if "error" in answer:
            raise PeerError(answer["error"])
        return dict(answer)

    def _last_error(self) -> str:
        """Return the last line of standard error."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self._process.wait()}, and nothing on standard error"


def start(plans: Sequence[Plan]) -> tuple[dict[str, Worker], dict[str, str]]:
    """Start workers. Return them by the names of their plans, and the errors of those that could not be started."""
    workers: dict[str, Worker] = {}
    failed: dict[str, str] = {}
    for plan in plans:  # one at a time, because loading in parallel would be slower
        try:
            workers[plan.name] = Worker(plan)
        except PeerError as error:
            failed[plan.name] = reason(error)
    return workers, failed
