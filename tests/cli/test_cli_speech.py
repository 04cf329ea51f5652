"""Speech targets of `outrider run`: `--source`, `--source-file`, `--language` and `--task`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from tests.helpers import tiny
from tests.helpers.speech import MULTILINGUAL, recording, set_generation, write_wav


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return set_generation(tiny.save(tmp_path_factory.mktemp("speech"), tiny.SPEECH["whisper"]()), **MULTILINGUAL)


@pytest.fixture
def file(tmp_path):
    return write_wav(tmp_path / "a.wav", recording(2))


def invoke(folder, *words):
    common = ("run", "--target", folder, "--proposer", "ngram", "--k", "4", "--max-tokens", "8", "--ignore-eos")
    return CliRunner().invoke(app, [*map(str, common), "--dtype", "float32", "--threads", "1", *map(str, words)])


def test_transcript_equals_output_of_llm(folder, file):
    llm = LLM(folder, proposer="none", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def expected(prompt):
        return llm.generate([prompt], params, sources=file)[0]

    for option in ("--source", "--source-file"):
        result = invoke(folder, "--json", option, file, "--language", "de")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["text"] == expected(llm.start_tokens("de")).text
        assert document["prompt_tokens"] == list(llm.start_tokens("de"))
    translated = json.loads(
        invoke(folder, "--json", "--source", file, "--language", "de", "--task", "translate").stdout
    )
    assert translated["text"] == expected(llm.start_tokens("de", "translate")).text
    continued = json.loads(invoke(folder, "--json", "--source", file, "--language", "de", "ab").stdout)
    assert continued["text"] == expected(llm.encode("ab", language="de")).text


MISTAKES = {
    "no source": ((), "the target is a speech model; give it --source FILE.wav"),
    "no language": (("--source", "FILE"), "transcribes several languages; give the language of the audio: de, en"),
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
    paths = {"FILE": file, "TEXT": text, "DAMAGED": damaged}
    result = invoke(folder, *(paths.get(word, word) for word in words))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_targets_of_text_refuse_audio(file, tmp_path):
    bart = tiny.save(tmp_path / "bart", tiny.ENCODER_DECODER["bart"]())
    assert "is a WAV file, and this target is no speech model" in invoke(bart, "--source-file", file).output
    assert "language is for speech models" in invoke(bart, "--source", "a", "--language", "en").output
    llama = tiny.save(tmp_path / "llama", tiny.ATTENTION["llama"]())
    assert "source is for encoder-decoder models" in invoke(llama, "--source", "a.wav").output
    assert "is a WAV file, and this target is no speech model" in invoke(llama, "--source-file", file).output
    assert "language is for speech models" in invoke(llama, "--language", "en", "a").output
    assert "--language and --task are for speech targets" in invoke(llama, "--chat", "--task", "translate", "a").output
