"""Speech targets of `outrider run`: `--source`, `--language`, `--task`, `--response-format` and previous text."""

import json
import re

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.serve.speech.formats import to_srt, to_verbose_document, to_vtt
from outrider.serve.speech.run import transcribe
from tests.helpers import tiny
from tests.helpers.speech import MULTILINGUAL, recording, save_whisper, save_with_timestamps, write_wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_whisper(tmp_path_factory.mktemp("speech"), **MULTILINGUAL)


@pytest.fixture
def file(tmp_path):
    return write_wav(tmp_path / "a.wav", recording(2))


def invoke(folder, *words):
    common = ("run", "--target", folder, "--proposer", "ngram", "--k", "4", "--max-tokens", "8")
    return CliRunner().invoke(app, [*map(str, common), "--dtype", "float32", "--threads", "1", *map(str, words)])


def test_transcript_equals_output_of_llm(folder, file):
    llm = LLM(folder, proposer="none", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=8)

    def expected(prompt):
        return llm.generate([prompt], params, sources=file)[0]

    for option in ("--source", "--source-file"):
        result = invoke(folder, "--json", option, file, "--language", "de")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["text"] == expected(llm.start_tokens("de")).text
        assert document["prompt_token_ids"] == list(llm.start_tokens("de"))
    translated = json.loads(
        invoke(folder, "--json", "--source", file, "--language", "de", "--task", "translate").stdout
    )
    assert translated["text"] == expected(llm.start_tokens("de", "translate")).text
    continued = json.loads(invoke(folder, "--json", "--source", file, "--language", "de", "ab").stdout)
    assert continued["text"] == expected(llm.encode("ab", language="de")).text


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """A model with timestamps."""
    return save_with_timestamps(tmp_path_factory.mktemp("speech"))


def test_transcripts_of_long_audio(timed, tmp_path):
    file = write_wav(tmp_path / "long.wav", recording(3, 40000), width=4)
    llm = LLM(timed, proposer="none", dtype="float32", threads=1)
    (expected,) = transcribe(llm, file, SamplingParams(max_tokens=8))
    plain = invoke(timed, "--source", file)
    assert plain.exit_code == 0, plain.output
    assert plain.stdout.removesuffix("\n") == expected.text.removesuffix("\n")
    assert f"language {expected.language} (detected); {len(expected.completions)} windows" in plain.stderr
    assert invoke(timed, "--source", file, "--response-format", "srt").stdout == to_srt(expected)
    assert invoke(timed, "--source", file, "--response-format", "vtt").stdout == to_vtt(expected)
    verbose = invoke(timed, "--source", file, "--response-format", "verbose_json").stdout
    assert json.loads(verbose) == to_verbose_document(expected)
    assert json.loads(verbose)["segments"]
    document = json.loads(invoke(timed, "--source", file, "--json").stdout)
    assert document["text"] == expected.text
    assert document["transcript"] == {**to_verbose_document(expected), "language_detected": True}
    assert len(document["completions"]) == len(expected.completions)


def test_previous_text(timed, tmp_path):
    file = write_wav(tmp_path / "long.wav", recording(3, 40000), width=4)
    llm = LLM(timed, proposer="none", dtype="float32", threads=1)
    options = {"language": "de", "prompt": "Mia", "condition_on_previous_text": True}
    (expected,) = transcribe(llm, file, SamplingParams(max_tokens=8), **options)
    words = ("--language", "de", "--previous-text", "Mia", "--condition-on-previous-text", "--json")
    document = json.loads(invoke(timed, "--source", file, *words).stdout)
    assert document["transcript"]["segments"] == to_verbose_document(expected)["segments"]
    assert document["prompt_token_ids"] == list(expected.completions[0].prompt_token_ids)


def test_transcript_is_not_cut_at_128_tokens(timed, file):
    """The default of --max-tokens is for texts."""
    words = ["run", "--target", timed, "--source", file, "--language", "en", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(app, [*map(str, words), "--proposer", "none", "--temperature", "0", "--threads", "1"])
    (completion,) = json.loads(result.stdout)["completions"]
    ends = completion["finish_reason"] == "stop" or len(completion["token_ids"]) == 128 - 4
    assert ends, result.output
    assert re.search(r"finish (stop|length)", result.stderr)


MISTAKES = {
    "no source": ((), "the target is a speech model; give it --source FILE.wav"),
    "previous text unknown": (
        ("--source", "FILE", "--language", "en", "--previous-text", "a"),
        "has no prev_sot_token_id",
    ),
    "format": (("--source", "FILE", "--response-format", "xml"), "--response-format is 'xml'; use json, text, srt"),
    "prompt and format": (
        ("--source", "FILE", "--language", "en", "--response-format", "srt", "a"),
        "a prompt begins one completion, and --response-format needs a transcript; leave the prompt out",
    ),
    "prompt and detection": (("--source", "FILE", "a"), "and detection of the language needs a transcript"),
    "prompt and long audio": (("--source", "LONG", "--language", "en", "a"), "and audio of more than 1 s needs a"),
    "stop": (
        ("--source", "FILE", "--language", "en", "--response-format", "text", "--stop", "a"),
        "stop is not supported in transcripts",
    ),
    "unknown language": (("--source", "FILE", "--language", "xx"), "language 'xx' is unknown to this model"),
    "unknown task": (("--source", "FILE", "--language", "en", "--task", "sing"), "task 'sing' is unknown"),
    "no file": (("--source", "nowhere.wav", "--language", "en"), "'nowhere.wav' cannot be read"),
    "text file": (("--source-file", "TEXT", "--language", "en"), "is no WAV file, which this speech target reads"),
    "damaged": (("--source-file", "DAMAGED", "--language", "en"), "is no WAV file of PCM samples"),
    "chat": (("--source", "FILE", "--chat"), "--chat does not support encoder-decoder targets"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(words, message, folder, file, tmp_path):
    text, damaged = tmp_path / "a.txt", tmp_path / "b.wav"
    text.write_text("some text")
    damaged.write_bytes(b"RIFF123")
    long = write_wav(tmp_path / "long.wav", recording(0, 20000))
    paths = {"LONG": long, "FILE": file, "TEXT": text, "DAMAGED": damaged}
    result = invoke(folder, *(paths.get(word, word) for word in words))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_targets_of_text_refuse_audio(file, tmp_path):
    bart = tiny.save(tmp_path / "bart", tiny.ENCODER_DECODER["bart"]())
    assert "is a WAV file, and this target is no speech model" in invoke(bart, "--source-file", file).output
    assert "language is for speech models" in invoke(bart, "--source", "a", "--language", "en").output
    llama = tiny.save(tmp_path / "llama", tiny.ATTENTION["llama"]())
    for words in (("--response-format", "srt"), ("--previous-text", "a"), ("--condition-on-previous-text",)):
        assert f"{words[0]} is for speech targets" in " ".join(invoke(bart, "--source", "a", *words).output.split())
    assert "source is for encoder-decoder models" in invoke(llama, "--source", "a.wav").output
    assert "is a WAV file, and this target is no speech model" in invoke(llama, "--source-file", file).output
    assert "language is for speech models" in invoke(llama, "--language", "en", "a").output
    assert "--language and --task are for speech targets" in invoke(llama, "--chat", "--task", "translate", "a").output
