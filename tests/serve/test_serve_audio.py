"""The route /v1/audio/transcriptions."""

from __future__ import annotations

import io

import openai
import pytest
from fastapi.testclient import TestClient

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from tests.helpers import tiny
from tests.helpers.speech import MULTILINGUAL, recording, set_generation, write_wav

pytest.importorskip("python_multipart")
OPTIONS = {"proposer": "ngram", "k": 4, "dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 64}
PATH = "/v1/audio/transcriptions"


def client_of(folder, **settings):
    llm = AsyncLLM(LLM(folder, max_num_seqs=4, **OPTIONS), max_queued_requests=8, max_num_seqs=4)
    return TestClient(make_app(llm, Settings(max_num_seqs=4, max_queued_requests=8, **settings), name="tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return set_generation(tiny.save(tmp_path_factory.mktemp("speech"), tiny.SPEECH["whisper"]()), **MULTILINGUAL)


@pytest.fixture(scope="module")
def client(folder):
    with client_of(folder) as client:
        yield client


@pytest.fixture(scope="module")
def reference_llm(folder):
    return LLM(folder, max_num_seqs=4, **OPTIONS)


@pytest.fixture(scope="module")
def wav(tmp_path_factory):
    """The content of a recording."""
    return write_wav(tmp_path_factory.mktemp("wav") / "a.wav", recording(2)).read_bytes()


@pytest.fixture(scope="module")
def expected(reference_llm, tmp_path_factory, wav):
    """A function that returns the completion of `LLM`."""
    file = tmp_path_factory.mktemp("wav") / "a.wav"
    file.write_bytes(wav)

    def complete(*start, **params):
        prompt = reference_llm.start_tokens(*start)
        return reference_llm.generate([prompt], SamplingParams(**{"max_tokens": 12, **params}), sources=file)[0]

    return complete


def post(client, wav, **fields):
    files = {} if wav is None else {"file": ("a.wav", wav, "audio/wav")}
    data = {"language": "de", "max_tokens": "12", **fields}
    return client.post(PATH, files=files or {"other": ("a.wav", b"x")}, data={k: v for k, v in data.items() if v})


def test_transcript_equals_output_of_llm(client, expected, wav):
    reply = post(client, wav)
    assert reply.status_code == 200, reply.text
    completion = expected("de")
    assert completion.text.strip()
    assert reply.json()["text"] == completion.text.strip()
    usage = reply.json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (4, len(completion.token_ids))
    assert usage["speculation"]["target_passes"] == completion.stats.passes
    text = post(client, wav, response_format="text")
    assert text.headers["content-type"].startswith("text/plain")
    assert text.text == completion.text.strip() + "\n"
    assert post(client, wav, task="translate").json()["text"] == expected("de", "translate").text.strip()
    sampled = post(client, wav, temperature="0.9", seed="7").json()["text"]
    assert sampled == expected("de", temperature=0.9, seed=7).text.strip()


def test_client_of_openai(client, expected, wav):
    # Closing the client of OpenAI would close the one of the test.
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="any", http_client=client, max_retries=0)
    options = {"model": "tiny", "language": "de", "extra_body": {"max_tokens": 12}}
    reply = api.audio.transcriptions.create(file=("a.wav", io.BytesIO(wav)), **options)
    assert reply.text == expected("de").text.strip()
    text = api.audio.transcriptions.create(file=("a.wav", wav), response_format="text", **options)
    assert text.strip() == reply.text


INVALID = {
    "no file": ({"wav": None}, "other", "send the audio as file"),
    "no audio": ({"wav": b"text"}, "file", "a.wav is no WAV file of PCM samples"),
    "no language": ({"language": ""}, "language", "give the language of the audio: de, en"),
    "unknown language": ({"language": "xx"}, "language", "language 'xx' is unknown to this model"),
    "unknown task": ({"task": "sing"}, "task", "task 'sing' is unknown to this model"),
    "format": ({"response_format": "srt"}, "response_format", "Input should be 'json' or 'text'"),
    "stream": ({"stream": "true"}, "stream", "Input should be"),
    "temperature": ({"temperature": "-1"}, "temperature", "greater than or equal to 0"),
    "unknown field": ({"prompt": "a"}, "prompt", "Extra inputs are not permitted"),
}


@pytest.mark.parametrize(("fields", "param", "message"), INVALID.values(), ids=INVALID)
def test_invalid_requests(fields, param, message, client, wav):
    fields = {"wav": wav, **fields}
    reply = post(client, fields.pop("wav"), **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert message in reply.json()["error"]["message"]


def test_other_mistakes(client, wav, tmp_path):
    assert post(client, wav, model="other").status_code == 404
    no_form = client.post(PATH, json={"file": "a.wav"})
    assert no_form.status_code == 400
    assert "file is missing; send a form" in no_form.json()["error"]["message"]
    long = write_wav(tmp_path / "long.wav", recording(0, 20000)).read_bytes()
    assert "the audio is 1.2 s long, and the encoder takes 1 s" in post(client, long).json()["error"]["message"]
    assert post(client, wav).status_code == 200


def test_files_of_the_server_are_not_read(client, tmp_path):
    """A path in a request for a completion is not opened."""
    file = write_wav(tmp_path / "secret.wav", recording(0))
    for source in (str(file), [1, 2]):
        reply = client.post("/v1/completions", json={"source": source, "max_tokens": 4})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "source"
        assert "send a file to /v1/audio/transcriptions" in reply.json()["error"]["message"]


def test_large_files_are_rejected(folder, wav):
    with client_of(folder, max_body_kb=4) as client:
        assert post(client, wav).status_code == 413


def test_target_of_text_transcribes_nothing(tmp_path, wav):
    with client_of(tiny.save(tmp_path, tiny.ATTENTION["llama"]())) as client:
        reply = post(client, wav)
        assert reply.status_code == 404
        assert "this server transcribes no audio" in reply.json()["error"]["message"]
