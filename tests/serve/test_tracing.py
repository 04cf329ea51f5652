"""Tests of OpenTelemetry traces, with the SDK's exporter in memory. They are skipped without the SDK."""

import asyncio
import sys
from importlib.util import find_spec

import httpx
import pytest

from outrider import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.monitoring import tracing
from outrider.serve.settings import Settings

needs_sdk = pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.sdk") is None,
    reason='the OpenTelemetry SDK is missing: pip install "outrider[otel]"',
)
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def serve_requests(tracer, *requests):
    """Send requests at once to a server in this process, and return the responses and the engine."""
    llm = LLM(embedded("nano"), proposer="ngram", dtype="float32", max_model_len=128, k=2, max_num_seqs=4)
    async_llm = AsyncLLM(llm, max_queued_requests=8, max_num_seqs=4)
    app = make_app(async_llm, Settings(), name="nano", tracer=tracer)

    async def run():
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                return await asyncio.gather(
                    *(client.post(path, json=body, headers=headers) for path, body, headers in requests)
                )

    return asyncio.run(run()), llm.engine


@pytest.fixture(scope="module")
def traced():
    """Return the spans of two requests, one of which continues a trace, and of an invalid one."""
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = trace.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    tracer = tracing.Tracer(provider, rounds_per_trace=2)
    parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    responses, _ = serve_requests(
        tracer,
        ("/v1/completions", BODY, parent),
        ("/v1/completions", {**BODY, "stream": True}, {}),
        ("/v1/completions", {**BODY, "temperature": -1}, {}),
        ("/tokenize", {"prompt": "a"}, {}),
    )
    assert [response.status_code for response in responses] == [200, 200, 400, 200]
    assert not tracer._open
    return exporter.get_finished_spans()


def named(spans, name):
    return [span for span in spans if span.name == name]


@needs_sdk
def test_spans_of_requests(traced):
    requests = named(traced, "request")
    assert len(requests) == 3
    statuses = sorted(span.attributes["http.response.status_code"] for span in requests)
    assert statuses == [200, 200, 400]
    for span in requests:
        if span.attributes["http.response.status_code"] == 200:
            assert span.attributes["gen_ai.usage.output_tokens"] == 12
            assert span.attributes["gen_ai.usage.input_tokens"] > 0
            assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    (continued,) = [span for span in requests if span.parent]
    assert f"{continued.context.trace_id:032x}" == TRACE_ID
    assert f"{continued.parent.span_id:016x}" == PARENT_ID


@needs_sdk
def test_phases_of_requests_follow_one_another(traced):
    roots = {span.context.span_id: span for span in named(traced, "request")}
    for name in ("queue", "prefill", "decode"):
        assert len(named(traced, name)) == 2
    for queue in named(traced, "queue"):
        root = roots[queue.parent.span_id]
        (prefill,) = [each for each in named(traced, "prefill") if each.parent.span_id == root.context.span_id]
        (decode,) = [each for each in named(traced, "decode") if each.parent.span_id == root.context.span_id]
        assert root.start_time - 10**6 <= queue.start_time <= queue.end_time == prefill.start_time
        assert prefill.start_time < prefill.end_time == decode.start_time < decode.end_time
        assert decode.end_time <= root.end_time + 10**6


@needs_sdk
def test_sampled_rounds_have_phases(traced):
    rounds = named(traced, "round")
    assert rounds
    for span in rounds:
        children = [each for each in traced if each.parent and each.parent.span_id == span.context.span_id]
        draft, verify, commit = sorted(children, key=lambda each: each.start_time)
        assert (draft.name, verify.name, commit.name) == ("draft", "verify", "commit")
        assert span.start_time == draft.start_time
        assert draft.end_time == verify.start_time <= verify.end_time == commit.start_time
        assert commit.end_time == span.end_time
        assert len(span.links) == span.attributes["outrider.sequences"] - 1


def test_no_hook_without_a_tracer():
    (response,), engine = serve_requests(None, ("/v1/completions", {**BODY, "max_tokens": 2}, {}))
    assert response.status_code == 200
    assert engine.on_times is None


def test_missing_sdk_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(OutriderError, match=r"--otel needs .*pip install .outrider\[otel\]"):
        tracing.make_tracer()


@needs_sdk
def test_names_of_the_service(monkeypatch):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name, expected in ((None, "outrider"), ("mine", "mine")):
        if name:
            monkeypatch.setenv("OTEL_SERVICE_NAME", name)
        tracer = tracing.make_tracer()
        assert tracer._provider.resource.attributes["service.name"] == expected
        tracer.close()
