"""The server, asked by the official client and by those who do it wrong."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
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
from outrider.loadgen.client import put_load
from outrider.loadgen.command import points
from outrider.loadgen.settings import Settings as LoadSettings
from outrider.measure.prompts import read_prompts
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.command import bind, listen
from outrider.serve.settings import Settings
from outrider.serve.stream.ticket import TOGETHER

PROMPT = "def add(a, b):"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""
OPTIONS = {"target": embedded("nano"), "proposer": "ngram", "dtype": "float32", "max_model_len": 256, "k": 4}


@contextmanager
def serving(options=None, **settings):
    asked = Settings(port=0, **{"max_num_seqs": 4, "max_queued_requests": 8, **settings})
    llm = LLM(**{**OPTIONS, **(options or {})}, max_num_seqs=asked.max_num_seqs)
    driver = AsyncLLM(llm, max_queued_requests=asked.max_queued_requests, max_num_seqs=asked.max_num_seqs)
    app = make_app(driver, asked, name="nano")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", driver
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving() as (url, driver):
        yield url, driver


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def alone():
    return LLM(**OPTIONS, max_num_seqs=4)


def settled(driver):
    """Wait until nothing runs any more."""
    until = time.monotonic() + 20
    while driver.running or driver.waiting:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_completion_is_what_the_engine_says_alone(client, alone, temperature):
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=24, temperature=temperature, seed=5)
    (wanted,) = alone.generate([PROMPT], SamplingParams(temperature=temperature, max_tokens=24, seed=5))
    assert reply.choices[0].text == wanted.text
    assert reply.choices[0].finish_reason == str(wanted.finish_reason)
    assert reply.usage.completion_tokens == len(wanted.token_ids)
    assert reply.usage.prompt_tokens == len(wanted.prompt_token_ids)
    told = reply.usage.speculation
    assert told["target_passes"] == wanted.stats.passes
    assert told["exact"]


def test_a_chat_is_under_the_models_template(client, alone):
    messages = [{"role": "user", "content": "Count to three."}]
    reply = client.chat.completions.create(model="nano", messages=messages, max_completion_tokens=12, temperature=0)
    (wanted,) = alone.generate([alone.encode_chat(messages)], SamplingParams(max_tokens=12))
    assert reply.choices[0].message.content == wanted.text
    assert reply.choices[0].message.role == "assistant"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_adds_up_to_the_whole(client, chat):
    asked = {"model": "nano", "max_tokens": 40, "temperature": 0.8, "seed": 3, "extra_body": {"ignore_eos": True}}
    if chat:
        create, text = client.chat.completions.create, lambda choice: choice.delta.content
        asked["messages"] = [{"role": "user", "content": "Hi"}]
        whole = create(**asked).choices[0].message.content
    else:
        create, text = client.completions.create, lambda choice: choice.text
        asked["prompt"] = PROMPT
        whole = create(**asked).choices[0].text
    parts = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(text(choice) for part in parts for choice in part.choices) == whole
    assert parts[-1].usage.completion_tokens
    assert [choice.finish_reason for part in parts for choice in part.choices][-1] in ("stop", "length")
    assert len(parts) > 2


def test_stops_end_the_text_before_them(client, alone):
    whole = alone.generate([PROMPT], SamplingParams(max_tokens=60))[0].text
    stop = whole[20:23]
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop)
    assert reply.choices[0].text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_a_request_may_do_without_guesses(client, alone):
    asked = {"model": "nano", "prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 30, "temperature": 0}
    free, plain, one = (
        client.completions.create(**asked, extra_body={} if k is None else {"k": k}) for k in (None, 0, 1)
    )
    assert free.choices[0].text == plain.choices[0].text == one.choices[0].text
    told = [reply.usage.speculation for reply in (free, one, plain)]
    assert told[0]["draft_tokens"] > told[1]["draft_tokens"] > told[2]["draft_tokens"] == 0
    assert told[1]["draft_tokens"] <= told[1]["target_passes"]


def test_a_stream_tells_who_wrote_what(client):
    parts = client.completions.create(
        model="nano",
        prompt="a = 1\nb = 1\nc = 1\n",
        max_tokens=30,
        temperature=0,
        stream=True,
        extra_body={"stream_options": {"include_tokens": True}},
    )
    told = [(part.choices[0].text, part.choices[0].speculation) for part in parts]
    assert all("".join(each["tokens"]) == text for text, each in told)
    guessed = [who for _, each in told for who in each["from_draft"]]
    assert len(guessed) == 30
    assert any(guessed)
    assert not all(guessed)


def test_a_stream_tells_all_guesses(server):
    asked = {"prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 40, "temperature": 0, "stream": True}
    with httpx.stream(
        "POST", server[0] + "/v1/completions", json={**asked, "stream_options": {"include_drafts": True}}
    ) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line and line != "data: [DONE]"]
    told = [event["choices"][0]["speculation"] for event in events]
    assert any(not all(each["drafts"]["accepted"]) for each in told)
    for each in told:
        guesses, kept = each["drafts"], sum(each["from_draft"])
        assert each["from_draft"] == [True] * kept + [False] * (len(each["tokens"]) - kept)
        chain = [(word, at) for at, word in enumerate(guesses["tokens"]) if guesses["accepted"][at]]
        assert [word for word, _ in chain][:kept] == each["tokens"][:kept]
        assert [guesses["parents"][at] for _, at in chain] == [-1, *(at for _, at in chain)][: len(chain)]
        assert set(guesses["source"]) <= {"ngram"}


def test_several_at_once(client, alone):
    reply = client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, logprobs=2
    )
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=8, logprobs=2)
    wanted = alone.generate([PROMPT, "import os"], params)
    assert [choice.text for choice in reply.choices] == [each.text for each in wanted]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice, each in zip(reply.choices, wanted, strict=True):
        assert choice.logprobs.token_logprobs == pytest.approx([entry.logprob for entry in each.logprobs], abs=1e-4)
        assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    streamed = {}
    for part in client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, stream=True
    ):
        for choice in part.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == [each.text for each in wanted]


def test_offsets_go_on_over_the_parts_of_a_stream(client):
    asked = {"model": "nano", "prompt": [PROMPT, "import os"], "max_tokens": 24, "temperature": 0, "logprobs": 0}
    wholes = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices
    tokens, offsets, parts = {0: [], 1: []}, {0: [], 1: []}, 0
    rounds = {"ignore_eos": True, "stream_options": {"include_tokens": True}}  # a part for each
    for part in client.completions.create(**asked, stream=True, extra_body=rounds):
        (choice,) = part.choices
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        parts += 1
    assert parts > 4
    for whole in wholes:
        assert tokens[whole.index] == whole.logprobs.tokens
        assert offsets[whole.index] == whole.logprobs.text_offset
        assert offsets[whole.index] == [sum(map(len, whole.logprobs.tokens[:i])) for i in range(24)]


def test_chat_logprobs(client):
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


WRONG = {
    "no field": ({"prompt": "x", "temprature": 1}, "temprature"),
    "type": ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
    "range": ({"prompt": "x", "top_p": 0}, "top_p"),
    "none": ({}, "prompt"),
    "empty": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "empty one of two": ({"prompt": ["a", ""]}, "prompt"),
    "too long": ({"prompt": "word " * 400}, "prompt"),
    "token": ({"prompt": [99999999]}, "prompt"),
    "too many prompts": ({"prompt": ["x"] * 30}, "prompt"),
    "half a letter": ({"prompt": "\ud800"}, "prompt"),
    "half a letter of two": ({"prompt": ["x", "\ud800"]}, "prompt.1"),
    "half a letter in a stop": ({"prompt": "x", "stop": ["\udfff"]}, "stop.0"),
    "half a letter in a key": ({"prompt": "x", "logit_bias": {"\ud800": 1}}, "logit_bias"),
    "bias": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    "bias beyond": ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    "bias of no token": ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    "bias of too long a number": ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "temperature": ({"prompt": "x", "temperature": 1e300}, "temperature"),
    "huge n": ({"prompt": "x", "n": 10**6}, "n"),
    "stops": ({"prompt": "x", "stop": ["a"] * 100}, "stop"),
    "long stop": ({"prompt": "x", "stop": "a" * 1001}, "stop"),
    "empty stop": ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    "stop of no token": ({"prompt": "x", "stop_token_ids": [99999999]}, "stop_token_ids"),
    "too many tokens": ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    "more at least than at most": ({"prompt": "x", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    "more at least than there is room": ({"prompt": "x " * 20, "max_tokens": 256, "min_tokens": 250}, "min_tokens"),
    "who guesses": ({"prompt": "x", "proposer": "oracle"}, "proposer"),
    "who judges": ({"prompt": "x", "verifier": "oracle"}, "verifier"),
    "options of no stream": ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    "no form": ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    "broken form": ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    "no choice": ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
    "a form and its tokens": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "logit_bias": {"5": -100}},
        "logit_bias",
    ),
    "a form and its ends": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 1, "stop_token_ids": [5]},
        "min_tokens",
    ),
}
HI = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "[]"}}
WRONG_CHATS = {
    "none": ({"messages": []}, "messages"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    "half a letter": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    "no call": ({"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    "no logprobs": (HI | {"top_logprobs": 2}, "top_logprobs"),
    "too many tokens": (HI | {"max_tokens": 10**6}, "max_tokens"),
    "too many tokens by their new name": (HI | {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    "two numbers": (HI | {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    "two forms": (
        HI | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
    ),
    "broken form": (
        HI | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        "response_format",
    ),
    "broken extension": (HI | {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "no such form": (HI | {"response_format": {"type": "xml"}}, "response_format"),
    "a choice of no tool": (HI | {"tool_choice": "required"}, "tool_choice"),
    "a choice of another": (
        HI | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
    ),
    "twins": (HI | {"tools": [TOOL, TOOL]}, "tools"),
    "broken tool": (
        HI | {"tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "b"}}}]},
        "tools",
    ),
    "a form of tools": (HI | {"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
    "another form of tools": (HI | {"tools": [TOOL], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    "too many": (HI | {"n": 30}, "n"),
}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        pytest.param(path, *each, id=f"{path}: {case}")
        for path, cases in (("completions", WRONG), ("chat/completions", WRONG_CHATS))
        for case, each in cases.items()
    ],
)
def test_mistakes_are_named(server, path, body, field):
    content = json.dumps(body)  # which has no trouble with half a letter
    answer = httpx.post(f"{server[0]}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_a_chat_template_refuses_is_a_mistake(server, monkeypatch):
    url, driver = server
    template = "{{ raise_exception('System role not supported') }}"
    monkeypatch.setattr(driver.front.parts.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "system", "content": "Be brief."}]}
    answer = httpx.post(url + "/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "System role not supported" in answer.json()["error"]["message"]


def test_what_is_no_json_is_a_mistake_too(server):
    answer = httpx.post(server[0] + "/v1/completions", content=b"{oops", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_other_models_are_not_found(client):
    with pytest.raises(openai.NotFoundError, match="use 'nano'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=HI["messages"])
    assert refused.value.param == "model"
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


def test_tokens_health_and_metrics(server, client, alone):
    url, driver = server
    client.completions.create(model="nano", prompt=PROMPT, max_tokens=4)
    assert httpx.post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"] == list(alone.encode(PROMPT))
    assert httpx.get(url + "/health").json() == {"status": "ok"}
    settled(driver)
    text = httpx.get(url + "/metrics").text
    counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#"}
    assert counts["outrider_output_tokens_total"] == driver.stats.output_tokens > 0
    assert counts["outrider_num_requests_running"] == 0
    assert counts["outrider_e2e_request_latency_seconds_count"] > 0


def test_who_hangs_up_gives_the_slot_back(server):
    url, driver = server
    before = driver.stats.output_tokens
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    settled(driver)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url + "/v1/completions", json={**body, "n": 4, "stream": False}, timeout=0.05)
    settled(driver)
    assert driver.stats.output_tokens - before < 5 * 200


def test_more_than_may_wait_are_turned_away(monkeypatch):
    with serving(max_num_seqs=1, max_queued_requests=1) as (url, driver):
        body = {"prompt": PROMPT, "max_tokens": 50, "n": 2, "stream": True}
        gate, step = threading.Event(), driver._llm.engine.step
        monkeypatch.setattr(driver._llm.engine, "step", lambda: gate.wait(20) and step())
        with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
            late = httpx.post(url + "/v1/completions", json={"prompt": "x"})
            assert late.status_code == 429
            assert late.headers["retry-after"]
            gate.set()
            assert answer.read().endswith(b"[DONE]\n\n")
        settled(driver)
        assert httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("way", [{"max_concurrency": 3}, {"request_rate": 50.0}])
def test_load_is_measured(server, way, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": "a", "prompt": PROMPT}, {"category": "b", "messages": [{"role": "user", "content": "Hi"}]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = LoadSettings(base_url=server[0] + "/v1", num_requests=6, max_tokens=9, ignore_eos=True, k=0, **way)
    asked, seconds = asyncio.run(put_load(settings, read_prompts(file)))
    assert [each.tokens for each in asked] == [9] * 6
    assert not any(each.error for each in asked)
    for each in asked:
        assert each.start <= each.times[0] <= each.times[-1] <= seconds
        assert each.ttft + sum(each.chunk_gaps) == pytest.approx(each.e2e)


def test_load_tells_what_went_wrong(server):
    url = server[0] + "/v1"
    asked, _ = asyncio.run(put_load(LoadSettings(base_url=url, num_requests=2, model="other"), read_prompts()))
    assert all("404" in each.error for each in asked)
    with pytest.raises(OutriderError, match="names no model"):
        asyncio.run(put_load(LoadSettings(base_url="http://127.0.0.1:9/v1"), read_prompts()))
    with pytest.raises(OutriderError, match="give one of them"):
        LoadSettings(request_rate=1.0, max_concurrency=2)


def test_percentiles_are_values_that_were_met():
    assert points([0.003, 0.001, 0.002]) == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert points([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert points([]) == {}


def test_keys_and_sizes():
    with serving(api_key=["secret"], max_body_kb=2) as (url, _):
        ask = {"prompt": "x", "max_tokens": 1}
        assert httpx.post(url + "/v1/completions", json=ask).status_code == 401
        wrong = {"authorization": "Bearer secre"}
        assert httpx.post(url + "/v1/completions", json=ask, headers=wrong).status_code == 401
        right = {"authorization": "Bearer secret"}
        assert httpx.post(url + "/v1/completions", json=ask, headers=right).status_code == 200
        assert httpx.get(url + "/health").status_code == 200
        large = {"prompt": "x" * 4000}
        assert httpx.post(url + "/v1/completions", json=large, headers=right).status_code == 413
        pieces = (b"x" * 1000 for _ in range(9))
        assert httpx.post(url + "/v1/completions", content=pieces, headers=right).status_code == 413


def test_a_round_that_fails_ends_what_runs_and_nothing_else(monkeypatch):
    with serving() as (url, driver):
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        good = httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"]
        step, calls = driver._llm.engine.step, []

        def broken():
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("out of luck")
            return step()

        monkeypatch.setattr(driver._llm.engine, "step", broken)
        bad = httpx.post(url + "/v1/completions", json=body)
        assert bad.status_code == 500
        assert "out of luck" in bad.json()["error"]["message"]
        settled(driver)
        assert httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"] == good


def test_the_docs_say_how_many_milliseconds_share_a_chunk():
    manual = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text()
    assert f"within {1000 * TOGETHER:g} ms share one" in manual


def test_each_option_is_in_the_panel_of_its_kind():
    hints = get_type_hints(Settings, include_extras=True)
    panels = {name: hint.__metadata__[0].rich_help_panel for name, hint in hints.items()}
    assert panels["smooth"] == "Streams"
    assert set(panels.values()) == {"Where", "Limits", "Streams"}


def test_too_slow_is_said():
    with serving(request_timeout=0.005) as (url, driver):
        body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        assert httpx.post(url + "/v1/completions", json=body).status_code == 504
        streamed = httpx.post(url + "/v1/completions", json={**body, "stream": True}).text
        assert "longer than 0.005 seconds" in streamed
        settled(driver)


@pytest.mark.skipif(not CHROMIUM, reason="no browser here")
def test_the_page_in_a_browser(server):
    playwright = pytest.importorskip("playwright.sync_api")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with playwright.sync_playwright() as here:
        browser = here.chromium.launch(executable_path=CHROMIUM, args=flags)
        page, wrong = browser.new_page(viewport={"width": 390, "height": 844}), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(server[0])
        playwright.expect(page.locator("#model")).to_have_text("nano")
        page.fill("#prompt", "a = 1\nb = 1\nc = 1\n")
        page.uncheck("#chat")
        page.check("#both")
        page.fill("#tokens", "20")
        page.keyboard.press("Control+Enter")
        speeds = page.locator("section h2 b")
        for i in range(2):
            playwright.expect(speeds.nth(i)).to_contain_text("tokens/s", timeout=20000)
        playwright.expect(page.locator("#stop")).to_be_hidden(timeout=20000)
        one, two = page.locator(".out").all_inner_texts()
        assert one == two != ""
        assert page.locator("section").nth(0).locator("mark").count() > 0
        assert page.locator("section").nth(1).locator("mark, del").count() == 0
        playwright.expect(page.locator("#told")).to_contain_text("the same text")
        playwright.expect(page.locator("#legend")).to_contain_text("ngram guessed and kept")
        struck = page.locator("del").first
        playwright.expect(struck).to_be_hidden()
        page.check("#rejected")
        playwright.expect(struck).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        page.fill("#tokens", "100000")
        page.fill("#prompt", "word " * 600)
        page.keyboard.press("Control+Enter")
        playwright.expect(page.locator("#error")).to_contain_text("shorten the prompt", timeout=20000)
        browser.close()
    assert not wrong


@pytest.mark.slow
def test_a_signal_lets_open_requests_end():
    command = [sys.executable, "-m", "outrider", "serve", "--target", OPTIONS["target"], "--proposer", "ngram"]
    command += ["--port", "0", "--max-num-seqs", "2", "--dtype", "float32", "--k", "2"]
    server = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    try:
        said = next(line for line in server.stderr if " at http" in line)  # the port is taken by then
        url = re.search(r"http://127.0.0.1:[1-9]\d*", said)[0]
        assert httpx.get(url + "/health", timeout=60).status_code == 200
        body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
        server.communicate()


def test_a_place_where_nobody_can_listen_names_the_way_out(monkeypatch):
    (first,) = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    used = rf"port {port} of 127.0.0.1 is in use; give another --port \(0 takes"
    with first, bind("127.0.0.1", port)[0] as second:  # which may be as long as nobody listens
        listen([first], "127.0.0.1")
        with pytest.raises(OutriderError, match=used):
            listen([second], "127.0.0.1")
        with pytest.raises(OutriderError, match=used):
            bind("127.0.0.1", port)
        started = CliRunner().invoke(cli, ["serve", "--port", str(port), "--target", "nowhere"])
        assert started.exit_code == 2
        assert "is in use" in started.stderr  # rather than after loading
    for host in ("192.0.2.1", "a" * 70):
        with pytest.raises(OutriderError, match=r"is no address of this machine \(.+\); use 127.0.0.1, or 0.0.0.0"):
            bind(host, 0)

    def refused(*_, **__):
        raise PermissionError(EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    with pytest.raises(OutriderError, match=r"port 80 of 127.0.0.1 .* give a --port of at least 1024"):
        bind("127.0.0.1", 80)


def test_all_addresses_of_a_name_have_one_port():
    found = bind("localhost", 0)
    assert len({each.getsockname()[1] for each in found}) == 1
    for each in found:
        each.close()
