"""Failures of the engine, the model and the proposers: a failing request does not affect the others."""

import asyncio
import logging
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Scores
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.monitoring.drift import Drift
from outrider.serve.stream.request_stream import StreamContent
from tests.helpers.serving import (
    BODY,
    OPTIONS,
    OTHER_PROMPTS,
    PROMPT,
    expected_texts,
    metric_values,
    post_concurrently,
    serving,
    text_of,
    wait_until_idle,
)


def test_failed_round_ends_running_request_only(monkeypatch):
    with serving() as (url, async_llm):
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        expected = httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"]
        step = async_llm.engine.step
        calls = []

        def fail_third_step():
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("injected failure")
            return step()

        monkeypatch.setattr(async_llm.engine, "step", fail_third_step)
        failed = httpx.post(url + "/v1/completions", json=body)
        assert failed.status_code == 500
        assert "injected failure" in failed.json()["error"]["message"]
        wait_until_idle(async_llm)
        assert httpx.post(url + "/v1/completions", json=body).json()["choices"][0]["text"] == expected


def test_unexpected_exception_is_status_500(switching_server, monkeypatch):
    def fail(*_):
        raise KeyError("injected failure")

    monkeypatch.setattr("outrider.serve.handler.rename_param", fail)
    response = httpx.post(switching_server[0], json=BODY)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


@contextmanager
def changed_scores(async_llm, monkeypatch, change):
    """Replace the scores of the target by `change(batch, scores)`."""
    target = async_llm.parts.target
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
def test_failing_request_does_not_affect_others(switching_server, reference_llm, monkeypatch, failure, temperature):
    url, async_llm = switching_server

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


def test_decoding_error_does_not_affect_other_requests(switching_server, reference_llm, monkeypatch):
    url = switching_server[0]
    complete = LLM.completion

    def fail_for_user(llm, seq):
        if seq.request.params.scope:
            raise UnicodeError("injected failure")
        return complete(llm, seq)

    monkeypatch.setattr(LLM, "completion", fail_for_user)
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
            monkeypatch.setattr(Drift, "update", fail)
        elif failure == "engine":
            monkeypatch.setattr(async_llm.engine, "abort", fail)
            monkeypatch.setattr(async_llm.engine, "busy", fail)
        else:
            async_llm.cancel(map(fail, [None]))
        clients[1].start()
        for client in clients:
            client.join(60)
            assert not client.is_alive()
        failed = next(response for response in responses if response.status_code == 500)
        assert "injected failure" in failed.json()["error"]["message"]
        assert {response.status_code for response in responses} <= {500, 503}
        assert httpx.get(url + "/health").status_code == 503
        assert httpx.post(url + "/v1/completions", json=BODY).status_code == 503


def test_command_after_stop_is_answered():
    async_llm = AsyncLLM(LLM(**OPTIONS, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2)

    async def submit_and_stop():
        encoded = async_llm.codec.encode_with_source(PROMPT, None)
        (stream,) = async_llm.submit(encoded, SamplingParams(max_tokens=5), StreamContent.END)
        async_llm.stop()  # before the thread has read the command
        async_llm.start()
        async for chunks in stream.chunks():
            assert "the server stops" in chunks[-1].error

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
        assert async_llm.parts.isolated[0].failures
        assert not async_llm.failed_rounds
        assert 'outrider_proposer_failures_total{proposer="own#1"}' in httpx.get(url + "/metrics").text


class AlwaysFailingProposer(NgramProposer):
    """Raises in every call of `propose`."""

    def propose(self, batch):
        raise RuntimeError("injected failure")


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
        target = async_llm.parts.target
        score = target.score

        def reject_drafts(batch, draft, first=-1):
            if draft.size:
                raise OutriderError("this verifier takes chains only")
            return score(batch, draft, first)

        monkeypatch.setattr(target, "score", reject_drafts)
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
