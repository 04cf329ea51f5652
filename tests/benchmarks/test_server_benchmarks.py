"""Tests of the server benchmarks: short runs from end to end."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models.loader.embedded import embedded

FOLDER = Path(__file__).parents[2] / "benchmarks" / "server"
OPTIONS = [
    "--target",
    embedded("nano"),
    "--max-num-seqs",
    "3",
    "--dtype",
    "float32",
    "--max-model-len",
    "256",
    "--proposer",
    "ngram",
]


def run(script, *arguments, options=OPTIONS):
    command = [sys.executable, FOLDER / script, *arguments, "--", *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    texts = ("a = 1\nb = 1\n", "def add(a, b):", "The river")
    file.write_text("".join(json.dumps({"category": "any", "prompt": text}) + "\n" for text in texts))
    return file


@pytest.mark.slow
def test_speed_of_two_servers(prompts, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    served = importlib.import_module("launch").served
    short = ("--rounds", 2, "--requests", 2, "--max-tokens", 8, "--concurrency", "1,2")
    with served(list(map(str, OPTIONS))) as other:
        document = run("speed.py", "--prompts", prompts, *short, "--beside", f"other={other.url}")
    results = {(each["concurrency"], each["variant"]): each for each in document["results"]}
    server_variants = {(level, name) for level in (1, 2) for name in ("auto", "plain", "other")}
    assert set(results) == {(1, "bare"), (1, "bare plain")} | server_variants
    assert all(len(each["tokens_per_s"]) == 2 for each in results.values())
    assert all(len(results[level, name]["against_plain"]) == 2 for level in (1, 2) for name in ("auto", "other"))
    assert all(len(results[1, name]["of_bare_engine"]) == 2 for name in ("auto", "plain"))


@pytest.mark.heavy
def test_soak(prompts):
    length = ("--minutes", 0.05, "--streams", 4, "--pool", 28, "--max-tokens", 24)
    document = run("soak.py", "--target", "@nano", "--prompts", prompts, *length, options=OPTIONS[2:])
    assert document["passed"]
    assert document["answers"] > 0
    assert not document["errors"]
    assert not document["different"]
    assert document["idle_metrics"]["outrider_num_requests_running"] == 0
