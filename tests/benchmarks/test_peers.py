"""The comparison with other engines: whatever a contestant does, there is a table and a document."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.loader.embedded import embedded
from tests.helpers.scripts import run_script

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
TEXT = "<|endoftext|>def add(a, b):\n"

# Stands in for the Python of an engine: a command that is started as one, and answers as a worker does.
FAKE = """#!{python}
import json, sys
from tokenizers import Tokenizer
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
tokenizer = Tokenizer.from_file(arguments["--target"] + "/tokenizer.json")
ready = {{"ready": True, "load_seconds": 0.0, "versions": {{}}, "settings": {{"k": arguments["--k"]}}}}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    text = json.loads(line)["prompt"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids{more}
    clock = {{"tokens": 11, "opening": 1, "seconds_decode": 0.1, "ttft": 0.02}}
    print(json.dumps(clock | {{"text": text, "prompt_ids": ids}}), flush=True)
"""


INTERLEAVE = PEERS / "interleave.py"


@pytest.fixture
def options(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"category": "code", "prompt": TEXT}) + "\n")
    models = ("--target", embedded("mini"), "--draft", embedded("nano"), "--prompts", tmp_path / "prompts.jsonl")
    return (*models, "--threads", 1, "--patience", 0)


@pytest.fixture
def run(options):
    def run(*arguments):
        command = [sys.executable, INTERLEAVE, *arguments, *options]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)

    return run


@pytest.fixture
def fake(tmp_path):
    def fake(name, more=""):
        file = tmp_path / name
        file.write_text(FAKE.format(python=sys.executable, more=more))
        file.chmod(0o755)
        return file

    return fake


@pytest.mark.slow
def test_worker_and_failures(run, fake):
    contestants = (
        "outrider:draft:k=2",
        "openvino:plain",
        "vllm:plain",
        "llamacpp:plain",
        "transformers:draft:dtype=int8",
    )
    done = run(
        *contestants,
        *("--rounds", 2, "--max-tokens", 8, "--python", f"openvino={fake('good')}", "--python", "vllm=no/such/python"),
        *("--python", f"llamacpp={fake('bad', ' + [0]')}"),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    own, good, missing, wrong, refused = report["contestants"]
    assert [entry["name"] for entry in report["contestants"]] == list(contestants)
    assert (own["k"], own["mode"], own["dtype"]) == (2, "draft", "bf16")
    assert own["tokens_per_s"]["min"] > 0
    assert own["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert (own["tokens"], own["same_text"], own["turns"]) == (8, 1.0, 2)
    assert own["versions"]["outrider"]
    assert good["tokens_per_s"]["median"] == pytest.approx(100.0)
    assert good["settings"] == {"k": "4"}
    assert good["same_text"] == 0.0
    assert good["idle_cpu"] < 0.5
    assert missing["error"] == "no/such/python cannot be run: No such file or directory"
    assert "other token ids" in wrong["error"]
    assert "no int8" in refused["error"]
    assert report["hardware"]["cores"] >= 1
    text = "\n".join(table)
    assert all(name in text for name in ("outrider", "openvino", "draft", "100"))
    assert missing["error"] in text


def test_nobody_runs(run):
    done = run("vllm:plain", "--python", "vllm=no/such/python")
    assert done.returncode == 1
    assert "error" in json.loads(done.stdout.splitlines()[-1])["contestants"][0]


@pytest.mark.parametrize("contestant", ["outrider", "outrider:fast", "none:plain", "outrider:plain:speed=9"])
def test_unknown_contestant(options, contestant):
    done = run_script(INTERLEAVE, contestant, *options)
    assert done.returncode == 2
    assert f"contestant '{contestant}' is unknown" in done.stderr


def test_every_engine_says_why(tmp_path):
    for file in PEERS.glob("*_peer.py"):
        command = [sys.executable, file, "--target", tmp_path]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60
        )
        assert "tokenizer.json is missing" in json.loads(done.stdout)["error"], file
