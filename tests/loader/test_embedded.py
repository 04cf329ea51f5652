"""Models that come with Outrider, and how they are named."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded, model_folder
from outrider.propose.registry import default_proposer, parse


def test_they_are_named_in_expressions():
    merged = parse("merge(ngram,draft:@nano)")
    assert merged.parts[1].argument == str(embedded("nano"))
    assert parse("draft:@nano") == parse(f"draft:{embedded('nano')}")


@pytest.mark.parametrize("name", ["", "nobody", "../models"])
def test_others_are_refused(name):
    with pytest.raises(OutriderError, match="does not come with Outrider; use @"):
        parse(f"draft:@{name}")


def test_a_folder_may_be_named_so(tmp_path, monkeypatch):
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
def test_verbs_know_them(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("def add(a, b):\n    return a + b\n")
    strange = ["@nobody" if word == "@mini" else word for word in words]
    assert "@nobody does not come with Outrider" in CliRunner().invoke(app, strange).output
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_training_goes_on_from_one_of_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one"}\n' * 4)
    files = ["--data", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    words = ["train", "medusa", "--target", "@mini", "--init-from", "@medusa", "--depth", "2", *files]
    done = CliRunner().invoke(app, words)
    assert "@medusa defines the shape of the draft; leave --depth" in done.output


def test_the_draft_by_its_name_is_the_default():
    params = SamplingParams(temperature=0.0, max_tokens=12)
    named, usual = (LLM(proposer=name, max_num_seqs=1, max_model_len=64, k=4) for name in ("draft:@nano", None))
    (one,), (two,) = (llm.generate(["def add(a, b):"], params) for llm in (named, usual))
    assert (one.token_ids, one.stats.draft_tokens) == (two.token_ids, two.stats.draft_tokens)


@pytest.mark.parametrize(("name", "least"), [("mtp", 1.5), ("eagle31", 1.5), ("medusa", 1.05)])
def test_heads_of_the_embedded_target_guess_for_it(name, least):
    prompts = ["def add(a, b):\n    return", "<|endoftext|><|user|>Count to ten.<|end|><|assistant|>"]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    options = {"max_num_seqs": 2, "max_model_len": 128, "dtype": "float32", "verifier": "walk", "k": 4}
    ours = LLM(proposer=f"draft:@{name}", **options).generate(prompts, params)
    plain = LLM(proposer="none", **options).generate(prompts, params)
    assert [each.token_ids for each in ours] == [each.token_ids for each in plain]
    assert sum(each.stats.output_tokens for each in ours) / sum(each.stats.passes for each in ours) > least
