"""Starts a server to measure in a separate process, and gives access to its engine."""

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

_TIMEOUT = 600.0  # seconds until a server has started, or is idle
_ENGINE_SCRIPT = Path(__file__).parent / "engine.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server."""

    url: str  # with /v1
    process: subprocess.Popen[str] | None  # None: another program runs it

    def kilobytes(self) -> int:
        """Return the resident memory of the process without file mappings, which are weights."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"RssAnon:\s+(\d+)", status)
        assert match is not None
        return int(match[1])

    def gauges(self) -> dict[str, float]:
        """Return the values of /metrics, by name and labels as text."""
        text = httpx.get(self.url.removesuffix("/v1") + "/metrics").text
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
        return {name: float(value) for name, value in pairs}

    def bare(self, bodies: list[dict[str, Any]]) -> tuple[int, float]:
        """Complete requests one after another with the engine only. The server must be idle.

        Returns:
            Tokens and seconds.
        """
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(bodies), file=self.process.stdin, flush=True)
        tokens, seconds = json.loads(self.process.stdout.readline())
        return tokens, seconds

    def rest(self) -> dict[str, float]:
        """Wait until no request runs or waits. Return the gauges.

        Raises:
            RuntimeError: a request still runs or waits after the timeout, so a slot has leaked.
        """
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            gauges = self.gauges()
            if not gauges["outrider_num_requests_running"] and not gauges["outrider_num_requests_waiting"]:
                return gauges
            time.sleep(0.2)
        raise RuntimeError(f"requests still run or wait: {self.gauges()}")


@contextmanager
def served(options: list[str], *, bare: bool = False) -> Iterator[Server]:
    """Run `outrider serve` with these options until the end of the block. `bare` enables `Server.bare`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [_ENGINE_SCRIPT] if bare else ["-m", "outrider"]
    pipe = subprocess.PIPE if bare else None
    process = subprocess.Popen(
        [sys.executable, *program, "serve", "--port", str(port), *options], stdin=pipe, stdout=pipe, text=True
    )
    try:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start; see its output above")
            time.sleep(0.2)
        yield Server(url=f"http://127.0.0.1:{port}/v1", process=process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
