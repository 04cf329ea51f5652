"""A server to measure, in a process of its own, and its bare engine."""

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
    process: subprocess.Popen[str] | None

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

    def bare(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        """Tokens and seconds of such requests, one after another, of its engine alone; it must be idle."""
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(bodies), file=self.process.stdin, flush=True)
        tokens, seconds = json.loads(self.process.stdout.readline())
        return tokens, seconds

    def rest(self) -> dict[str, float]:
        """Wait until nothing runs and nothing waits; returns the gauges then.

        Raises:
            RuntimeError: something runs on: a slot is lost.
        """
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            gauges = self.gauges()
            if not gauges["outrider_num_requests_running"] and not gauges["outrider_num_requests_waiting"]:
                return gauges
            time.sleep(0.2)
        raise RuntimeError(f"requests are still open: {self.gauges()}")


@contextmanager
def served(options: list[str], *, bare: bool = False) -> Iterator[Server]:
    """`outrider serve` with such options, until the end of the block; on request its engine can be had bare."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    program = [_ENGINE] if bare else ["-m", "outrider"]
    pipe = subprocess.PIPE if bare else None
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", str(port), *options], stdin=pipe, stdout=pipe, text=True
    )
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
