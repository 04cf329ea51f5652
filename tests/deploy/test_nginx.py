"""The configuration of nginx in docs/how-to/deploy.md, in a real nginx before a server of the test."""

import queue
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.helpers.certificates import make_certificate

ROOT = Path(__file__).parents[2]
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
WAIT_SECONDS = 30.0
KEY = {"Authorization": "Bearer KEY1"}


class Upstream(BaseHTTPRequestHandler):
    """A server that sends a part of a stream when the test has received the part before."""

    received: queue.Queue[str] = queue.Queue()
    disconnected = threading.Event()
    seen: list[dict[str, str]] = []  # noqa: RUF012

    def do_GET(self):
        self.seen.append(dict(self.headers))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for number in range(3):
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
                if self.received.get(timeout=WAIT_SECONDS) == "leave":
                    while True:  # until nginx has closed the connection
                        self.wfile.write(b"data: more\n\n")
                        self.wfile.flush()
                        time.sleep(0.05)
        except (ConnectionError, queue.Empty):
            self.disconnected.set()

    def log_message(self, *_):
        pass


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def documented():
    """Return the configuration in the page."""
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    return re.search(r"```nginx\n(.*?)```", page, re.DOTALL).group(1)


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """Start nginx and the server behind it. Yield a client."""
    folder = tmp_path_factory.mktemp("nginx")
    cert, key = make_certificate(folder)
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    port = free_port()
    changed = documented().replace("127.0.0.1:8000", f"127.0.0.1:{upstream.server_port}")
    changed = changed.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
    changed = changed.replace("/etc/ssl/models.pem", cert).replace("/etc/ssl/models.key", key)
    paths = "".join(f"{name}_temp_path {folder};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{changed}\n}}\n"
    )
    process = subprocess.Popen([NGINX, "-c", folder / "nginx.conf"], stderr=subprocess.PIPE, text=True)
    context = ssl.create_default_context(cafile=cert)
    try:
        wait_for_port(port, process)
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=WAIT_SECONDS) as client:
            yield client
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)
        process.stderr.close()
        upstream.shutdown()
        upstream.server_close()


def wait_for_port(port, process):
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise AssertionError("nginx does not listen")


def test_streams_are_not_buffered(proxy):
    with proxy.stream("POST", "/v1/completions", content=b"{}", headers=KEY) as response:
        assert response.headers["content-type"] == "text/event-stream"
        numbers = []
        for line in response.iter_lines():
            if line:
                numbers.append(line)
                Upstream.received.put("next")  # only now the server sends the next part
    assert numbers == ["data: 0", "data: 1", "data: 2"]
    assert not Upstream.disconnected.is_set()


def test_the_server_sees_that_a_client_disconnects(proxy):
    with proxy.stream("POST", "/v1/completions", content=b"{}", headers=KEY) as response:
        assert next(response.iter_lines()) == "data: 0"
    Upstream.received.put("leave")
    assert Upstream.disconnected.wait(WAIT_SECONDS)


def test_keys_are_checked_and_passed_on(proxy):
    statuses = [
        proxy.get("/v1/models", headers=headers).status_code
        for headers in ({}, {"Authorization": "Bearer key1"}, {"Authorization": "Bearer KEY12"}, KEY)
    ]
    assert statuses == [401, 401, 401, 200]
    assert Upstream.seen[-1]["Authorization"] == "Bearer KEY1"
    assert proxy.get("/health").status_code == 200


def test_large_bodies_are_rejected(proxy):
    assert proxy.post("/v1/completions", content=b" " * (1 << 21), headers=KEY).status_code == 413
