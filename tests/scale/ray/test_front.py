"""Tests of the front with replicas of the test, without Ray."""

import asyncio
import json
import pickle

import httpx
import pytest

from outrider.scale.ray import front as module
from outrider.scale.ray.bridge import ResponsePart, ResponseStart
from outrider.scale.ray.front import Front
from outrider.serve.api_keys import ApiKey, Quota, digest_of
from outrider.serve.settings import Settings

JSON = ((b"content-type", b"application/json"), (b"x-request-id", b"of the replica"))
EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class Lost(Exception):
    """What Ray raises if a replica is gone."""


class NoReplica(Exception):
    """What Ray raises if a broadcast reaches no replica."""


class Parts:
    """A stream of results of a replica. An exception in it is raised."""

    def __init__(self, parts):
        self._parts = iter(parts)
        self.canceled = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        part = next(self._parts, None)
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        return part

    def cancel(self):
        self.canceled = True


class Engine:
    """A deployment handle that gives prepared responses."""

    def __init__(self, *responses):
        self._responses = [Parts(each) for each in responses]
        self.sent = []
        self.requests = []

    def options(self, *, stream, **_):
        assert stream
        return self

    @property
    def respond(self):
        return self

    def remote(self, request):
        self.requests.append(request)
        self.sent.append(self._responses[len(self.sent)])
        return self.sent[-1]


@pytest.fixture(autouse=True)
def lost(monkeypatch):
    monkeypatch.setattr(module, "lost_actor_errors", lambda: (Lost,))
    monkeypatch.setattr(module, "no_replica_errors", lambda: (NoReplica,))
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)


def ask(engine, *keys, api_keys=(), headers=()):
    """Send a request with each key. Return the responses."""
    app = Front(engine, Settings(), api_keys).__serve_build_asgi_app__()

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            responses = []
            for key in keys:
                all_headers = {"authorization": f"Bearer {key}", **dict(headers)}
                responses.append(await client.post("/v1/completions", json={"prompt": "x"}, headers=all_headers))
            return responses

    return asyncio.run(run())


def document(prompt_tokens, output_tokens):
    return [start(JSON, b"{}", prompt_tokens, output_tokens)]


def start(headers, *part):
    return ResponseStart(status=200, headers=headers, first=ResponsePart(*part))


def test_tokens_of_all_replicas_are_charged_at_the_front():
    keys = [ApiKey.of("a", name="team-a", tokens_per_minute=10), ApiKey.of("b", name="team-b")]
    stream = [start(EVENTS, b"1", 0, 3), ResponsePart(b"2", 5, 6)]
    engine = Engine(document(4, 5), stream, document(4, 5))
    responses = ask(engine, "a", "a", "a", "wrong", "b", api_keys=keys)
    assert [each.status_code for each in responses] == [200, 200, 429, 401, 200]
    # 10 - 9 = 1 is above 0, so that the stream is accepted; then 1 - 11 = -10.
    assert "the key 'team-a' has used its 10 tokens per minute" in responses[2].json()["error"]["message"]
    assert int(responses[2].headers["retry-after"]) in range(60, 68)
    assert responses[1].text == "12"


def test_a_stream_that_breaks_is_charged_for_what_it_sent():
    key = ApiKey(name="team-a", digest=digest_of(b"a"), quota=Quota(1000, clock=lambda: 0.0))
    parts = [start(EVENTS, b"1", 0, 3), ResponsePart(b"2", 0, 400), Lost()]
    (response,) = ask(Engine(parts), "a", api_keys=[key])
    assert "the replica that generated this stream was lost" in response.text
    key.quota.charge(599)
    assert not key.quota.wait_seconds()
    key.quota.charge(1)
    assert key.quota.wait_seconds()


def test_a_request_whose_replica_is_lost_is_sent_again():
    engine = Engine([Lost()], [start(JSON, b"{", 0, 1), Lost()], document(1, 1))
    (response,) = ask(engine, "any")
    assert response.status_code == 200
    assert len(engine.sent) == 3


def test_front_and_replicas_log_one_id():
    engine = Engine(document(1, 1), document(1, 1))
    ask(engine, "secret", headers={"x-request-id": "mine"})
    (response,) = ask(engine, "secret")
    first, second = (dict(request.headers) for request in engine.requests)
    assert first[b"x-request-id"] == b"mine"
    assert response.headers.get_list("x-request-id") == [second[b"x-request-id"].decode()]
    assert not any(b"secret" in value for value in (*first.values(), *second.values()))


class Replicas:
    """A deployment handle whose broadcasts have prepared results: the states of all replicas, or an exception."""

    def __init__(self, *results):
        self._results = iter(results)

    def options(self, **_):
        return self

    def broadcast(self, method):
        return self

    async def results_async(self, *, timeout_s, return_exceptions):
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result


def get(path, *results):
    """Get a page of the front once for each result of a broadcast. Return status codes and contents."""
    app = Front(Replicas(*results), Settings(), ()).__serve_build_asgi_app__()

    async def run():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return [await client.get(path) for _ in results]

    return [(each.status_code, each.content) for each in asyncio.run(run())]


def test_health_says_loading_until_the_first_replica_answers():
    pages = get("/health", NoReplica(), [], [("", ())], [("", ()), ("broken", ())], NoReplica())
    assert [status for status, _ in pages] == [503, 503, 200, 200, 503]
    states = [json.loads(content) for _, content in pages]
    assert [each.get("status") for each in states] == ["loading", "loading", "ok", "degraded", None]
    assert states[-1]["error"]["message"] == "no replica works"


def test_metrics_are_empty_without_replicas():
    assert get("/metrics", NoReplica()) == [(200, b"")]


def test_a_quota_that_is_sent_to_the_front_is_full():
    quota = Quota(60, clock=clock)
    quota.charge(1000)
    copy = pickle.loads(pickle.dumps(quota))
    assert (quota.wait_seconds() > 0, copy.wait_seconds()) == (True, 0)
    assert copy.tokens_per_minute == 60


def clock():
    return 0.0
