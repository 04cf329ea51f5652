"""Clients that disconnect, read slowly, or send long prompts."""

import asyncio
import json
import logging
import threading
from http.client import HTTPConnection

import httpx
import pytest

from outrider.engine.codec import TextCodec
from outrider.llm import LLM
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from tests.helpers.serving import BODY, OPTIONS, PROMPT, expected_texts, wait_until, wait_until_idle


def test_disconnect_cancels_request(server):
    url, async_llm = server
    tokens_before = async_llm.stats.output_tokens
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until_idle(async_llm)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/completions", json={**body, "n": 4, "stream": False}, timeout=0.05)
    wait_until_idle(async_llm)
    assert async_llm.stats.output_tokens - tokens_before < 5 * 200


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_request_after_current_round(switching_server, monkeypatch, caplog, stream):
    caplog.set_level(logging.INFO, "outrider.serve.requests")
    url, async_llm = switching_server
    wait_until_idle(async_llm)
    allowed_rounds = threading.Semaphore(3)
    step = async_llm.engine.step
    rounds_before = async_llm.stats.rounds
    started_rounds = []

    def step_when_allowed():
        started_rounds.append(1)
        return allowed_rounds.acquire(timeout=60) and step()

    monkeypatch.setattr(async_llm.engine, "step", step_when_allowed)
    client = HTTPConnection(url.split("/")[2])
    body = json.dumps({**BODY, "max_tokens": 200, "stream": stream})
    headers = {"content-type": "application/json", "x-request-id": f"closed {stream}"}
    client.request("POST", "/v1/completions", body, headers)
    if stream:
        client.getresponse().readline()
    wait_until(lambda: len(started_rounds) == 4)
    client.close()
    # The event loop sends the command to cancel the request while the engine is in its fourth round.
    wait_until(lambda: not async_llm._commands.empty())
    allowed_rounds.release()
    wait_until_idle(async_llm)
    assert async_llm.stats.rounds - rounds_before == 4
    wait_until(lambda: any(record.fields["id"] == headers["x-request-id"] for record in caplog.records))
    (fields,) = (record.fields for record in caplog.records if record.fields["id"] == headers["x-request-id"])
    assert fields["finish_reason"] == "canceled"
    assert fields["prompt_tokens"] == len(async_llm.codec.encode(PROMPT))
    assert fields["tau"] >= 1
    assert fields["output_tokens"] >= 1


@pytest.mark.parametrize("chat", [False, True])
def test_long_prompt_does_not_block_event_loop(switching_server, monkeypatch, chat):
    url, _ = switching_server
    encode = TextCodec.encode
    started = threading.Event()
    may_finish = threading.Event()
    responses = []
    long_prompt = "a word and " * 4000

    def slow_encode(self, prompt, **options):
        started.set()
        assert may_finish.wait(60)
        return encode(self, prompt, **options)

    if chat:
        monkeypatch.setattr(TextCodec, "encode_chat", lambda self, *_, **__: slow_encode(self, long_prompt))
        body = {"messages": [{"role": "user", "content": long_prompt}]}
        prompt_url = url.replace("completions", "chat/completions")
    else:
        monkeypatch.setattr(TextCodec, "encode", slow_encode)
        body = {**BODY, "prompt": long_prompt}
        prompt_url = url
    client = threading.Thread(target=lambda: responses.append(httpx.post(prompt_url, json=body, timeout=60)))
    client.start()
    assert started.wait(60)
    assert httpx.get(url.replace("v1/completions", "health")).status_code == 200
    may_finish.set()
    client.join()
    assert responses[0].status_code == 400
    assert "tokens long and the context holds" in responses[0].json()["error"]["message"]


def post_in_process(app, body, send):
    """Call the application directly with one request. The response goes to `send`."""
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": ""}
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.Future()  # the client stays connected

    return app(scope, receive, send)


def test_chunks_for_slow_reader_are_merged(reference_llm):
    server_settings = Settings(max_queued_requests=2)
    async_llm = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)
    app = make_app(async_llm, server_settings, name="nano")
    sent = []

    async def read_slowly():
        gate = asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) > 2:
                await gate.wait()

        response = asyncio.create_task(post_in_process(app, {**BODY, "stream": True}, send))
        while not sent or async_llm.running:  # the sequence finishes although the reader waits
            await asyncio.sleep(0.01)
        assert len(sent) == 3
        gate.set()
        await response

    async_llm.start()
    try:
        asyncio.run(asyncio.wait_for(read_slowly(), 30))
    finally:
        async_llm.stop()
    lines = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(chunks) <= 3
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_texts(reference_llm, [PROMPT])[0]


def test_request_timeout_cancels_request_of_stuck_reader():
    server_settings = Settings(max_queued_requests=2, request_timeout=0.2)
    async_llm = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)
    app = make_app(async_llm, server_settings, name="nano")

    async def never_read():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Future()

        response = asyncio.create_task(post_in_process(app, {**BODY, "stream": True}, send))
        await asyncio.wait([response])

    async_llm.start()
    try:
        asyncio.run(asyncio.wait_for(never_read(), 30))
        wait_until_idle(async_llm)
    finally:
        async_llm.stop()
