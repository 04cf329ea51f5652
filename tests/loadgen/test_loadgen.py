"""The load tool: what it asks, what it reads out of streams, and what it makes of them."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import OutriderError
from outrider.loadgen import client
from outrider.loadgen.response import RequestResult, ResponseRecorder
from outrider.loadgen.settings import Settings
from outrider.loadgen.workload import plan_requests
from outrider.measure.prompts import read_prompts

MIXED = Settings(num_requests=40, mixed=True, max_tokens=64, cancel=0.3)


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def words(*texts, finish=None):
    return b"".join(event(choices=[{"text": text, "finish_reason": finish}]) for text in texts)


def played(*chunks):
    tape, asked = ResponseRecorder(), RequestResult(number=0, start=0.0)
    for at, chunk in enumerate(chunks, 1):
        tape.add(float(at), chunk)
    tape.play(asked)
    return asked


def test_requests_are_drawn_from_the_seed():
    prompts = read_prompts()
    one, two = (plan_requests(MIXED, prompts, "m") for _ in range(2))
    assert one == two
    assert one != plan_requests(Settings(num_requests=40, mixed=True, max_tokens=64, cancel=0.3, seed=1), prompts, "m")
    lengths = {each.body["max_tokens"] for each in one}
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert len(lengths) > 10
    assert len({each.body["temperature"] for each in one}) == 3
    assert 0 < sum(each.max_chunks is not None for each in one) < 40
    assert all("seed" not in each.body for each in plan_requests(Settings(num_requests=3), prompts, "m"))


def test_pieces_have_the_time_at_which_their_last_byte_came():
    whole = words("a", "b") + words("c", finish="length") + event(choices=[], usage={"completion_tokens": 5})
    whole += b"data: [DONE]\n\n"
    cut = len(words("a")) + 9
    asked = played(whole[:cut], whole[cut:])
    assert (asked.text, asked.tokens, asked.finish) == ("abc", 5, "length")
    assert asked.times == [1.0, 2.0, 2.0]
    assert asked.chunk_gaps == [1.0, 0.0]
    assert asked.inter_token_latencies == [1.0, 0.0, 0.0, 0.0]


def test_other_servers_write_streams_in_other_ways():
    chat = b': ping\r\n\r\ndata:{"choices":[{"delta":{"role":"assistant","content":null}}]}\r\n\r\n'
    chat += b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": null}\r\n\r\n'
    asked = played(chat, b"data: [DONE]\r\n\r\n")
    assert (asked.text, asked.tokens, asked.finish) == ("hi", 1, "stop")


@contextmanager
def answering(status, content):
    """A server that says the same to every request; what it is."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._say(200, b'{"data": [{"id": "m"}]}')

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self._say(status, content)

        def _say(self, status, content):
            with suppress(ConnectionError):  # who hangs up does not wait for all of it
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (503, b"not now", "503: not now"),
        (200, event(error={"message": "broken"}), "broken"),
        (200, b"data: {oops\n\n", "JSONDecodeError"),
        (200, b"data: [DONE]\n\n", "the answer was empty"),
        (200, words("", finish="stop"), ""),
    ],
)
def test_what_goes_wrong_is_noted(status, content, says):
    async def ask(url):
        async with client.connected(Settings(base_url=url, num_requests=1)) as (connection, model):
            (want,) = plan_requests(Settings(num_requests=1), read_prompts(), model)
            return await connection.ask(want, 0)

    with answering(status, content) as url:
        asked = asyncio.run(ask(url))
    assert asked.done == (not says)
    assert says in asked.error


def test_no_server_is_said():
    with answering(200, b"") as url:
        pass
    with pytest.raises(OutriderError, match="names no model"):
        asyncio.run(client.put_load(Settings(base_url=url, num_requests=1), read_prompts()))


def test_who_hangs_up_counts_apart():
    with answering(200, words(*"abcdefgh", finish="length")) as url:
        command = f"load --base-url {url} --num-requests 20 --mixed --cancel 0.4 --max-concurrency 4 --max-tokens 12"
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert document["completed"] + document["cancelled"] == 20
    assert document["cancelled"] > 2
    assert not document["errors"]
    assert document["ms"]["itl"]["p50"] == 0.0
    assert "hung up" in done.output
