"""The options `--source` and `--source-file` of `outrider run`."""

import json

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from tests.helpers import tiny

SOURCE = "a b c a b c"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("bart"), tiny.ENCODER_DECODER["bart"]())


def invoke(folder, *words):
    common = ("run", "--target", str(folder), "--proposer", "ngram", "--k", "4", "--max-tokens", "8", "--ignore-eos")
    return CliRunner().invoke(app, [*common, "--dtype", "float32", "--threads", "1", *words])


def test_source_equals_output_of_llm(folder, tmp_path):
    llm = LLM(folder, proposer="none", dtype="float32", threads=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (expected,) = llm.generate(sources=SOURCE, params=params)
    file = tmp_path / "source.txt"
    file.write_text(SOURCE + "\n", "utf-8")
    for words in (("--source", SOURCE), ("--source-file", str(file))):
        result = invoke(folder, "--json", *words)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["text"] == expected.text
    (continued,) = llm.generate("ab", params, sources=[SOURCE])
    assert json.loads(invoke(folder, "--json", "--source", SOURCE, "ab").stdout)["text"] == continued.text
    several = invoke(folder, "--json", "--source", SOURCE, "--n", "2", "--temperature", "1", "--seed", "1")
    assert several.exit_code == 0, several.output


MISTAKES = {
    "no source": (("ab",), "give it --source TEXT or --source-file FILE"),
    "two sources": (("--source", "a", "--source-file", "b"), "--source and --source-file were both given"),
    "no such file": (("--source-file", "/no/such/file"), "/no/such/file cannot be read"),
    "empty": (("--source", ""), "source is empty; give at least one token"),
    "too long": (("--source", "a" * 200), "source is 200 tokens long, and the encoder takes 128"),
    "chat": (("--source", "a", "--chat"), "--chat does not support encoder-decoder targets"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(words, message, folder):
    result = invoke(folder, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_file_that_is_not_text(folder, tmp_path):
    file = tmp_path / "source.bin"
    file.write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8 text; give a text file" in invoke(folder, "--source-file", str(file)).output


def test_decoder_only_target_refuses_a_source(tmp_path):
    result = invoke(tiny.save(tmp_path, tiny.ATTENTION["llama"]()), "--source", "a")
    assert result.exit_code == 2
    assert "source is for encoder-decoder models" in result.output
