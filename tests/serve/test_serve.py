"""Tests of the server with the official OpenAI client, with invalid requests, and with the load generator."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from errno import EACCES
from pathlib import Path
from typing import get_type_hints

import httpx
import openai
import pytest
import uvicorn
from typer.testing import CliRunner

from outrider.cli.app import app as cli
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.loadgen.client import run_load
from outrider.loadgen.command import percentiles
from outrider.loadgen.settings import Settings as LoadSettings
from outrider.measure.prompts import read_prompts
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.listening import bind, listen
from outrider.serve.settings import Settings
from outrider.serve.stream.request_stream import PUBLISH_INTERVAL
from tests.helpers.browser import browse, needs_browser

PROMPT = "def add(a, b):"
OPTIONS = {"target": embedded("nano"), "proposer": "ngram", "dtype": "float32", "max_model_len": 256, "k": 4}


@contextmanager
def serving(options=None, *, videos=None, **settings):
    """Run a server in a thread. Yield its URL and its `AsyncLLM`. `videos` is a `VideoService` for it."""
    server_settings = Settings(port=0, **{"max_num_seqs": 4, "max_queued_requests": 8, **settings})
    max_num_seqs = server_settings.max_num_seqs
    llm = LLM(**{**OPTIONS, **(options or {})}, max_num_seqs=max_num_seqs)
    async_llm = AsyncLLM(llm, max_queued_requests=server_settings.max_queued_requests, max_num_seqs=max_num_seqs)
    app = make_app(async_llm, server_settings, name="nano", videos=videos)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", async_llm
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving() as (url, async_llm):
        yield url, async_llm


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="any", max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def reference_llm():
    """An `LLM` with the options of the server, without a server."""
    return LLM(**OPTIONS, max_num_seqs=4)


def wait_until_idle(async_llm):
    """Wait until no request runs or waits."""
    deadline = time.monotonic() + 20
    while async_llm.running or async_llm.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completion_equals_output_of_llm(client, reference_llm, temperature):
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=24, temperature=temperature, seed=5)
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    (expected,) = reference_llm.generate([PROMPT], params)
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == str(expected.finish_reason)
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    speculation = reply.usage.speculation
    assert speculation["target_passes"] == expected.stats.passes
    assert speculation["exact"]


def test_chat_uses_chat_template(client, reference_llm):
    messages = [{"role": "user", "content": "Count to three."}]
    reply = client.chat.completions.create(model="nano", messages=messages, max_completion_tokens=12, temperature=0)
    (expected,) = reference_llm.generate([reference_llm.encode_chat(messages)], SamplingParams(max_tokens=12))
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"


@pytest.mark.parametrize("chat", [False, True])
def test_stream_chunks_concatenate_to_full_response(client, chat):
    body = {"model": "nano", "max_tokens": 40, "temperature": 0.8, "seed": 3, "extra_body": {"ignore_eos": True}}
    if chat:
        create = client.chat.completions.create
        text_of = lambda choice: choice.delta.content  # noqa: E731
        body["messages"] = [{"role": "user", "content": "Hi"}]
        full_text = create(**body).choices[0].message.content
    else:
        create = client.completions.create
        text_of = lambda choice: choice.text  # noqa: E731
        body["prompt"] = PROMPT
        full_text = create(**body).choices[0].text
    chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(text_of(choice) for choice in choices) == full_text
    assert chunks[-1].usage.completion_tokens
    assert choices[-1].finish_reason in ("stop", "length")
    assert len(chunks) > 2


def test_text_ends_before_stop_string(client, reference_llm):
    full_text = reference_llm.generate([PROMPT], SamplingParams(max_tokens=60))[0].text
    stop = full_text[20:23]
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop)
    assert reply.choices[0].text == full_text[: full_text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_k_of_request_limits_draft_tokens(client, reference_llm):
    body = {"model": "nano", "prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 30, "temperature": 0}
    default = client.completions.create(**body)
    plain = client.completions.create(**body, extra_body={"k": 0})
    one = client.completions.create(**body, extra_body={"k": 1})
    assert default.choices[0].text == plain.choices[0].text == one.choices[0].text
    draft_tokens = [reply.usage.speculation["draft_tokens"] for reply in (default, one, plain)]
    assert draft_tokens[0] > draft_tokens[1] > draft_tokens[2] == 0
    assert draft_tokens[1] <= one.usage.speculation["target_passes"]


def test_include_tokens_reports_source_of_each_token(client):
    chunks = client.completions.create(
        model="nano",
        prompt="a = 1\nb = 1\nc = 1\n",
        max_tokens=30,
        temperature=0,
        stream=True,
        extra_body={"stream_options": {"include_tokens": True}},
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert all("".join(choice.speculation["tokens"]) == choice.text for choice in choices)
    from_draft = [flag for choice in choices for flag in choice.speculation["from_draft"]]
    assert len(from_draft) == 30
    assert any(from_draft)
    assert not all(from_draft)


def test_include_drafts_reports_whole_drafts(server):
    body = {"prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 40, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_drafts": True}
    with httpx.stream("POST", server[0] + "/v1/completions", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line and line != "data: [DONE]"]
    rounds = [event["choices"][0]["speculation"] for event in events]
    assert any(not all(each["drafts"]["accepted"]) for each in rounds)
    for each in rounds:
        drafts = each["drafts"]
        num_accepted = sum(each["from_draft"])
        assert each["from_draft"] == [True] * num_accepted + [False] * (len(each["tokens"]) - num_accepted)
        path = [node for node, accepted in enumerate(drafts["accepted"]) if accepted]
        assert [drafts["tokens"][node] for node in path][:num_accepted] == each["tokens"][:num_accepted]
        assert [drafts["parents"][node] for node in path] == [-1, *path][: len(path)]
        assert set(drafts["source"]) <= {"ngram"}


def test_several_prompts_and_completions(client, reference_llm):
    reply = client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, logprobs=2
    )
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=8, logprobs=2)
    expected = reference_llm.generate([PROMPT, "import os"], params)
    assert [choice.text for choice in reply.choices] == [completion.text for completion in expected]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice, completion in zip(reply.choices, expected, strict=True):
        logprobs = [entry.logprob for entry in completion.logprobs]
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    streamed = {}
    for chunk in client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == [completion.text for completion in expected]


def test_text_offset_continues_across_stream_chunks(client):
    body = {"model": "nano", "prompt": [PROMPT, "import os"], "max_tokens": 24, "temperature": 0, "logprobs": 0}
    expected = client.completions.create(**body, extra_body={"ignore_eos": True}).choices
    tokens = {0: [], 1: []}
    offsets = {0: [], 1: []}
    num_chunks = 0
    extra_body = {"ignore_eos": True, "stream_options": {"include_tokens": True}}  # one chunk per round
    for chunk in client.completions.create(**body, stream=True, extra_body=extra_body):
        (choice,) = chunk.choices
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        num_chunks += 1
    assert num_chunks > 4
    for choice in expected:
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
        assert offsets[choice.index] == [sum(map(len, choice.logprobs.tokens[:i])) for i in range(24)]


def test_logprobs_of_chat(client):
    reply = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    entries = reply.choices[0].logprobs.content
    assert len(entries) == reply.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6


INVALID_COMPLETIONS = {
    "unknown field": ({"prompt": "x", "temprature": 1}, "temprature"),
    "wrong type": ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    "out of range": ({"prompt": "x", "top_p": 0}, "top_p"),
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list of prompts": ({"prompt": []}, "prompt"),
    "one of two prompts is empty": ({"prompt": ["a", ""]}, "prompt"),
    "prompt too long": ({"prompt": "word " * 400}, "prompt"),
    "prompt with unknown token": ({"prompt": [99999999]}, "prompt"),
    "too many prompts": ({"prompt": ["x"] * 30}, "prompt"),
    "lone surrogate in prompt": ({"prompt": "\ud800"}, "prompt"),
    "lone surrogate in one of two prompts": ({"prompt": ["x", "\ud800"]}, "prompt.1"),
    "lone surrogate in stop": ({"prompt": "x", "stop": ["\udfff"]}, "stop.0"),
    "lone surrogate in logit_bias key": ({"prompt": "x", "logit_bias": {"\ud800": 1}}, "logit_bias"),
    "logit_bias key is not a number": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    "logit_bias too large": ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    "logit_bias of unknown token": ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    "logit_bias key has too many digits": ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "temperature too high": ({"prompt": "x", "temperature": 1e300}, "temperature"),
    "n too large": ({"prompt": "x", "n": 10**6}, "n"),
    "too many stop strings": ({"prompt": "x", "stop": ["a"] * 100}, "stop"),
    "stop string too long": ({"prompt": "x", "stop": "a" * 1001}, "stop"),
    "empty stop string": ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    "stop_token_ids with unknown token": ({"prompt": "x", "stop_token_ids": [99999999]}, "stop_token_ids"),
    "max_tokens too large": ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    "min_tokens above max_tokens": ({"prompt": "x", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    "min_tokens above remaining context": ({"prompt": "x " * 20, "max_tokens": 256, "min_tokens": 250}, "min_tokens"),
    "unknown proposer": ({"prompt": "x", "proposer": "oracle"}, "proposer"),
    "unknown verifier": ({"prompt": "x", "verifier": "oracle"}, "verifier"),
    "stream_options without stream": ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    "empty structured_outputs": ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    "invalid regex": ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    "empty choice": ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
    "constraint and forbidden token": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "logit_bias": {"5": -100}},
        "logit_bias",
    ),
    "constraint with min_tokens and stop token": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 1, "stop_token_ids": [5]},
        "min_tokens",
    ),
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "[]"}}
INVALID_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "message too long": ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    "lone surrogate in message": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    "call arguments are not an object": (
        {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
        "messages",
    ),
    "top_logprobs without logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    "max_tokens too large": (CHAT | {"max_tokens": 10**6}, "max_tokens"),
    "max_completion_tokens too large": (CHAT | {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    "max_tokens and max_completion_tokens differ": (
        CHAT | {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
    ),
    "response_format and structured_outputs": (
        CHAT | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
    ),
    "invalid schema in response_format": (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        "response_format",
    ),
    "invalid structured_outputs": (CHAT | {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "unknown response_format": (CHAT | {"response_format": {"type": "xml"}}, "response_format"),
    "required call without tools": (CHAT | {"tool_choice": "required"}, "tool_choice"),
    "tool_choice not in tools": (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
    ),
    "two tools with one name": (CHAT | {"tools": [TOOL, TOOL]}, "tools"),
    "invalid schema in tool": (
        CHAT | {"tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "b"}}}]},
        "tools",
    ),
    "tools and response_format": (
        CHAT | {"tools": [TOOL], "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "tools and structured_outputs": (
        CHAT | {"tools": [TOOL], "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    "n too large": (CHAT | {"n": 30}, "n"),
}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        pytest.param(path, *case, id=f"{path}: {name}")
        for path, cases in (("completions", INVALID_COMPLETIONS), ("chat/completions", INVALID_CHATS))
        for name, case in cases.items()
    ],
)
def test_error_names_invalid_field(server, path, body, field):
    content = json.dumps(body)  # httpx cannot encode lone surrogates
    response = httpx.post(f"{server[0]}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_exception_of_chat_template_is_status_400(server, monkeypatch):
    url, async_llm = server
    template = "{{ raise_exception('System role not supported') }}"
    monkeypatch.setattr(async_llm.frontend.parts.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "system", "content": "Be brief."}]}
    response = httpx.post(url + "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "System role not supported" in response.json()["error"]["message"]


def test_invalid_json_is_status_400(server):
    headers = {"content-type": "application/json"}
    response = httpx.post(server[0] + "/v1/completions", content=b"{oops", headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_unknown_model_is_status_404(client):
    with pytest.raises(openai.NotFoundError, match="use 'nano'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])
    assert raised.value.param == "model"
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


def test_tokenize_health_and_metrics(server, client, reference_llm):
    url, async_llm = server
    client.completions.create(model="nano", prompt=PROMPT, max_tokens=4)
    assert httpx.post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"] == list(reference_llm.encode(PROMPT))
    assert httpx.get(url + "/health").json() == {"status": "ok"}
    wait_until_idle(async_llm)
    text = httpx.get(url + "/metrics").text
    counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#"}
    assert counts["outrider_output_tokens_total"] == async_llm.stats.output_tokens > 0
    assert counts["outrider_num_requests_running"] == 0
    assert counts["outrider_e2e_request_latency_seconds_count"] > 0


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


def test_full_queue_is_status_429(monkeypatch):
    with serving(max_num_seqs=1, max_queued_requests=1) as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 50, "n": 2, "stream": True}
        gate = threading.Event()
        step = async_llm._llm.engine.step
        monkeypatch.setattr(async_llm._llm.engine, "step", lambda: gate.wait(20) and step())
        with httpx.stream("POST", url + "/v1/completions", json=body) as response:
            rejected = httpx.post(url + "/v1/completions", json={"prompt": "x"})
            assert rejected.status_code == 429
            assert rejected.headers["retry-after"]
            gate.set()
            assert response.read().endswith(b"[DONE]\n\n")
        wait_until_idle(async_llm)
        assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("loop", [{"max_concurrency": 3}, {"request_rate": 50.0}])
def test_load_generator_measures_latencies(server, loop, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": "a", "prompt": PROMPT}, {"category": "b", "messages": [{"role": "user", "content": "Hi"}]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = LoadSettings(base_url=server[0] + "/v1", num_requests=6, max_tokens=9, ignore_eos=True, k=0, **loop)
    results, seconds = asyncio.run(run_load(settings, read_prompts(file)))
    assert [result.tokens for result in results] == [9] * 6
    assert not any(result.error for result in results)
    for result in results:
        assert result.start <= result.times[0] <= result.times[-1] <= seconds
        assert result.ttft + sum(result.chunk_gaps) == pytest.approx(result.e2e)


def test_load_generator_reports_errors(server):
    url = server[0] + "/v1"
    results, _ = asyncio.run(run_load(LoadSettings(base_url=url, num_requests=2, model="other"), read_prompts()))
    assert all("404" in result.error for result in results)
    with pytest.raises(OutriderError, match="cannot be reached"):
        asyncio.run(run_load(LoadSettings(base_url="http://127.0.0.1:9/v1"), read_prompts()))
    with pytest.raises(OutriderError, match="give one of them"):
        LoadSettings(request_rate=1.0, max_concurrency=2)


def test_percentiles_are_measured_values():
    assert percentiles([0.003, 0.001, 0.002]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert percentiles([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([]) == {}


def test_api_key_and_body_limit():
    with serving(api_key=["secret"], max_body_kb=2) as (url, _):
        body = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 401
        wrong_key = {"authorization": "Bearer secre"}
        assert httpx.post(url + "/v1/completions", json=body, headers=wrong_key).status_code == 401
        right_key = {"authorization": "Bearer secret"}
        assert httpx.post(url + "/v1/completions", json=body, headers=right_key).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        large_body = {"prompt": "x" * 4000}
        assert httpx.post(url + "/v1/completions", json=large_body, headers=right_key).status_code == 413
        chunks = (b"x" * 1000 for _ in range(9))  # a body without Content-Length
        assert httpx.post(url + "/v1/completions", content=chunks, headers=right_key).status_code == 413


def test_failed_round_ends_running_request_only(monkeypatch):
    with serving() as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        expected = httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"]
        step = async_llm._llm.engine.step
        calls = []

        def fail_third_step():
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("injected failure")
            return step()

        monkeypatch.setattr(async_llm._llm.engine, "step", fail_third_step)
        failed = httpx.post(url + "/v1/completions", json=body)
        assert failed.status_code == 500
        assert "injected failure" in failed.json()["error"]["message"]
        wait_until_idle(async_llm)
        assert httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"] == expected


def test_docs_state_publish_interval():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    assert f"within {1000 * PUBLISH_INTERVAL:g} ms share one" in page


def test_options_are_grouped_in_help():
    hints = get_type_hints(Settings, include_extras=True)
    panels = {name: hint.__metadata__[0].rich_help_panel for name, hint in hints.items()}
    assert panels["smooth"] == "Streaming"
    assert set(panels.values()) == {"Server", "Limits", "Streaming", "Videos"}


def test_request_timeout():
    with serving(request_timeout=0.005) as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 504
        streamed = httpx.post(url + "/v1/completions", json={**body, "stream": True}).text
        assert "longer than 0.005 seconds" in streamed
        wait_until_idle(async_llm)


@needs_browser
def test_page_in_browser(server):
    with browse(server[0]) as (page, expect):
        expect(page.locator("#model")).to_have_text("nano")
        page.fill("#prompt", "a = 1\nb = 1\nc = 1\n")
        page.uncheck("#chat")
        page.check("#both")
        page.fill("#tokens", "20")
        page.keyboard.press("Control+Enter")
        speeds = page.locator("section h2 b")
        for i in range(2):
            expect(speeds.nth(i)).to_contain_text("tokens/s", timeout=20000)
        expect(page.locator("#stop")).to_be_hidden(timeout=20000)
        speculative, plain = page.locator(".out").all_inner_texts()
        assert speculative == plain != ""
        assert page.locator("section").nth(0).locator("mark").count() > 0
        assert page.locator("section").nth(1).locator("mark, del").count() == 0
        expect(page.locator("#status")).to_contain_text("both outputs are the same")
        expect(page.locator("#legend")).to_contain_text("ngram drafted and accepted")
        rejected = page.locator("del").first
        expect(rejected).to_be_hidden()
        page.check("#rejected")
        expect(rejected).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.fill("#tokens", "100000")
        page.fill("#prompt", "word " * 600)
        page.keyboard.press("Control+Enter")
        expect(page.locator("#error")).to_contain_text("shorten the prompt", timeout=20000)


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
        started = CliRunner().invoke(cli, ["serve", "--port", str(port), "--target", "nowhere"])
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
