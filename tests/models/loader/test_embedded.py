"""The models that are included in Outrider, and their names `@NAME`."""

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.drafting.propose.registry import parse
from outrider.engine.default_proposer import default_proposer
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded, model_folder


def test_expressions_accept_embedded_names():
    merged = parse("merge(ngram,draft:@nano)")
    assert merged.parts[1].argument == str(embedded("nano"))
    assert parse("draft:@nano") == parse(f"draft:{embedded('nano')}")


@pytest.mark.parametrize("name", ["", "nobody", "../models"])
def test_unknown_embedded_name_raises(name):
    with pytest.raises(OutriderError, match="does not come with Outrider; use @"):
        parse(f"draft:@{name}")


def test_model_folder_accepts_embedded_names_and_home(tmp_path, monkeypatch):
    assert model_folder("@mini") == model_folder(None) == embedded("mini")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder("~/mini") == tmp_path / "mini"
    assert default_proposer("@mini") == default_proposer(None) != default_proposer("~/mini")
    with pytest.raises(OutriderError, match="@nobody does not come with Outrider; use @"):
        model_folder("@nobody")


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "@mtp", "--target", "@mini"],
        ["convert", "@eagle31", "--to", "eagle3-speculators", "--out", "out", "--target", "@mini"],
        ["index", "a.txt", "--out", "out", "--target", "@mini"],
        ["project", "--target", "@mini", "--machine", "L4", "--alpha", "0.8"],
        ["run", "--target", "@mini", "--max-tokens", "2", "one"],
    ],
)
def test_commands_accept_embedded_names(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("def add(a, b):\n    return a + b\n")
    unknown = ["@nobody" if word == "@mini" else word for word in words]
    assert "@nobody does not come with Outrider" in CliRunner().invoke(app, unknown).output
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_training_can_start_from_an_embedded_head(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n' * 4)
    files = ["--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    words = ["train", "mtp", "--target", "@mini", "--init-from", "@mtp", "--depth", "2", *files]
    result = CliRunner().invoke(app, words)
    assert "@mtp defines the shape of the draft; leave --depth" in result.output


def test_embedded_draft_model_is_the_default_proposer():
    params = SamplingParams(temperature=0.0, max_tokens=12)
    completions = []
    for proposer in ("draft:@nano", None):
        llm = LLM(proposer=proposer, max_num_seqs=1, max_model_len=64, k=4)
        completions += llm.generate(["def add(a, b):"], params)
    named, default = completions
    assert (named.token_ids, named.stats.draft_tokens) == (default.token_ids, default.stats.draft_tokens)


@pytest.mark.fast_cases("eagle31")
@pytest.mark.parametrize("name", ["mtp", "eagle31"])
def test_embedded_heads_draft_for_the_embedded_target(name):
    prompts = ["def add(a, b):\n    return", "<|endoftext|><|user|>Count to ten.<|end|><|assistant|>"]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    options = {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32", "verifier": "walk", "k": 4}
    speculative = LLM(proposer=f"draft:@{name}", **options).generate(prompts, params)
    plain = LLM(proposer="none", **options).generate(prompts, params)
    assert [completion.token_ids for completion in speculative] == [completion.token_ids for completion in plain]
    output_tokens = sum(completion.stats.output_tokens for completion in speculative)
    passes = sum(completion.stats.passes for completion in speculative)
    assert output_tokens / passes > 1.5
