"""A process of llama.cpp's `llama-server` that listens on a Unix socket."""

import http.client
import json
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

_LOAD_SECONDS = 300.0
_POLL_SECONDS = 0.01


class ServerError(RuntimeError):
    """The server did not start. The message is one line."""


class LlamaServer:
    """A running server. It needs no free port and cannot be reached from outside."""

    def __init__(self, program: str, options: Sequence[str]) -> None:
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="llama-"))
        self._socket = self._folder / "server.sock"
        self._log = self._folder / "log"
        command = [program, "--host", str(self._socket), "--no-ui", "--parallel", "1", *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_until_ready(self) -> None:
        """Wait until the model is loaded.

        Raises:
            ServerError: the process has ended, or the time has passed.
        """
        deadline = monotonic() + _LOAD_SECONDS
        while monotonic() < deadline and self.process.poll() is None:
            try:
                if self.request("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:  # it does not listen yet
                pass
            sleep(_POLL_SECONDS)
        lines = self._log.read_text("utf-8", "replace").split("\n")
        last_line = next(filter(None, reversed(lines)), "it printed nothing")
        raise ServerError(f"{self._program} did not become ready: {last_line}")

    def request(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Send a request with a body as JSON. Return the status and the answer."""
        connection = _Connection(self._socket)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def close(self) -> None:
        """End the process and remove its files."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def greedy_request(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a request for a greedy completion of token ids."""
    return {
        "prompt": list(prompt),
        "n_predict": max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "return_tokens": True,
    }


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))
