"""What a server must survive: clients, proposers, models and signals that do it wrong."""

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
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outrider.core.params import SamplingParams
from outrider.core.types import Scores
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.propose.lookup.ngram import NgramProposer
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from outrider.serve.stream.ticket import StreamContent
from tests.serve.test_serve import OPTIONS, PROMPT, serving, settled

load_all_checks()
SWITCH = {"proposer": "switch(ngram,recycle)", "isolate_faults": True}
BODY = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
OTHERS = ["import os", "a = 1\nb = 1\n", "class A:"]


@pytest.fixture(scope="module")
def server():
    with serving(SWITCH) as (url, driver):
        yield url + "/v1/completions", driver


@pytest.fixture(scope="module")
def alone():
    return LLM(**OPTIONS, max_num_seqs=4)


def together(url, bodies):
    """Their answers, asked at once."""

    async def ask():
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    return asyncio.run(ask())


def text_of(answer):
    return answer.json()["choices"][0]["text"]


def plain_texts(alone, prompts, **params):
    given = SamplingParams(max_tokens=40, ignore_eos=True, **params)
    return [alone.generate([prompt], given)[0].text for prompt in prompts]


def wait_until(true):
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


# Clients


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_gone_after_the_round_that_runs(server, monkeypatch, stream):
    url, driver = server
    settled(driver)
    turn, step, before, begun = threading.Semaphore(3), driver.engine.step, driver.stats.rounds, []

    def next_round():
        begun.append(1)
        return turn.acquire(timeout=60) and step()

    monkeypatch.setattr(driver.engine, "step", next_round)
    client = HTTPConnection(url.split("/")[2])
    body = json.dumps({**BODY, "max_tokens": 200, "stream": stream})
    client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_until(lambda: len(begun) == 4)
    client.close()
    wait_until(lambda: not driver._notes.empty())  # the loop has seen it go, and the engine is in its fourth round
    turn.release()
    settled(driver)
    assert driver.stats.rounds - before == 4


@pytest.mark.parametrize("chat", [False, True])
def test_nobody_waits_while_a_long_prompt_is_read(server, monkeypatch, chat):
    url, _ = server
    encode, reading, done, told = LLM.encode, threading.Event(), threading.Event(), []
    long = "a word and " * 4000

    def slow(self, prompt):
        reading.set()
        assert done.wait(60)
        return encode(self, prompt)

    monkeypatch.setattr(LLM, "encode_chat" if chat else "encode", (lambda self, *_: slow(self, long)) if chat else slow)
    body = {"messages": [{"role": "user", "content": long}]} if chat else {**BODY, "prompt": long}
    where = url.replace("completions", "chat/completions") if chat else url
    asking = threading.Thread(target=lambda: told.append(httpx.post(where, json=body, timeout=60)))
    asking.start()
    assert reading.wait(60)
    assert httpx.get(url.replace("v1/completions", "health")).status_code == 200
    done.set()
    asking.join()
    assert told[0].status_code == 400
    assert "tokens long and the context holds" in told[0].json()["error"]["message"]


def ask_in_process(app, body, send):
    """One request straight to the application, whose answer goes to `send`."""
    content = json.dumps(body).encode()
    heads = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": heads, "query_string": b""}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "root_path": ""}
    left = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive():
        if left:
            return left.pop()
        return await asyncio.Future()

    return app(scope, receive, send)


def test_what_waits_for_a_slow_reader_is_one_piece(alone):
    asked = Settings(max_num_seqs=2, max_queued_requests=2)
    driver = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)
    sent = []

    async def read_slowly():
        gate = asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) > 2:
                await gate.wait()

        work = asyncio.create_task(ask_in_process(make_app(driver, asked, name="nano"), {**BODY, "stream": True}, send))
        while not sent or driver.running:  # the row ends although nobody reads
            await asyncio.sleep(0.01)
        assert len(sent) == 3
        gate.set()
        await work

    driver.start()
    try:
        asyncio.run(asyncio.wait_for(read_slowly(), 30))
    finally:
        driver.stop()
    lines = b"".join(message.get("body", b"") for message in sent).decode().split("\n\n")
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert len(parts) <= 3
    assert "".join(part["choices"][0]["text"] for part in parts) == plain_texts(alone, [PROMPT])[0]


def test_who_never_reads_is_let_go_when_time_is_up():
    asked = Settings(max_num_seqs=2, max_queued_requests=2, request_timeout=0.2)
    driver = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)

    async def never_read():
        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Future()

        work = asyncio.create_task(ask_in_process(make_app(driver, asked, name="nano"), {**BODY, "stream": True}, send))
        await asyncio.wait([work])

    driver.start()
    try:
        asyncio.run(asyncio.wait_for(never_read(), 30))
        settled(driver)
    finally:
        driver.stop()


RAW = {
    "not valid JSON": (b"{oops", "not valid JSON"),
    "half of it": (b'{"prompt": "x"', "not valid JSON"),
    "a list": (b"[1]", ""),
    "nothing": (b"", ""),
    "no text": (b'{"prompt": "\xff\xfe"}', ""),
    "half a letter": (b'{"prompt": "\\ud800"}', ""),
    "half a letter in a name": (b'{"prompt": "x", "\\ud800": 1}', ""),
    "half a letter in a model": (b'{"prompt": "x", "model": "\\udfff"}', ""),
    "half a letter in a stop": (b'{"prompt": "x", "stop": "\\ud800"}', ""),
    "deep": (b"[" * 100_000, ""),
    "a long number": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
    "not a number": (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    "infinite": (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    "a bias without end": (b'{"prompt": "x", "logit_bias": {"5": Infinity}}', "logit_bias"),
    "a bias of nothing": (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
}


@pytest.mark.parametrize("case", RAW)
def test_bodies_that_are_none(server, case):
    content, said = RAW[case]
    answer = httpx.post(server[0], content=content, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)
    assert said in answer.json()["error"]["message"]


WRONG = {
    "max_tokens": "many",
    "temperature": "hot",
    "stream": "yes",
    "n": 1.5,
    "stop": [1],
    "prompt": {"a": 1},
    "seed": -1,
    "logit_bias": [1],
    "stream_options": {"include_usage": 3},
    "k": 10**9,
    "proposer": 7,
}


@pytest.mark.parametrize("field", WRONG)
def test_what_is_of_the_wrong_kind_is_named(server, field):
    answer = httpx.post(server[0], json={"prompt": "x", field: WRONG[field]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == field


HUGE = {
    "n": 10**9,
    "k": 10**9,
    "max_tokens": 10**9,
    "min_tokens": 10**9,
    "top_k": 10**30,
    "seed": 10**30,
    "logit_bias": {str(i): 1 for i in range(2000)},
    "stop": "x" * 2000,
    "stop_token_ids": list(range(1000)),
    "prompt": "word " * 10_000,
    "logprobs": 10**6,
}


@pytest.mark.parametrize("field", HUGE)
def test_what_is_huge_is_turned_away(server, field):
    url, driver = server
    before = driver.stats.rounds
    answer = httpx.post(url, json={"prompt": "x", field: HUGE[field]})
    assert answer.status_code == 400
    assert field.split("_")[0] in answer.json()["error"]["message"]
    assert driver.stats.rounds == before


@pytest.mark.parametrize("value", [1e-50, 1e-40, 1e300])
@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_what_logits_cannot_be_divided_by_is_turned_away_as_in_python(server, field, value):
    with pytest.raises(OutriderError) as refused:
        SamplingParams(**{field: value})
    answer = httpx.post(server[0], json={"prompt": "x", field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == str(refused.value)


@pytest.mark.parametrize("given", ["", "secret", "Bearer", "Basic secret", "Bearer secret2", "Bearer secre"])
def test_keys_that_are_none(keyed, given):
    answer = httpx.post(keyed, json={"prompt": "x"}, headers={"authorization": given})
    assert answer.status_code == 401
    assert answer.headers["x-request-id"]


@pytest.fixture(scope="module")
def keyed():
    with serving(api_key=["secret", "other"]) as (url, _):
        for key in ("Bearer secret", "bearer other"):
            good = httpx.post(
                url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"authorization": key}
            )
            assert good.status_code == 200
        yield url + "/v1/completions"


def test_what_nobody_has_thought_of_is_an_error_as_clients_read_it(server, monkeypatch):
    def broken(*_):
        raise KeyError("oh")

    monkeypatch.setattr("outrider.serve.handler.rename_param", broken)
    answer = httpx.post(server[0], json=BODY)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


# Any client at all


def fuzz(url, path, mode, examples, *, derandomize):
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operation = schema[path]["POST"]

    @settings(max_examples=examples, deadline=None, derandomize=derandomize, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def hold(case):
        # A request may fit the schema and not the model: too long a prompt, a token that it has not.
        case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance], timeout=60)

    hold()


@pytest.fixture(scope="module")
def small():
    with serving({**SWITCH, "max_model_len": 48}, max_n=3) as (url, driver):
        yield url, driver


ROUTES = ("/v1/completions", "/v1/chat/completions", "/tokenize")


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ROUTES)
def test_fuzzed(small, path, mode):
    url, driver = small
    fuzz(url, path, mode, 15, derandomize=True)
    settled(driver)
    assert not driver.failed_rounds
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.heavy
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ROUTES)
def test_fuzzed_for_long(small, path, mode):
    url, driver = small
    fuzz(url, path, mode, 400, derandomize=False)
    settled(driver)
    assert not driver.failed_rounds


# The engine


@contextmanager
def scored(driver, monkeypatch, change):
    """The target's scores, changed by `change(batch, scores)`."""
    target = driver.engine._target
    score = target.score

    def changed(batch, draft, first=-1):
        return change(batch, score(batch, draft, first))

    with monkeypatch.context() as patch:
        patch.setattr(target, "score", changed)
        yield


def poisoned(batch):
    return [
        b for b, row in enumerate(batch.seqs) if row.stream and row.num_output_tokens >= 4 and row.request.params.scope
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", ["raises", "no numbers"])
def test_a_request_that_breaks_breaks_alone(server, alone, monkeypatch, how, temperature):
    url, driver = server

    def change(batch, scores):
        if not (bad := poisoned(batch)):
            return scores
        if how == "raises":
            raise RuntimeError("poison")
        logits = scores.logits.clone()
        logits[bad] = float("nan")
        return Scores(logits=logits, hidden_states=scores.hidden_states, feed_hidden_states=scores.feed_hidden_states)

    bodies = [{**BODY, "prompt": prompt, "temperature": temperature, "seed": 4} for prompt in OTHERS]
    with scored(driver, monkeypatch, change):
        *good, bad = together(url, [*bodies, {**BODY, "user": "poison"}])
    assert bad.status_code == 500
    assert ("poison" if how == "raises" else "not finite") in bad.json()["error"]["message"]
    assert [text_of(each) for each in good] == plain_texts(alone, OTHERS, temperature=temperature, seed=4)
    streamed = httpx.post(url, json={**BODY, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_a_text_that_cannot_be_written_ends_alone(server, alone, monkeypatch):
    url, driver = server
    piece = driver._chunk

    def broken(row, ticket):
        if row.request.params.scope and row.num_output_tokens > 3:
            raise UnicodeError("no such letter")
        return piece(row, ticket)

    monkeypatch.setattr(driver, "_chunk", broken)
    *good, bad = together(url, [{**BODY, "prompt": prompt} for prompt in OTHERS] + [{**BODY, "user": "bad"}])
    assert bad.status_code == 500
    assert [text_of(each) for each in good] == plain_texts(alone, OTHERS)


@pytest.mark.parametrize("where", ["a note", "news", "the engine"])
def test_nobody_waits_for_a_thread_that_has_ended(monkeypatch, where):
    def broken(*_):
        raise RuntimeError("out of luck")

    with serving() as (url, driver):
        step, begun, told = driver.engine.step, threading.Event(), []

        def first():
            begun.set()
            time.sleep(0.01)
            return step()

        monkeypatch.setattr(driver.engine, "step", first)
        ask = lambda body: told.append(httpx.post(url + "/v1/completions", json=body, timeout=60))  # noqa: E731
        bodies = [{**BODY, "max_tokens": 200, "prompt": [PROMPT, "import os"]}, {**BODY, "max_tokens": 200}]
        asking = [threading.Thread(target=ask, args=[body]) for body in bodies]
        asking[0].start()
        assert begun.wait(60)
        if where == "news":
            monkeypatch.setattr(driver, "_publish_round", broken)
        elif where == "the engine":
            monkeypatch.setattr(driver.engine, "abort", broken)
            monkeypatch.setattr(driver.engine, "busy", broken)
        else:
            driver._notes.put(broken)
        asking[1].start()
        for each in asking:
            each.join(60)
            assert not each.is_alive()
        first_answer = next(answer for answer in told if answer.status_code == 500)
        assert "out of luck" in first_answer.json()["error"]["message"]
        assert {answer.status_code for answer in told} <= {500, 429}
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 429


def test_a_note_that_comes_too_late_is_answered():
    driver = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)

    async def ask():
        (ticket,) = driver.submit(PROMPT, SamplingParams(max_tokens=5), StreamContent.END)
        driver._stopping = True  # before the thread has read the note
        driver.start()
        async for pieces in ticket.chunks():
            assert "stopped before" in pieces[-1].error

    asyncio.run(asyncio.wait_for(ask(), 30))
    driver.stop()


def test_a_server_that_only_fails_says_that_it_is_ill(monkeypatch):
    with serving() as (url, driver):

        def broken():
            raise RuntimeError("for good")

        with monkeypatch.context() as patch:
            patch.setattr(driver.engine, "step", broken)
            for _ in range(8):
                assert httpx.get(url + "/health").status_code == 200
                assert httpx.post(url + "/v1/completions", json=BODY).status_code == 500
            assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 200
        assert httpx.get(url + "/health").status_code == 200


class Failing(NgramProposer):
    """Raises each third time."""

    def __init__(self, setup):
        super().__init__(setup)
        self.times = 0

    def propose(self, batch):
        self.times += 1
        if self.times % 3 == 0:
            raise RuntimeError("no idea")
        return super().propose(batch)


def test_a_proposer_that_raises_costs_its_guesses_alone(alone):
    with serving({"proposer": Failing, "isolate_faults": True}) as (url, driver):
        answers = together(url + "/v1/completions", [{**BODY, "prompt": prompt} for prompt in OTHERS])
        assert [text_of(each) for each in answers] == plain_texts(alone, OTHERS)
        assert driver.front.parts.isolated[0].failures
        assert not driver.failed_rounds
        assert 'outrider_proposer_failures_total{proposer="own#1"}' in httpx.get(url + "/metrics").text


class Hopeless(NgramProposer):
    """Always raises."""

    def propose(self, batch):
        raise RuntimeError("no idea")


def metric(url, name):
    lines = httpx.get(url + "/metrics").text.splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(name)]


def test_a_proposer_that_is_off_is_told():
    with serving({"proposer": Hopeless, "isolate_faults": True}) as (url, driver):
        assert metric(url, "outrider_degraded ") == [0]
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 200
        settled(driver)
        health = httpx.get(url + "/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "proposer own#1 is switched off for now: it has failed 3 times" in health.json()["reasons"][0]
        assert metric(url, "outrider_degraded ") == [1]


def test_rounds_that_fail_again_and_again_are_told_and_fill_no_log(monkeypatch, caplog):
    """What the guard of a proposer does not see: here as where a verifier refuses each draft."""
    with serving() as (url, driver):

        def refuse(batch, draft):
            if draft.size:
                raise OutriderError("this verifier takes chains only")

        monkeypatch.setattr(driver.engine, "_check", refuse)
        body = {**BODY, "prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 100}
        with caplog.at_level(logging.ERROR, "outrider.serve"):
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        settled(driver)
        assert driver.failed_rounds > 20
        health = httpx.get(url + "/health").json()
        assert health["status"] == "degraded"
        assert "ran again without guesses: OutriderError: this verifier takes chains only" in health["reasons"][0]
        assert metric(url, "outrider_degraded ") == [1]
        said = [record for record in caplog.records if record.name == "outrider.serve"]
        assert said[0].exc_info
        assert "16 rounds have failed alike" in said[4].getMessage()
        assert len(said) < 9
        monkeypatch.undo()
        for _ in range(4):
            httpx.post(url + "/v1/completions", json=body)
        settled(driver)
        assert httpx.get(url + "/health").json() == {"status": "ok"}


# What a request may choose


def drafts(url):
    lines = httpx.get(url.removesuffix("/v1/completions") + "/metrics").text.splitlines()
    found = (line for line in lines if line.startswith("outrider_proposer_draft_tokens_total"))
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_a_request_chooses_who_guesses(server, alone):
    url, driver = server
    (wanted,) = plain_texts(alone, [PROMPT])
    for name, other in (("ngram", "recycle"), ("recycle", "ngram")):
        settled(driver)
        before = drafts(url)
        answer = httpx.post(url, json={**BODY, "proposer": name})
        assert text_of(answer) == wanted
        settled(driver)
        after = drafts(url)
        assert after[name] - before[name] == answer.json()["usage"]["speculation"]["draft_tokens"] > 0
        assert after[other] == before[other]
    both = together(url, [{**BODY, "proposer": "ngram"}, {**BODY, "proposer": "recycle", "prompt": OTHERS[0]}])
    assert [text_of(each) for each in both] == plain_texts(alone, [PROMPT, OTHERS[0]])
    assert all(each.json()["usage"]["speculation"]["draft_tokens"] for each in both)


def test_a_request_may_be_off(server, alone):
    answer = httpx.post(server[0], json={**BODY, "k": 0})
    assert answer.json()["usage"]["speculation"]["draft_tokens"] == 0
    assert text_of(answer) == plain_texts(alone, [PROMPT])[0]


@pytest.mark.parametrize("verifier", ["siblings", "traversal", "coupled", "walk"])
def test_a_request_chooses_who_judges(verifier):
    asked = {**BODY, "temperature": 1, "seed": 8, "proposer": "ngram"}
    params = SamplingParams(temperature=1, seed=8, max_tokens=40, ignore_eos=True, proposer="ngram")
    own, walk = (LLM(**{**OPTIONS, **SWITCH}, max_num_seqs=4, verifier=each) for each in (verifier, "walk"))
    with serving(SWITCH) as (url, _):
        # By itself and first: under some of them the text depends on what is guessed, and that on what was learned.
        one = httpx.post(url + "/v1/completions", json={**asked, "verifier": verifier})
        assert text_of(one) == own.generate([PROMPT], params)[0].text
        beside = {**asked, "prompt": OTHERS[0]}
        _, other = together(url + "/v1/completions", [{**asked, "verifier": verifier}, beside])
        assert text_of(other) == walk.generate([OTHERS[0]], params)[0].text


def test_what_cannot_be_chosen_names_what_can(server):
    url, _ = server
    for asked, said in (
        ({"proposer": "oracle"}, "use ngram or recycle"),
        ({"verifier": "block"}, "use walk or coupled or siblings or traversal"),  # recycle makes trees
        ({"verifier": "typical"}, "use walk"),
    ):
        answer = httpx.post(url, json={"prompt": "x", **asked})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    model = httpx.get(url.removesuffix("completions") + "models").json()["data"][0]
    assert model["proposers"] == ["ngram", "recycle"]
    assert model["verifiers"] == ["walk", "coupled", "siblings", "traversal"]


def test_a_plan_that_cannot_be_kept_ends_no_server_badly(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    with serving({"k": "auto", "plan": folder / "plan.json"}) as (url, _):
        assert httpx.get(url + "/health").status_code == 200
        folder.rmdir()
    (said,) = [record for record in caplog.records if "not kept" in record.getMessage()]
    assert said.levelname == "WARNING"
    assert "name a file in a folder that can be" in said.getMessage()
    assert not [record for record in caplog.records if record.exc_info]


# Names, logs and origins


def test_each_request_has_a_name_and_a_line(server, caplog):
    url, driver = server
    with caplog.at_level(logging.INFO, "outrider.serve.requests"):
        answer = httpx.post(url, json=BODY, headers={"x-request-id": "mine-7"})
        odd = httpx.post(url, json={"prompt": 3}, headers={"x-request-id": "x" * 500})
        httpx.post(url, json={**BODY, "stream": True}, headers={"x-request-id": "streamed"})
        httpx.get(url.removesuffix("/v1/completions") + "/health")
        settled(driver)
    assert answer.headers["x-request-id"] == "mine-7"
    assert len(odd.headers["x-request-id"]) == 32
    ours = {"mine-7", odd.headers["x-request-id"], "streamed"}  # a line of an earlier test may come late
    first, second, third = (record.fields for record in caplog.records if record.fields["id"] in ours)
    usage = answer.json()["usage"]
    assert (first["id"], first["status"], first["finish_reason"], first["output_tokens"]) == (
        "mine-7",
        200,
        "length",
        40,
    )
    assert first["tau"] == pytest.approx(usage["speculation"]["tokens_per_pass"], abs=1e-3)
    assert 0 < first["time_to_first_token_seconds"] <= first["seconds"]
    assert (second["status"], "output_tokens" in second) == (400, False)
    assert (third["id"], third["finish_reason"], third["output_tokens"]) == ("streamed", "length", 40)


def test_other_origins_only_where_they_are_named(server):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    none = httpx.options(server[0], headers=ask)
    assert "access-control-allow-origin" not in none.headers
    with serving(allow_origin=["https://a.example"], api_key=["k"]) as (url, _):
        good = httpx.options(url + "/v1/completions", headers=ask)
        assert good.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(url + "/v1/completions", headers={**ask, "origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = httpx.post(url + "/v1/completions", json=BODY, headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


@pytest.mark.parametrize("wrong", [{"allow_origin": ["a.example"]}, {"log_format": "xml"}, {"api_key": [" "]}])
def test_options_that_are_none(wrong):
    with pytest.raises(OutriderError, match=r"use|give|write"):
        Settings(**wrong)


# The process


@contextmanager
def process(port, *options):
    """A server of its own; what it logs is in the list that comes with it once it has ended."""
    command = [sys.executable, "-m", "outrider", "serve", "--target", embedded("nano"), "--proposer", "ngram"]
    command += ["--port", port, "--max-num-seqs", "2", "--dtype", "float32", "--log-format", "json", *options]
    server = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, text=True)
    logged = []
    try:
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                assert server.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
        yield server, logged
    finally:
        server.kill()
        logged += server.communicate()[1].splitlines()


@pytest.mark.slow
def test_killed_it_starts_clean_and_told_to_stop_it_ends_what_runs(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url, plan = f"http://127.0.0.1:{port}/v1/completions", tmp_path / "plan.json"
    body = {**BODY, "max_tokens": 400, "stream": True}
    with process(port, "--plan", plan) as (server, _), httpx.stream("POST", url, json=body, timeout=60) as answer:
        next(answer.iter_lines())
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
    assert not list(tmp_path.iterdir())
    with process(port, "--plan", plan) as (server, logged):
        with httpx.stream("POST", url, json=body, timeout=60, headers={"x-request-id": "last"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.wait(timeout=30) == 0
    assert json.loads(plan.read_text())["format"] == "outrider plan"
    told = [json.loads(line) for line in logged if line.startswith("{")]
    assert [each["output_tokens"] for each in told if each.get("id") == "last"] == [400]
