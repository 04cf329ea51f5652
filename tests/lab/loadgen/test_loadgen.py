"""Tests of the load generator: the planned requests, the parsed streams and the reported results."""

import asyncio
import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from outrider.core.prompts import read_prompts
from outrider.errors import OutriderError
from outrider.lab.loadgen import client
from outrider.lab.loadgen.compare import comparison
from outrider.lab.loadgen.figures import Figures
from outrider.lab.loadgen.response import RequestResult, ResponseRecorder
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import plan_requests
from tests.helpers.commands import invoke, succeed
from tests.helpers.local_server import Handler, serve

MIXED_SETTINGS = Settings(num_requests=40, mixed=True, max_tokens=64, cancel=0.3)


def event(**fields):
    """Return a server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_events(*texts, finish_reason=None):
    """Return one event for each text."""
    return b"".join(event(choices=[{"text": text, "finish_reason": finish_reason}]) for text in texts)


def parse_chunks(*chunks):
    """Return the result of a stream whose chunks arrive at 1, 2, 3, ... seconds."""
    recorder = ResponseRecorder()
    result = RequestResult(number=0, start=0.0)
    for seconds, chunk in enumerate(chunks, 1):
        recorder.add(float(seconds), chunk)
    recorder.parse(result)
    return result


def test_planned_requests_depend_on_seed():
    prompts = read_prompts()
    requests = plan_requests(MIXED_SETTINGS, prompts, "m")
    assert requests == plan_requests(MIXED_SETTINGS, prompts, "m")
    assert requests != plan_requests(replace(MIXED_SETTINGS, seed=1), prompts, "m")
    lengths = {request.body["max_tokens"] for request in requests}
    assert min(lengths) >= 8
    assert max(lengths) <= 64
    assert len(lengths) > 10
    assert len({request.body["temperature"] for request in requests}) == 3
    assert 0 < sum(request.max_chunks is not None for request in requests) < 40
    assert all("seed" not in request.body for request in plan_requests(Settings(num_requests=3), prompts, "m"))


def test_event_has_arrival_time_of_its_last_byte():
    stream = text_events("a", "b") + text_events("c", finish_reason="length")
    stream += event(choices=[], usage={"completion_tokens": 5})
    stream += b"data: [DONE]\n\n"
    cut = len(text_events("a")) + 9
    result = parse_chunks(stream[:cut], stream[cut:])
    assert (result.text, result.tokens, result.finish) == ("abc", 5, "length")
    assert result.times == [1.0, 2.0, 2.0]
    assert result.chunk_gaps == [1.0, 0.0]
    assert result.inter_token_latencies == [1.0, 0.0, 0.0, 0.0]


def test_stream_formats_of_other_servers():
    chat = b': ping\r\n\r\ndata:{"choices":[{"delta":{"role":"assistant","content":null}}]}\r\n\r\n'
    chat += b'data: {"choices": [{"delta": {"content": "hi"}, "finish_reason": "stop"}], "usage": null}\r\n\r\n'
    result = parse_chunks(chat, b"data: [DONE]\r\n\r\n")
    assert (result.text, result.tokens, result.finish) == ("hi", 1, "stop")


@contextmanager
def fake_server(status, content, *, models=(200, b'{"data": [{"id": "m"}]}')):
    """Run a server that gives every completion the same response, and lists `models`. Yield its base URL."""

    class FakeHandler(Handler):
        def do_GET(self):
            self.send(*models)

        def do_POST(self):
            self.body()
            self.send(status, content)

    with serve(FakeHandler) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (503, b"not now", "503: not now"),
        (200, event(error={"message": "broken"}), "broken"),
        (200, b"data: {oops\n\n", "JSONDecodeError"),
        (200, b"data: [DONE]\n\n", "the response is empty"),
        (200, text_events("", finish_reason="stop"), ""),
    ],
)
def test_result_has_error_of_response(status, content, error):
    async def send_one(url):
        async with client.connect(Settings(base_url=url, num_requests=1)) as (connection, model):
            (request,) = plan_requests(Settings(num_requests=1), read_prompts(), model)
            return await connection.send(request, 0)

    with fake_server(status, content) as url:
        result = asyncio.run(send_one(url))
    assert result.completed == (not error)
    assert error in result.error


def test_unreachable_server_is_an_error():
    with fake_server(200, b"") as url:
        pass  # the server has stopped after this block
    with pytest.raises(OutriderError, match=r"/v1/models cannot be reached .*; check the URL"):
        asyncio.run(client.run_load(Settings(base_url=url, num_requests=1), read_prompts()))


def test_server_without_a_model_or_with_a_key_is_an_error():
    for status, content, message in (
        (200, b'{"data": []}', "lists no model; check the URL, or give --model"),
        (401, b"{}", "answered 401; give the key of the server with --api-key"),
    ):
        with fake_server(200, b"", models=(status, content)) as url, pytest.raises(OutriderError, match=message):
            asyncio.run(client.run_load(Settings(base_url=url, num_requests=1), read_prompts()))


def test_canceled_requests_are_counted_separately():
    with fake_server(200, text_events(*"abcdefgh", finish_reason="length")) as url:
        command = f"load --base-url {url} --num-requests 20 --mixed --cancel 0.4 --max-concurrency 4 --max-tokens 12"
        result = succeed(*command.split())
    document = json.loads(result.output.splitlines()[-1])
    assert document["completed"] + document["canceled"] == 20
    assert document["canceled"] > 2
    assert not document["errors"]
    assert document["ms"]["itl"]["p50"] == 0.0
    assert f"and {document['canceled']} canceled requests" in result.output


def test_exit_code_if_all_requests_fail():
    with fake_server(503, b"not now") as url:
        result = invoke("load", "--base-url", url, "--num-requests", "2")
    assert result.exit_code == 1
    assert "2 requests failed; the first error" in result.output


STREAM = text_events("a", "b", "c", finish_reason="length") + b"data: [DONE]\n\n"


def test_two_servers_on_one_page(tmp_path):
    page = tmp_path / "page.html"
    with fake_server(200, STREAM) as first, fake_server(503, b"not now") as second:
        arguments = ["load", "--base-url", first, "--against", second, "--num-requests", "5", "--report", str(page)]
        result = invoke(*arguments, "--json")
    assert result.exit_code == 1, result.output  # no request of the second server succeeds
    document = json.loads(result.stdout.splitlines()[-1])
    good, bad = document["servers"]
    assert (good["url"], good["completed"], good["errors"]) == (first, 5, [])
    assert (good["model"], bad["model"]) == ("m", "m")  # the first one of each server
    assert (bad["url"], bad["completed"], len(bad["errors"])) == (second, 0, 5)
    assert good["output_tokens_per_s"] > 0
    assert document["ratios"]["output_tokens_per_s"] is None
    text = page.read_text()
    assert first in text
    assert second in text
    assert f"{good['output_tokens_per_s']:.2f}" in text
    assert "failed requests" in text


def test_comparison_is_in_favor_of_the_first_server():
    def server(rate, latency):
        ms = {name: {"p50": latency} for name in ("ttft", "itl", "chunk", "tpot", "e2e")}
        counts = {"seconds": 1.0, "completed": 1, "canceled": 0, "retries": 0, "errors": ()}
        return Figures(output_tokens_per_s=rate, requests_per_s=rate, goodput_per_s=0.0, ms=ms, **counts)

    ratios = comparison(server(20.0, 5.0), server(10.0, 10.0))
    assert (ratios["output_tokens_per_s"], ratios["ttft_p50"], ratios["goodput_per_s"]) == (2.0, 2.0, None)


def test_options_of_a_comparison(tmp_path):
    with pytest.raises(OutriderError, match="--against-model needs --against URL"):
        Settings(against_model="m")
    result = invoke("load", "--against", "http://127.0.0.1:9", "--report", tmp_path / "a.pdf")
    assert result.exit_code == 2
    assert "another suffix than .html" in result.output
