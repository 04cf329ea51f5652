"""The routes /v1/audio/transcriptions and /v1/audio/translations."""

import io

import openai
import pytest
from fastapi.testclient import TestClient

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.settings import Settings
from outrider.serve.speech.formats import to_srt, to_verbose_document, to_vtt
from outrider.serve.speech.run import transcribe
from tests.helpers import tiny
from tests.helpers.speech import MULTILINGUAL, recording, save_whisper, write_wav

pytest.importorskip("python_multipart")
OPTIONS = {"proposer": "ngram", "k": 4, "dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 64}
PATH = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
GRANULARITIES = "timestamp_granularities[]"


def client_of(folder, **settings):
    llm = AsyncLLM(LLM(folder, max_num_seqs=4, **OPTIONS), max_queued_requests=8, max_num_seqs=4)
    return TestClient(make_app(llm, Settings(max_queued_requests=8, **settings), name="tiny"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_whisper(tmp_path_factory.mktemp("speech"), **MULTILINGUAL)


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
    "unknown language": ({"language": "xx"}, "language", "language 'xx' is unknown to this model"),
    "unknown task": ({"task": "sing"}, "task", "task 'sing' is unknown to this model"),
    "format": ({"response_format": "xml"}, "response_format", "use 'json', 'text', 'srt'"),
    "stream": ({"stream": "true"}, "stream", "use "),
    "temperature": ({"temperature": "-1"}, "temperature", "use a number of at least 0"),
    "unknown field": ({"logprobs": "1"}, "logprobs", "logprobs is no field of this route; leave it out"),
    "words": (
        {GRANULARITIES: ["segment", "word"], "response_format": "verbose_json"},
        GRANULARITIES,
        "timestamps of words are not supported; use segment",
    ),
    "granularity": ({GRANULARITIES: "line"}, GRANULARITIES, "is 'line'; use segment"),
    "granularity without segments": ({GRANULARITIES: "segment"}, GRANULARITIES, "needs response_format verbose_json"),
    "no previous text": ({"prompt": "a"}, "prompt", "has no prev_sot_token_id"),
}


@pytest.mark.parametrize(("fields", "param", "message"), INVALID.values(), ids=INVALID)
def test_invalid_requests(fields, param, message, client, wav):
    fields = {"wav": wav, **fields}
    reply = post(client, fields.pop("wav"), **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert message in reply.json()["error"]["message"]


def test_other_mistakes(client, wav):
    assert post(client, wav, model="other").status_code == 404
    no_form = client.post(PATH, json={"file": "a.wav"})
    assert no_form.status_code == 400
    assert "file is missing; send a form" in no_form.json()["error"]["message"]
    assert post(client, wav).status_code == 200


@pytest.fixture(scope="module")
def timed_client(timed_whisper):
    with client_of(timed_whisper) as client:
        yield client


@pytest.fixture(scope="module")
def timed_llm(timed_whisper):
    return LLM(timed_whisper, max_num_seqs=4, **OPTIONS)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """The path of a recording of several windows."""
    return write_wav(tmp_path_factory.mktemp("wav") / "long.wav", recording(3, 40000))


def test_formats_of_long_audio(timed_client, timed_llm, long):
    params = SamplingParams(max_tokens=12)
    (expected,) = transcribe(timed_llm, long, params, language="de")
    data = long.read_bytes()
    assert len(expected.completions) > 2
    reply = post(timed_client, data).json()
    assert (reply["text"], reply["language"]) == (expected.text.strip(), "german")
    assert reply["usage"]["output_tokens"] == sum(len(each.token_ids) for each in expected.completions)
    assert reply["usage"]["speculation"]["draft_tokens"] > 0
    verbose = post(timed_client, data, response_format="verbose_json", **{GRANULARITIES: "segment"}).json()
    del verbose["usage"]
    assert verbose == to_verbose_document(expected)
    assert verbose["segments"][-1]["seek"] > 0
    srt = post(timed_client, data, response_format="srt")
    assert srt.text == to_srt(expected)
    assert srt.headers["content-type"].startswith("text/plain")
    vtt = post(timed_client, data, response_format="vtt")
    assert vtt.text == to_vtt(expected)
    assert vtt.headers["content-type"].startswith("text/vtt")


def test_prompt_and_previous_text(timed_client, timed_llm, long):
    options = {"language": "de", "prompt": "Mia", "condition_on_previous_text": True}
    (expected,) = transcribe(timed_llm, long, SamplingParams(max_tokens=12), **options)
    fields = {"prompt": "Mia", "condition_on_previous_text": "true", "response_format": "verbose_json"}
    reply = post(timed_client, long.read_bytes(), **fields).json()
    assert reply["segments"] == to_verbose_document(expected)["segments"]
    (other,) = transcribe(timed_llm, long, SamplingParams(max_tokens=12), language="de")
    assert other.segments != expected.segments


def test_detected_language_is_reported(timed_client, timed_llm, long, wav, tmp_path):
    names = {"de": "german", "en": "english"}
    file = tmp_path / "short.wav"
    file.write_bytes(wav)
    for path in (long, file):
        (expected,) = transcribe(timed_llm, path, SamplingParams(max_tokens=12))
        reply = post(timed_client, path.read_bytes(), language="").json()
        assert (reply["text"], reply["language"]) == (expected.text.strip(), names[expected.language])


def test_translations(timed_client, timed_llm, long):
    (expected,) = transcribe(timed_llm, long, SamplingParams(max_tokens=12), language="de", task="translate")
    fields = {"language": "de", "max_tokens": "12", "response_format": "verbose_json"}
    files = {"file": ("a.wav", long.read_bytes(), "audio/wav")}
    reply = timed_client.post(TRANSLATIONS, files=files, data=fields).json()
    assert reply["segments"] == to_verbose_document(expected)["segments"]
    assert (reply["task"], reply["language"], reply["source_language"]) == ("translate", "english", "german")
    text = timed_client.post(TRANSLATIONS, files=files, data={"prompt": "Mia", "max_tokens": "12"}).json()["text"]
    (prompted,) = transcribe(timed_llm, long, SamplingParams(max_tokens=12), task="translate", prompt="Mia")
    assert text == prompted.text.strip()
    for field, value in (("task", "transcribe"), (GRANULARITIES, "segment")):
        refused = timed_client.post(TRANSLATIONS, files=files, data={field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field


def test_client_of_openai_reads_segments(timed_client, long):
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="any", http_client=timed_client, max_retries=0)
    reply = api.audio.transcriptions.create(
        file=("a.wav", long.read_bytes()),
        model="tiny",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
        extra_body={"max_tokens": 12},
    )
    assert reply.duration == 2.5
    assert reply.segments[0].seek == 0 < reply.segments[-1].seek < 250


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
        for path in (PATH, TRANSLATIONS):
            reply = client.post(path, files={"file": ("a.wav", wav, "audio/wav")})
            assert reply.status_code == 404
            assert "this server transcribes no audio" in reply.json()["error"]["message"]
