"""The server process: its port, signals, and the plan file."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from errno import EACCES

import httpx
import pytest

from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.serve.listening import bind, listen
from tests.helpers.commands import invoke
from tests.helpers.serving import BODY, OPTIONS, PROMPT, serving


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish():
    command = [sys.executable, "-m", "outrider", "serve", "--target", OPTIONS["target"], "--proposer", "ngram"]
    command += ["--port", "0", "--max-num-seqs", "2", "--dtype", "float32", "--k", "2"]
    server = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    try:
        address_line = next(line for line in server.stderr if " at http" in line)
        url = re.search(r"http://127.0.0.1:[1-9]\d*", address_line)[0]
        assert httpx.get(url + "/health", timeout=60).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.communicate()


def test_errors_of_bind_and_listen(monkeypatch):
    (first,) = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    in_use = rf"port {port} of 127.0.0.1 is in use; give another --port \(0: a free port\)"
    with first, bind("127.0.0.1", port)[0] as second:  # two sockets may have one port until one of them listens
        listen([first], "127.0.0.1")
        with pytest.raises(OutriderError, match=in_use):
            listen([second], "127.0.0.1")
        with pytest.raises(OutriderError, match=in_use):
            bind("127.0.0.1", port)
        started = invoke("serve", "--port", port, "--target", "@nano")
        assert started.exit_code == 2
        assert "is in use" in started.stderr  # the port is bound before the target is loaded
    for host in ("192.0.2.1", "a" * 70):
        with pytest.raises(OutriderError, match=r"is not an address of this machine \(.+\); use 127.0.0.1, or 0.0.0.0"):
            bind(host, 0)

    def deny(*_, **__):
        raise PermissionError(EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", deny)
    with pytest.raises(OutriderError, match=r"port 80 of 127.0.0.1 .* give a --port of at least 1024"):
        bind("127.0.0.1", 80)


def test_bind_uses_one_port_for_all_addresses():
    sockets = bind("localhost", 0)
    assert len({each.getsockname()[1] for each in sockets}) == 1
    for each in sockets:
        each.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_accepted_connections_send_small_chunks_at_once(host):
    """Without TCP_NODELAY, the first chunk of a stream waits up to 40 ms on a connection that is used again."""

    async def options():
        accepted = asyncio.Queue()
        sockets = bind(host, 0)
        listen(sockets, host)
        servers = []
        for each in sockets:
            servers.append(await asyncio.start_server(lambda _, writer: accepted.put_nowait(writer), sock=each))
        found = []
        for each in sockets:
            _, writer = await asyncio.open_connection(*each.getsockname()[:2])
            connection = await accepted.get()
            found.append(connection.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            connection.close()
        for server in servers:
            server.close()
        return found

    found = asyncio.run(options())
    assert found
    assert all(found)


def test_unwritable_plan_file_is_a_warning(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    with serving({"k": "auto", "plan": folder / "plan.json"}) as (url, _):
        assert httpx.get(url + "/health").status_code == 200
        folder.rmdir()
    (warning,) = [record for record in caplog.records if "not saved" in record.getMessage()]
    assert warning.levelname == "WARNING"
    assert "name a file in a writable folder" in warning.getMessage()
    assert not [record for record in caplog.records if record.exc_info]


@contextmanager
def server_process(port, *options):
    """Run `outrider serve`. Yield the process and a list that holds its log lines after it has ended."""
    command = [sys.executable, "-m", "outrider", "serve", "--target", embedded("nano"), "--proposer", "ngram"]
    command += ["--port", port, "--max-num-seqs", "2", "--dtype", "float32", "--log-format", "json", *options]
    server = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    log_lines = []
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                    break
            except httpx.TransportError:
                pass
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield server, log_lines
    finally:
        server.kill()
        log_lines += server.communicate()[1].splitlines()


@pytest.mark.slow
def test_restart_after_sigkill_and_graceful_sigterm(tmp_path):
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/completions"
    plan = tmp_path / "plan.json"
    body = {**BODY, "max_tokens": 400, "stream": True}
    with (
        server_process(port, "--plan", plan) as (server, _),
        httpx.stream("POST", url, json=body, timeout=60) as response,
    ):
        next(response.iter_lines())
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert not list(tmp_path.iterdir())
    with server_process(port, "--plan", plan) as (server, log_lines):
        with httpx.stream("POST", url, json=body, timeout=60, headers={"x-request-id": "last"}) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(timeout=30) == 0
    assert json.loads(plan.read_text())["format"] == "outrider plan"
    records = [json.loads(line) for line in log_lines if line.startswith("{")]
    assert [record["output_tokens"] for record in records if record.get("id") == "last"] == [400]
