"""The server while it loads its models."""

import io
import socket
from contextlib import closing

import httpx
import pytest
from rich.console import Console

from outrider.errors import OutriderError
from outrider.runtime.bar import StageBar
from outrider.runtime.progress import shown_on, stage
from outrider.serve.command import serve
from outrider.serve.listening import bind, listen
from outrider.serve.loading import LoadingServer
from outrider.serve.settings import Settings
from tests.helpers.commands import invoke


@pytest.fixture
def port():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


def test_health_says_how_far_the_load_is():
    (listening,) = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    display = StageBar(Console(file=io.StringIO()))
    with listening, shown_on(display):
        listen([listening], "127.0.0.1")
        with LoadingServer([listening], display, log_config=None):
            states = [httpx.get(f"{url}/health")]
            with stage("loading models"), stage("reading x", 100, counts_bytes=True) as reading:
                reading.advance(40)
                states.append(httpx.get(f"{url}/health"))
                refused = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
                page = httpx.get(url)
            with stage("checking", hint="; a hint to the operator"):
                states.append(httpx.get(f"{url}/health"))
        assert listening.fileno() != -1  # the server that has the models goes on with it
    unknown = {"done_bytes": None, "total_bytes": None}
    assert [each.json() for each in states] == [
        {"status": "loading", "stage": "starting", **unknown},
        {"status": "loading", "stage": "reading x", "done_bytes": 40, "total_bytes": 100},
        {"status": "loading", "stage": "checking", **unknown},
    ]
    assert {each.status_code for each in (*states, refused)} == {503}
    assert int(refused.headers["retry-after"]) > 0
    assert refused.headers["x-request-id"]
    assert page.status_code == 200
    assert page.headers["connection"] == "close"
    error = refused.json()["error"]
    assert error["message"] == "the server is reading x; send the request again later"
    assert error["type"] == "server_error"


@pytest.mark.parametrize("end", [OutriderError("the model is damaged"), KeyboardInterrupt()])
def test_the_end_of_a_load_ends_the_server(port, end):
    seen = []

    def load():
        seen.append(httpx.get(f"http://127.0.0.1:{port}/health").status_code)
        raise end

    with pytest.raises(type(end)):
        serve(load, Settings(port=port))
    assert seen == [503]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_a_taken_port_is_reported_before_the_load():
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        number = taken.getsockname()[1]
        result = invoke("serve", "--port", number, "--target", "@nano")
    assert result.exit_code == 2
    assert "is in use" in result.stderr
    assert "reading" not in result.stderr
