"""Tests of the comparison with vLLM, with a fake vLLM: its request, the counts, and the exit code."""

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from outrider.models.heads.files import read_target_info
from outrider.models.heads.store import import_head, write_head
from outrider.models.loader.embedded import embedded
from tests.helpers.heads import cases, random_draft
from tests.helpers.metrics_server import recorded, serving, vllm_metrics
from tests.helpers.scripts import run_script

INTEROP = Path(__file__).parents[2] / "benchmarks" / "peers" / "interop"
COMPARE = INTEROP / "compare.py"
SERVED = INTEROP / "served.py"
TEXTS = {"code": "<|endoftext|>def add(a, b):\n", "prose": "<|endoftext|>The water"}

# Replaces the Python of vLLM's environment: an executable that answers as `vllm_side.py` does.
FAKE_PYTHON = """#!{python}
import json, sys
request = json.loads(sys.stdin.readline())

def answer(speculation):
    counts = {{"rounds": 4, "accepted": [4] + [0] * (request["k"] - 1)}}
    return {{"completed": [{{"tokens": [], "counts": counts}} for _ in request["prompts"]]}}

print(json.dumps({{"drafts": [{answer} for each in request["speculations"]], "versions": request["speculations"]}}))
"""


@pytest.fixture
def run(tmp_path):
    def run(*drafts, options=(), answer="answer(each)"):
        lines = (json.dumps({"category": name, "prompt": text}) for name, text in TEXTS.items())
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        python = tmp_path / "python"
        python.write_text(FAKE_PYTHON.format(python=sys.executable, answer=answer))
        python.chmod(0o755)
        models = ("--target", embedded("mini"), "--draft", *drafts, "--prompts", tmp_path / "prompts.jsonl")
        settings = ("--python", python, "--k", 2, "--max-tokens", 12, "--threads", 1)
        return run_script(COMPARE, *models, *settings, *options)

    return run


def test_a_draft_model_and_suffix_are_compared(run):
    done = run(embedded("nano"), "suffix", options=("--tolerance", 9))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    model, suffix = report["drafts"]
    assert (model["kind"], suffix["kind"]) == ("draft model", "suffix")
    first, second = report["versions"]["in vLLM's environment"]
    assert (first["method"], first["num_speculative_tokens"]) == ("draft_model", 2)
    assert Path(first["model"]).name == "draft"
    assert second["model"] == "outrider.drafting.plugins.vllm.Drafts"
    for each in report["drafts"]:
        assert each["overall"]["vllm"] == {"rounds": 8, "accepted": [8, 0], "length": 2.0}
        assert list(each["categories"]) == list(TEXTS)
        assert each["overall"]["same_text"] == 0
    outrider = model["overall"]["outrider"]
    prefill_tokens = len(TEXTS)  # the first token of each completion comes without a draft
    decoded_tokens = outrider["rounds"] + sum(outrider["accepted"])
    # Two completions of 12 tokens, and up to 2 more accepted tokens in the last round of each.
    assert 24 <= prefill_tokens + decoded_tokens <= 28


def test_a_draft_head_is_converted_and_a_difference_is_reported(run, tmp_path):
    target = read_target_info(embedded("mini"))
    _, description = cases(target.hidden, target.vocab)["eagle3.1"]
    write_head(tmp_path / "draft", random_draft(description), dtype=torch.float32)
    done = run(tmp_path / "draft")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["drafts"][0]["format"] == "eagle3-speculators"
    assert report["versions"]["in vLLM's environment"][0]["method"] == "eagle3"


def test_blocks_as_short_as_in_vllm(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(INTEROP)
    with_short_blocks = import_module("outrider_side").with_short_blocks
    target = read_target_info(embedded("mini"))
    head, short = tmp_path / "head", tmp_path / "short"
    for name, size in (("anchored dflash", 2), ("dflash", 3)):
        _, description = cases(target.hidden, target.vocab)[name]
        module = random_draft(description, table=target.embedding())
        write_head(head, module, dtype=torch.float32)
        assert with_short_blocks(str(head), str(embedded("mini")), 2, short) == str(short)
        copied = import_head(short)
        assert copied.description == replace(description, block=replace(description.block, size=size))
        assert torch.equal(copied.weights["mask"], module.mask)
    for draft in (str(embedded("nano")), str(embedded("eagle31")), "@nano", "suffix"):
        assert with_short_blocks(draft, str(embedded("mini")), 2, tmp_path / "none") == draft
    assert not (tmp_path / "none").exists()
    done = run(head, options=("--tolerance", 9, "--short-blocks"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('{"error": "NotImplementedError: what is it?"}', "NotImplementedError: what is it?"),
        ("1 / 0", "with exit code 1"),
    ],
)
def test_errors_of_vllm_are_passed_on(answer, message, run):
    done = run(embedded("nano"), answer=answer)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def run_served(tmp_path):
    def run_served(url, *options):
        lines = (json.dumps({"category": name, "prompt": text}) for name, text in TEXTS.items())
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        models = ("--target", embedded("mini"), "--draft", embedded("nano"), "--prompts", tmp_path / "prompts.jsonl")
        settings = ("--k", 2, "--max-tokens", 12, "--threads", 1)
        return run_script(SERVED, "--server", url, *models, *settings, *options)

    return run_served


def test_a_running_server_is_compared(run_served):
    with serving(vllm_metrics) as (url, bodies):
        done = run_served(url, "--tolerance", 9)
        strict = run_served(url, "--tolerance", 0)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    # The server counts 10 drafts for each request.
    assert report["served"] == {"rounds": 20, "accepted": [16, 10], "length": 2.3}
    assert report["engine"] == "vLLM"
    assert report["same_text"] == 0
    assert report["difference"] == pytest.approx(2.3 / report["outrider"]["length"] - 1)
    assert report["outrider"]["rounds"] > 0
    assert [(body["max_tokens"], body["temperature"]) for body in bodies[:2]] == [(12, 0.0), (12, 0.0)]
    assert all(isinstance(token, int) for body in bodies for token in body["prompt"])
    assert strict.returncode == 1


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (None, "has no /metrics; start the server with them"),
        (lambda _: recorded("llama.cpp-b11434-plain.txt"), "has counted no drafts; start it with the draft"),
    ],
)
def test_a_server_without_drafts_is_refused(metrics, message, run_served):
    with serving(metrics) as (url, _):
        done = run_served(url)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_target_without_a_module_is_refused(run_served):
    with serving(vllm_metrics) as (url, _):
        done = run_served(url, "--draft", "mtp")
    assert done.returncode == 2
    assert "has no module for multi-token prediction" in done.stderr
