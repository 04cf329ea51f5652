"""The comparison with vLLM, with a stand-in for it: what is asked, how it is counted, and what the exit code says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from outrider.heads.files import read_target_info
from outrider.heads.store import write_head
from outrider.loader.embedded import embedded
from tests.helpers.heads import cases, random_draft
from tests.helpers.scripts import run_script

COMPARE = Path(__file__).parents[2] / "benchmarks" / "peers" / "interop" / "compare.py"
TEXTS = {"code": "<|endoftext|>def add(a, b):\n", "prose": "<|endoftext|>The water"}

# Stands in for the Python of vLLM's environment: a command that is started as one, and answers as its side does.
FAKE = """#!{python}
import json, sys
asked = json.loads(sys.stdin.readline())
config = json.load(open(asked["draft"] + "/config.json"))
told = {{"method": asked["method"], "kind": config.get("speculators_model_type") or config["model_type"]}}
counts = {{"rounds": 4, "accepted": [4] + [0] * (asked["k"] - 1)}}
completed = [{{"tokens": [], "counts": counts}} for _ in asked["prompts"]]
print(json.dumps({answer}))
"""
GOOD = '{"completed": completed, "versions": told}'


@pytest.fixture
def run(tmp_path):
    def run(draft, *options, answer=GOOD):
        lines = (json.dumps({"category": name, "prompt": text}) for name, text in TEXTS.items())
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        fake = tmp_path / "python"
        fake.write_text(FAKE.format(python=sys.executable, answer=answer))
        fake.chmod(0o755)
        models = ("--target", embedded("mini"), "--draft", draft, "--prompts", tmp_path / "prompts.jsonl")
        more = ("--python", fake, "--k", 2, "--max-tokens", 12, "--threads", 1)
        return run_script(COMPARE, *models, *more, *options)

    return run


def test_a_model_is_read_as_it_is_and_counted_alike(run):
    done = run(embedded("nano"), "--tolerance", 9)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["format"] == ""
    assert report["versions"]["in vLLM's environment"] == {"method": "draft_model", "kind": "llama"}
    ours, theirs = report["overall"]["outrider"], report["overall"]["vllm"]
    assert theirs == {"rounds": 8, "accepted": [8, 0], "length": 2.0}
    first, made = len(TEXTS), ours["rounds"] + sum(ours["accepted"])
    assert (
        24 <= first + made <= 28
    )  # two texts of 12; each first comes without guesses, and a last round may keep 2 more
    assert list(report["categories"]) == list(TEXTS)
    assert report["overall"]["same_text"] == 0


def test_a_trained_draft_is_converted_and_may_differ(run, tmp_path):
    partner = read_target_info(embedded("mini"))
    _, description = cases(partner.hidden, partner.vocab)["eagle3.1"]
    write_head(tmp_path / "draft", random_draft(description), dtype=torch.float32)
    done = run(tmp_path / "draft")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["format"] == "eagle3-speculators"
    assert report["versions"]["in vLLM's environment"] == {"method": "eagle3", "kind": "eagle3"}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"error": "NotImplementedError: what is it?"}', "vLLM cannot: NotImplementedError: what is it?"),
        ("1 / 0", "with 1"),
    ],
)
def test_what_vllm_says_is_passed_on(answer, said, run):
    done = run(embedded("nano"), answer=answer)
    assert done.returncode == 2
    assert said in done.stderr
