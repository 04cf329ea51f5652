"""Tests that the server survives faulty clients, proposers and models, and handles signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Scores
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.propose.lookup.ngram import NgramProposer
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from outrider.serve.stream.request_stream import StreamContent
from tests.serve.test_serve import OPTIONS, PROMPT, serving, wait_until_idle

SWITCH_OPTIONS = {"proposer": "switch(ngram,recycle)", "isolate_faults": True}
BODY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
OTHER_PROMPTS = ["import os", "a = 1\nb = 1\n", "class A:"]


@pytest.fixture(scope="module")
def server():
    with serving(SWITCH_OPTIONS) as (url, async_llm):
        yield url + "/v1/completions", async_llm


@pytest.fixture(scope="module")
def reference_llm():
    """An `LLM` with the options of the server, without a server."""
    return LLM(**OPTIONS, max_num_seqs=4)


def post_concurrently(url, bodies):
    """Send the requests at the same time and return their responses."""

    async def post_all():
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    return asyncio.run(post_all())


def text_of(response):
    return response.json()["choices"][0]["text"]


def expected_texts(reference_llm, prompts, **params):
    """Return what the server must generate for each prompt with the parameters of `BODY`."""
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, **params)
    return [reference_llm.generate([prompt], sampling)[0].text for prompt in prompts]


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# Clients


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_cancels_request_after_current_round(server, monkeypatch, stream):
    url, async_llm = server
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
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_until(lambda: len(started_rounds) == 4)
    client.close()
    # The event loop sends the command to cancel the request while the engine is in its fourth round.
    wait_until(lambda: not async_llm._commands.empty())
    allowed_rounds.release()
    wait_until_idle(async_llm)
    assert async_llm.stats.rounds - rounds_before == 4


@pytest.mark.parametrize("chat", [False, True])
def test_long_prompt_does_not_block_event_loop(server, monkeypatch, chat):
    url, _ = server
    encode = LLM.encode
    started = threading.Event()
    may_finish = threading.Event()
    responses = []
    long_prompt = "a word and " * 4000

    def slow_encode(self, prompt):
        started.set()
        assert may_finish.wait(60)
        return encode(self, prompt)

    if chat:
        monkeypatch.setattr(LLM, "encode_chat", lambda self, *_: slow_encode(self, long_prompt))
        body = {"messages": [{"role": "user", "content": long_prompt}]}
        prompt_url = url.replace("completions", "chat/completions")
    else:
        monkeypatch.setattr(LLM, "encode", slow_encode)
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
    server_settings = Settings(max_num_seqs=2, max_queued_requests=2)
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
    server_settings = Settings(max_num_seqs=2, max_queued_requests=2, request_timeout=0.2)
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


def test_unexpected_exception_is_status_500(server, monkeypatch):
    def fail(*_):
        raise KeyError("injected failure")

    monkeypatch.setattr("outrider.serve.handler.rename_param", fail)
    response = httpx.post(server[0], json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


# Failures of the engine


@contextmanager
def changed_scores(async_llm, monkeypatch, change):
    """Replace the scores of the target by `change(batch, scores)`."""
    target = async_llm.engine._target
    score = target.score

    def score_and_change(batch, draft, first=-1):
        return change(batch, score(batch, draft, first))

    with monkeypatch.context() as patch:
        patch.setattr(target, "score", score_and_change)
        yield


def faulty_indices(batch):
    """Return the indices of the sequences that have a `user` and at least 4 output tokens."""
    indices = []
    for b, seq in enumerate(batch.seqs):
        if seq.stream and seq.num_output_tokens >= 4 and seq.request.params.scope:
            indices.append(b)
    return indices


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("failure", ["exception", "NaN logits"])
def test_failing_request_does_not_affect_others(server, reference_llm, monkeypatch, failure, temperature):
    url, async_llm = server

    def change(batch, scores):
        if not (faulty := faulty_indices(batch)):
            return scores
        if failure == "exception":
            raise RuntimeError("injected failure")
        logits = scores.logits.clone()
        logits[faulty] = float("nan")
        return Scores(logits=logits, hidden_states=scores.hidden_states, feed_hidden_states=scores.feed_hidden_states)

    bodies = [{**BODY, "prompt": prompt, "temperature": temperature, "seed": 4} for prompt in OTHER_PROMPTS]
    with changed_scores(async_llm, monkeypatch, change):
        *responses, failed = post_concurrently(url, [*bodies, {**BODY, "user": "faulty"}])
    assert failed.status_code == 500
    expected_message = "injected failure" if failure == "exception" else "not finite"
    assert expected_message in failed.json()["error"]["message"]
    assert [text_of(response) for response in responses] == expected_texts(
        reference_llm, OTHER_PROMPTS, temperature=temperature, seed=4
    )
    streamed = httpx.post(url, json={**BODY, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_decoding_error_does_not_affect_other_requests(server, reference_llm, monkeypatch):
    url, async_llm = server
    make_chunk = async_llm._make_chunk

    def fail_for_user(seq, stream):
        if seq.request.params.scope and seq.num_output_tokens > 3:
            raise UnicodeError("injected failure")
        return make_chunk(seq, stream)

    monkeypatch.setattr(async_llm, "_make_chunk", fail_for_user)
    bodies = [{**BODY, "prompt": prompt} for prompt in OTHER_PROMPTS]
    *responses, failed = post_concurrently(url, [*bodies, {**BODY, "user": "faulty"}])
    assert failed.status_code == 500
    assert [text_of(response) for response in responses] == expected_texts(reference_llm, OTHER_PROMPTS)


@pytest.mark.parametrize("failure", ["command", "publish", "engine"])
def test_requests_end_when_engine_thread_fails(monkeypatch, failure):
    def fail(*_):
        raise RuntimeError("injected failure")

    with serving() as (url, async_llm):
        step = async_llm.engine.step
        started = threading.Event()
        responses = []

        def slow_step():
            started.set()
            time.sleep(0.01)
            return step()

        def post(body):
            responses.append(httpx.post(url + "/v1/completions", json=body, timeout=60))

        monkeypatch.setattr(async_llm.engine, "step", slow_step)
        bodies = [{**BODY, "max_tokens": 200, "prompt": [PROMPT, "import os"]}, {**BODY, "max_tokens": 200}]
        clients = [threading.Thread(target=post, args=[body]) for body in bodies]
        clients[0].start()
        assert started.wait(60)
        if failure == "publish":
            monkeypatch.setattr(async_llm, "_publish_all", fail)
        elif failure == "engine":
            monkeypatch.setattr(async_llm.engine, "abort", fail)
            monkeypatch.setattr(async_llm.engine, "busy", fail)
        else:
            async_llm._commands.put(fail)
        clients[1].start()
        for client in clients:
            client.join(60)
            assert not client.is_alive()
        failed = next(response for response in responses if response.status_code == 500)
        assert "injected failure" in failed.json()["error"]["message"]
        assert {response.status_code for response in responses} <= {500, 429}
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 429


def test_command_after_stop_is_answered():
    async_llm = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)

    async def submit_and_stop():
        (stream,) = async_llm.submit(async_llm.frontend.encode(PROMPT), SamplingParams(max_tokens=5), StreamContent.END)
        async_llm._stopping = True  # before the thread has read the command
        async_llm.start()
        async for chunks in stream.chunks():
            assert "stopped before" in chunks[-1].error

    asyncio.run(asyncio.wait_for(submit_and_stop(), 30))
    async_llm.stop()


def test_health_is_503_while_all_rounds_fail(monkeypatch):
    with serving() as (url, async_llm):

        def fail():
            raise RuntimeError("injected failure")

        with monkeypatch.context() as patch:
            patch.setattr(async_llm.engine, "step", fail)
            for _ in range(8):
                assert httpx.get(url + "/health").status_code == 200
                assert httpx.post(url + "/v1/completions", json=BODY).status_code == 500
            assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 200
        assert httpx.get(url + "/health").status_code == 200


class SometimesFailingProposer(NgramProposer):
    """Raises in every third call of `propose`."""

    def __init__(self, setup):
        super().__init__(setup)
        self.num_calls = 0

    def propose(self, batch):
        self.num_calls += 1
        if self.num_calls % 3 == 0:
            raise RuntimeError("injected failure")
        return super().propose(batch)


def test_exceptions_of_proposer_do_not_change_output(reference_llm):
    with serving({"proposer": SometimesFailingProposer, "isolate_faults": True}) as (url, async_llm):
        bodies = [{**BODY, "prompt": prompt} for prompt in OTHER_PROMPTS]
        responses = post_concurrently(url + "/v1/completions", bodies)
        assert [text_of(response) for response in responses] == expected_texts(reference_llm, OTHER_PROMPTS)
        assert async_llm.frontend.parts.isolated[0].failures
        assert not async_llm.failed_rounds
        assert 'outrider_proposer_failures_total{proposer="own#1"}' in httpx.get(url + "/metrics").text


class AlwaysFailingProposer(NgramProposer):
    """Raises in every call of `propose`."""

    def propose(self, batch):
        raise RuntimeError("injected failure")


def metric_values(url, name):
    """Return the values of the metrics whose names begin with `name`."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(name)]


def test_disabled_proposer_degrades_health():
    with serving({"proposer": AlwaysFailingProposer, "isolate_faults": True}) as (url, async_llm):
        assert metric_values(url, "outrider_degraded ") == [0]
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 200
        wait_until_idle(async_llm)
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "proposer own#1 is switched off for now: it has failed 3 times" in health.json()["reasons"][0]
        assert metric_values(url, "outrider_degraded ") == [1]


def test_repeated_round_failures_degrade_health_and_are_logged_rarely(monkeypatch, caplog):
    """The guard of the proposer does not see these failures, because they happen after `propose`."""
    with serving() as (url, async_llm):

        def reject_drafts(batch, draft):
            if draft.size:
                raise OutriderError("this verifier takes chains only")

        monkeypatch.setattr(async_llm.engine, "_check", reject_drafts)
        body = {**BODY, "prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 100}
        with caplog.at_level(logging.ERROR, "outrider.serve"):
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        wait_until_idle(async_llm)
        assert async_llm.failed_rounds > 20
        health = httpx.get(url + "/health").json()
        assert health["status"] == "degraded"
        assert (
            "were repeated without draft tokens: OutriderError: this verifier takes chains only" in health["reasons"][0]
        )
        assert metric_values(url, "outrider_degraded ") == [1]
        records = [record for record in caplog.records if record.name == "outrider.serve"]
        assert records[0].exc_info
        assert "16 rounds failed with the same error" in records[4].getMessage()
        assert len(records) < 9
        monkeypatch.undo()
        for _ in range(4):
            httpx.post(url + "/v1/completions", json=body)
        wait_until_idle(async_llm)
        assert httpx.get(url + "/health").json() == {"status": "ok"}


# Options of a request


def draft_tokens_by_proposer(url):
    lines = httpx.get(url.removesuffix("/v1/completions") + "/metrics").text.splitlines()
    samples = (line for line in lines if line.startswith("outrider_proposer_draft_tokens_total"))
    return {sample.split('"')[1]: float(sample.split()[-1]) for sample in samples}


def test_request_chooses_proposer(server, reference_llm):
    url, async_llm = server
    (expected,) = expected_texts(reference_llm, [PROMPT])
    for name, other in (("ngram", "recycle"), ("recycle", "ngram")):
        wait_until_idle(async_llm)
        before = draft_tokens_by_proposer(url)
        response = httpx.post(url, json={**BODY, "proposer": name})
        assert text_of(response) == expected
        wait_until_idle(async_llm)
        after = draft_tokens_by_proposer(url)
        assert after[name] - before[name] == response.json()["usage"]["speculation"]["draft_tokens"] > 0
        assert after[other] == before[other]
    bodies = [{**BODY, "proposer": "ngram"}, {**BODY, "proposer": "recycle", "prompt": OTHER_PROMPTS[0]}]
    responses = post_concurrently(url, bodies)
    assert [text_of(response) for response in responses] == expected_texts(reference_llm, [PROMPT, OTHER_PROMPTS[0]])
    assert all(response.json()["usage"]["speculation"]["draft_tokens"] for response in responses)


def test_request_disables_speculation(server, reference_llm):
    response = httpx.post(server[0], json={**BODY, "k": 0})
    assert response.json()["usage"]["speculation"]["draft_tokens"] == 0
    assert text_of(response) == expected_texts(reference_llm, [PROMPT])[0]


@pytest.mark.parametrize("verifier", ["siblings", "traversal", "coupled", "walk"])
def test_request_chooses_verifier(verifier):
    body = {**BODY, "temperature": 1, "seed": 8, "proposer": "ngram"}
    params = SamplingParams(temperature=1, seed=8, max_tokens=40, ignore_eos=True, proposer="ngram")
    options = {**OPTIONS, **SWITCH_OPTIONS}
    chosen_llm = LLM(**options, max_num_seqs=4, verifier=verifier)
    walk_llm = LLM(**options, max_num_seqs=4, verifier="walk")
    with serving(SWITCH_OPTIONS) as (url, _):
        # This request is alone and comes first. With some verifiers the text depends on the draft, and the draft on
        # what the proposer has learned.
        response = httpx.post(url + "/v1/completions", json={**body, "verifier": verifier})
        assert text_of(response) == chosen_llm.generate([PROMPT], params)[0].text
        default_body = {**body, "prompt": OTHER_PROMPTS[0]}
        _, default = post_concurrently(url + "/v1/completions", [{**body, "verifier": verifier}, default_body])
        assert text_of(default) == walk_llm.generate([OTHER_PROMPTS[0]], params)[0].text


def test_error_of_unknown_option_lists_valid_ones(server):
    url, _ = server
    for fields, message in (
        ({"proposer": "oracle"}, "use ngram or recycle"),
        ({"verifier": "block"}, "use walk or coupled or siblings or traversal"),  # recycle makes trees
        ({"verifier": "typical"}, "use walk"),
    ):
        response = httpx.post(url, json={"prompt": "x", **fields})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    model = httpx.get(url.removesuffix("completions") + "models").json()["data"][0]
    assert model["proposers"] == ["ngram", "recycle"]
    assert model["verifiers"] == ["walk", "coupled", "siblings", "traversal"]


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


# Request ids, the request log and CORS


def test_request_id_and_request_log(server, caplog):
    url, async_llm = server
    with caplog.at_level(logging.INFO, "outrider.serve.requests"):
        completed = httpx.post(url, json=BODY, headers={"x-request-id": "client-7"})
        rejected = httpx.post(url, json={"prompt": 3}, headers={"x-request-id": "x" * 500})
        httpx.post(url, json={**BODY, "stream": True}, headers={"x-request-id": "streamed"})
        httpx.get(url.removesuffix("/v1/completions") + "/health")
        wait_until_idle(async_llm)
    assert completed.headers["x-request-id"] == "client-7"
    assert len(rejected.headers["x-request-id"]) == 32
    ids = {"client-7", rejected.headers["x-request-id"], "streamed"}  # the log may have a late line of another test
    first, second, third = (record.fields for record in caplog.records if record.fields["id"] in ids)
    usage = completed.json()["usage"]
    assert (first["id"], first["status"], first["finish_reason"], first["output_tokens"]) == (
        "client-7",
        200,
        "length",
        40,
    )
    assert first["tau"] == pytest.approx(usage["speculation"]["tokens_per_pass"], abs=1e-3)
    assert 0 < first["time_to_first_token_seconds"] <= first["seconds"]
    assert (second["status"], "output_tokens" in second) == (400, False)
    assert (third["id"], third["finish_reason"], third["output_tokens"]) == ("streamed", "length", 40)


def test_cors_allows_only_configured_origins(server):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    not_configured = httpx.options(server[0], headers=preflight)
    assert "access-control-allow-origin" not in not_configured.headers
    with serving(allow_origin=["https://a.example"], api_key=["k"]) as (url, _):
        allowed = httpx.options(url + "/v1/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(url + "/v1/completions", headers={**preflight, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        without_key = httpx.post(url + "/v1/completions", json=BODY, headers={"origin": "https://a.example"})
        assert without_key.status_code == 401
        assert without_key.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("options", [{"allow_origin": ["a.example"]}, {"log_format": "xml"}, {"api_key": [" "]}])
def test_invalid_settings_are_rejected(options):
    with pytest.raises(OutriderError, match=r"use|give|write"):
        Settings(**options)


# The server process


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
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
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
