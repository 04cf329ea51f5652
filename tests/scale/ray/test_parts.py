"""Tests of the parts of `outrider.scale.ray` that run without Ray."""

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.scale.ray.application import check_settings
from outrider.scale.ray.bridge import HTTPRequest, ResponseStart, respond
from outrider.scale.ray.metrics import sum_metrics
from outrider.scale.ray.package import import_ray
from outrider.scale.ray.prefixes import PrefixTable, prefix_blocks
from outrider.scale.ray.rollouts import RolloutPool, RolloutWorker
from outrider.scale.ray.settings import ScaleSettings
from outrider.serve.monitoring.request_log import RequestLog, entry_of
from outrider.serve.settings import Settings
from outrider.train.rl.rollout import RolloutEngine, samples_of
from tests.helpers.commands import invoke

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def body(**fields):
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"media": "@media"}, "--media makes videos in one process"),
        ({"weight_updates": Path("weights")}, "--weight-updates would change one replica"),
    ],
)
def test_options_of_serve_that_replicas_do_not_support(options, message):
    with pytest.raises(OutriderError, match=message):
        check_settings(Settings(**options))


def test_equal_prefixes_have_equal_blocks():
    first, second = prefix_blocks(body(prompt=TEXT + "a")), prefix_blocks(body(prompt=TEXT[:600] + "another end" * 50))
    assert len(first) == len(TEXT) // 256
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert prefix_blocks(body(prompt=TEXT, user="b"))[0] != first[0]
    chat = [{"role": "system", "content": TEXT}, {"role": "user", "content": "one"}]
    other = [chat[0], {"role": "user", "content": "two"}]
    one, two = (prefix_blocks(body(messages=messages)) for messages in (chat, other))
    assert one[:6] == two[:6]
    assert len(prefix_blocks(body(prompt=list(range(200))))) == 3


@pytest.mark.parametrize("request_body", [b"", b"no json", b"[1]", b'{"prompt": 5}', b'{"prompt": null}', b'{"a": 1}'])
def test_other_bodies_have_no_blocks(request_body):
    assert prefix_blocks(request_body) == ()


def test_prefix_table():
    table = PrefixTable(size=4)
    table.add([1, 2, 3], "a")
    table.add([1, 2], "b")
    assert table.matches([1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert table.matches([5, 1]) == {}
    table.forget("a")
    assert table.matches([1, 2, 3]) == {"b": 2}
    table.add([7, 8, 9], "c")
    assert table.matches([1, 2]) == {}  # blocks that were used least recently are forgotten
    assert table.matches([7]) == {"c": 1}


def make_app():
    app = FastAPI()
    app.add_middleware(RequestLog)
    seen = {}

    @app.post("/echo")
    async def echo(request: Request):
        return {"body": (await request.body()).decode(), "query": request.query_params["a"]}

    @app.get("/stream")
    async def stream(request: Request):
        async def events():
            for text in ("one", "two", "three"):
                if text == "three":
                    await asyncio.sleep(0.01)
                entry_of(request.scope).add_tokens(3)
                yield text
            assert (await request.receive())["type"] == "http.disconnect"
            seen["disconnected"] = True

        return StreamingResponse(events())

    return app, seen


def test_bridge_carries_requests_and_streams():
    app, seen = make_app()

    async def run():
        headers = ((b"content-type", b"text/plain"),)
        request = HTTPRequest(method="POST", path="/echo", query=b"a=5", headers=headers, body=b"hello")
        (start,) = [part async for part in respond(app, request)]
        assert isinstance(start, ResponseStart)
        assert start.status == 200
        assert not start.is_event_stream
        assert json.loads(start.first.body) == {"body": "hello", "query": "5"}
        stream = respond(app, HTTPRequest(method="GET", path="/stream", query=b"", headers=(), body=b""))
        assert (await anext(stream)).first == (b"onetwo", 0, 6)  # what is ready is one part
        assert await anext(stream) == (b"three", 0, 9)
        await stream.aclose()

    asyncio.run(run())
    assert seen == {"disconnected": True}


def test_bridge_splits_large_bodies_and_carries_empty_ones():
    size = (5 << 20) + 1

    async def app(scope, receive, send):
        body = b"x" * (size if scope["path"] == "/large" else 0)
        await send({"type": "http.response.start", "status": 200 if body else 204, "headers": ()})
        await send({"type": "http.response.body", "body": body})

    async def run(path):
        request = HTTPRequest(method="GET", path=path, query=b"", headers=(), body=b"")
        return [part async for part in respond(RequestLog(app), request)]

    start, *parts = asyncio.run(run("/large"))
    sizes = [len(part.body) for part in (start.first, *parts)]
    assert (sum(sizes), max(sizes)) == (size, 1 << 20)
    (start,) = asyncio.run(run("/empty"))
    assert (start.status, start.first.body) == (204, b"")


def test_metrics_are_summed():
    texts = {
        name: f"""# HELP outrider_output_tokens_total Output tokens
# TYPE outrider_output_tokens_total counter
outrider_output_tokens_total {tokens}
# HELP outrider_num_requests_running Running
# TYPE outrider_num_requests_running gauge
outrider_num_requests_running 2.0
# HELP outrider_tokens_per_pass tau
# TYPE outrider_tokens_per_pass gauge
outrider_tokens_per_pass {tokens / 10}
# HELP outrider_e2e Seconds
# TYPE outrider_e2e histogram
outrider_e2e_bucket{{le="1.0"}} 1.0
outrider_e2e_bucket{{le="+Inf"}} 2.0
outrider_e2e_count 2.0
outrider_e2e_sum 3.0
"""
        for name, tokens in (("a", 10.0), ("b", 20.0))
    }
    lines = sum_metrics(texts).decode().splitlines()
    for line in (
        "outrider_output_tokens_total 30.0",
        "outrider_num_requests_running 4.0",
        'outrider_tokens_per_pass{replica="a"} 1.0',
        'outrider_tokens_per_pass{replica="b"} 2.0',
        'outrider_e2e_bucket{le="+Inf"} 4.0',
        "outrider_e2e_sum 6.0",
    ):
        assert line in lines
    assert sum_metrics({}) == b""


def test_settings_are_checked():
    with pytest.raises(OutriderError, match="--max-replicas is 1, and --replicas is 2"):
        ScaleSettings(replicas=2, max_replicas=1)
    with pytest.raises(OutriderError, match="--target-requests is 0"):
        ScaleSettings(target_requests=0.0)


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OutriderError, match=r'Ray is not installed; run pip install "outrider\[ray\]"'):
        import_ray()
    with pytest.raises(OutriderError, match="Ray is not installed"):
        RolloutPool(embedded("nano"), workers=2)
    result = invoke("scale")
    assert result.exit_code == 2
    assert 'Ray is not installed; run pip install "outrider[ray]"' in result.output


@pytest.mark.filterwarnings("ignore")  # of Ray
@pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "outrider[ray]"')
def test_settings_that_do_not_support_replicas(tmp_path):
    from outrider.scale.ray.application import build_application
    from outrider.serve.settings import Settings

    with pytest.raises(OutriderError, match="a replica is one process, and tp is 2"):
        build_application(Settings(engine=EngineConfig(tp=2)), ScaleSettings(), name="x")
    with pytest.raises(OutriderError, match="--weight-updates would change one replica only"):
        build_application(Settings(weight_updates=str(tmp_path)), ScaleSettings(), name="x")


OPTIONS = {"proposer": "ngram", "k": 3, "dtype": "float32", "max_model_len": 128, "threads": 1}
PROMPTS = ["def add(a, b):", "The cat sat"]
PARAMS = SamplingParams(temperature=1.0, max_tokens=24)


def test_worker_samples_what_an_engine_samples():
    expected = RolloutEngine.load(embedded("nano"), max_num_seqs=4, **OPTIONS).generate(PROMPTS, PARAMS, n=3, seed=7)
    worker = RolloutWorker(str(embedded("nano")), {"max_num_seqs": 4, **OPTIONS})
    samples = samples_of(worker.encode(PROMPTS), 3, 7)
    first = worker.run(samples[:4], PARAMS)
    worker.drop([(samples[0].prompt, samples[0].sample), (99, 0)])
    done = {(each.prompt, each.sample): each for each in first.finished}
    waiting = [samples[0], *samples[4:]] if (0, 0) not in done else samples[4:]
    for _ in range(20):
        progress = worker.run(waiting, PARAMS)
        waiting = []
        done |= {(each.prompt, each.sample): each for each in progress.finished}
    assert not progress.lengths
    for rollout in expected.rollouts:
        other = done[rollout.prompt, rollout.sample]
        assert other.token_ids == rollout.token_ids
        assert other.logprobs == rollout.logprobs
