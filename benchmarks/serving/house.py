"""A server to measure, in a process of its own, and the bare engine beside it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

_PATIENCE = 600.0  # seconds for a server to come up, and to come to rest
_ENGINE = Path(__file__).parent / "engine.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where it is; its process is None where somebody else runs it."""

    url: str  # that of /v1
    process: subprocess.Popen[bytes] | None

    def kilobytes(self) -> int:
        """Resident memory of the process, its file mappings aside: those are weights."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+)", status)
        assert found is not None
        return int(found[1])

    def gauges(self) -> dict[str, float]:
        """What /metrics says, by name and labels as they are written."""
        text = httpx.get(self.url.removesuffix("/v1") + "/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    def rest(self) -> dict[str, float]:
        """Wait until nothing runs and nothing waits; returns the gauges then.

        Raises:
            RuntimeError: something runs on: a slot is lost.
        """
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            gauges = self.gauges()
            if not gauges["outrider_running"] and not gauges["outrider_waiting"]:
                return gauges
            time.sleep(0.2)
        raise RuntimeError(f"requests are still open: {self.gauges()}")


@contextmanager
def served(options: list[str]) -> Iterator[Server]:
    """`outrider serve` with such options, until the end of the block."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "outrider", "serve", "--port", str(port), *options])
    try:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the server did not come up; its own words are above") from None
                time.sleep(0.2)
        yield Server(url=f"http://127.0.0.1:{port}/v1", process=process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


class Bare:
    """The engine in another process, without a server around it."""

    def __init__(self, options: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, _ENGINE, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        """Tokens and seconds of such requests, one after another."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(bodies), file=self._process.stdin, flush=True)
        tokens, seconds = json.loads(self._process.stdout.readline())
        return tokens, seconds

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
