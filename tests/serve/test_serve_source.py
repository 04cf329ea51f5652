"""The field `source` of /v1/completions."""

import json

import pytest
from fastapi.testclient import TestClient

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from tests.helpers import tiny

OPTIONS = {"proposer": "ngram", "k": 4, "dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 64}
SOURCE = "a b c a b c"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "bart": tiny.save(root / "bart", tiny.ENCODER_DECODER["bart"]()),
        "llama": tiny.save(root / "llama", tiny.ATTENTION["llama"]()),
    }


def client_of(folder):
    llm = AsyncLLM(LLM(folder, max_num_seqs=4, **OPTIONS), max_queued_requests=8, max_num_seqs=4)
    return TestClient(make_app(llm, Settings(max_queued_requests=8), name="tiny"))


@pytest.fixture(scope="module")
def client(folders):
    with client_of(folders["bart"]) as client:
        yield client


@pytest.fixture(scope="module")
def reference_llm(folders):
    return LLM(folders["bart"], max_num_seqs=4, **OPTIONS)


def post(client, **body):
    return client.post("/v1/completions", json={"max_tokens": 8, "temperature": 0, "ignore_eos": True} | body)


def texts(reply):
    assert reply.status_code == 200, reply.text
    return [choice["text"] for choice in reply.json()["choices"]]


def test_sources_equal_output_of_llm(client, reference_llm):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    ids = reference_llm.encode_source(SOURCE)
    expected = [each.text for each in reference_llm.generate(sources=[SOURCE, "x"], params=params)]
    assert texts(post(client, source=SOURCE)) == expected[:1]
    assert texts(post(client, source=list(ids))) == expected[:1]
    assert post(client, source=SOURCE).json()["usage"]["prompt_tokens"] == len(ids) + len(reference_llm.start_tokens())
    assert texts(post(client, source=[SOURCE, "x"])) == expected
    (continued,) = reference_llm.generate("ab", params, sources=[SOURCE])
    assert texts(post(client, source=SOURCE, prompt="ab")) == [continued.text]
    assert texts(post(client, source=[SOURCE, "x"], prompt=[list(reference_llm.encode("ab")), [0]])) == [
        continued.text,
        expected[1],
    ]


def test_stream_with_source(client):
    whole = texts(post(client, source=SOURCE))[0]
    lines = [line for line in post(client, source=SOURCE, stream=True).text.splitlines() if line.startswith("data: {")]
    assert "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines) == whole


INVALID = {
    "no source": ({"prompt": "a"}, "source", "source is missing"),
    "nothing": ({}, "prompt", "prompt is missing"),
    "empty source": ({"source": ""}, "source", "source is empty"),
    "empty list": ({"source": []}, "source", "source is an empty list"),
    "too long": ({"source": "a" * 200}, "source", "source is 200 tokens long, and the encoder takes 128"),
    "too few": ({"source": ["a"], "prompt": ["a", "b"]}, "source", "source has 1 sources for 2 prompts"),
    "unknown token": ({"source": [9999]}, "source", "token id 9999 is not in the vocabulary"),
    "not text": ({"source": 5}, "source", "source"),
}


@pytest.mark.parametrize(("body", "param", "message"), INVALID.values(), ids=INVALID)
def test_invalid_source(body, param, message, client):
    reply = post(client, **body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_chat_is_refused(client):
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}]})
    assert reply.status_code == 400
    assert "takes a source and no conversation" in reply.json()["error"]["message"]


def test_decoder_only_target_refuses_a_source(folders):
    with client_of(folders["llama"]) as client:
        for body in ({"source": "a"}, {"source": "a", "prompt": "a"}):
            reply = post(client, **body)
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == "source"
            assert "source is for encoder-decoder models" in reply.json()["error"]["message"]
        assert len(texts(post(client, prompt="a"))) == 1
