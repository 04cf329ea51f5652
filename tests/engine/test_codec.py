"""The text codec, and how often a request uses it."""

from collections import Counter

import pytest
from starlette.testclient import TestClient

from outrider.cli.options import PromptOptions
from outrider.cli.output import Output
from outrider.cli.run import converse
from outrider.cli.source import SourceOptions
from outrider.core.params import SamplingParams
from outrider.engine.codec import TextCodec
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from tests.helpers.configured import with_engine

PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm():
    return LLM(embedded("nano"), proposer="none", k=0, max_num_seqs=2, max_model_len=64, threads=1)


@pytest.fixture
def calls(monkeypatch):
    counter = Counter()
    for name in ("encode", "check_source"):
        original = getattr(TextCodec, name)

        def counted(self, *args, _original=original, _name=name, **options):
            counter[_name] += 1
            return _original(self, *args, **options)

        monkeypatch.setattr(TextCodec, name, counted)
    return counter


def run(llm, prompt):
    output = Output(llm, show=False, as_json=False)
    converse(llm, PARAMS, prompts=PromptOptions(prompt=prompt), options=SourceOptions(), output=output)


def post(llm, prompt):
    server = AsyncLLM(llm, max_queued_requests=1, max_num_seqs=2)
    with TestClient(make_app(server, with_engine(Settings, max_num_seqs=2), name="tiny")) as client:
        assert client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize(
    "complete",
    [lambda llm, prompt: llm.generate(prompt, PARAMS), lambda llm, prompt: list(llm.stream(prompt, PARAMS)), run, post],
    ids=["generate", "stream", "run", "serve"],
)
def test_a_request_is_encoded_and_checked_once(llm, calls, complete):
    complete(llm, "def add(a, b):")
    assert calls == {"encode": 1, "check_source": 1}
