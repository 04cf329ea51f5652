"""Tests of the comparison with other engines: a contestant that fails does not stop the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.models.loader.embedded import embedded
from tests.helpers.scripts import run_script

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
TEXT = "<|endoftext|>def add(a, b):\n"

# Replaces the Python of an engine: an executable that answers as a worker does.
FAKE_PYTHON = """#!{python}
import json, sys
from tokenizers import Tokenizer
arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
tokenizer = Tokenizer.from_file(arguments["--target"] + "/tokenizer.json")
ready = {{"ready": True, "load_seconds": 0.0, "versions": {{}}, "settings": {{"k": arguments["--k"]}}}}
print(json.dumps(ready), flush=True)
for line in sys.stdin:
    text = json.loads(line)["prompt"]
    ids = tokenizer.encode(text, add_special_tokens=False).ids{extra_ids}
    times = {{"tokens": 11, "first_chunk_tokens": 1, "seconds_decode": 0.1, "ttft": 0.02}}
    print(json.dumps(times | {{"text": text, "prompt_ids": ids}}), flush=True)
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
def fake_python(tmp_path):
    def fake_python(name, extra_ids=""):
        file = tmp_path / name
        file.write_text(FAKE_PYTHON.format(python=sys.executable, extra_ids=extra_ids))
        file.chmod(0o755)
        return file

    return fake_python


@pytest.mark.slow
def test_workers_that_run_and_workers_that_fail(run, fake_python):
    contestants = (
        "outrider:draft:k=2",
        "openvino:plain",
        "vllm:plain",
        "llamacpp:plain",
        "transformers:draft:dtype=int8",
    )
    done = run(
        *contestants,
        *("--rounds", 2, "--max-tokens", 8),
        *("--python", f"openvino={fake_python('good')}"),
        *("--python", "vllm=no/such/python"),
        *("--python", f"llamacpp={fake_python('bad', ' + [0]')}"),
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    *table, last = done.stdout.splitlines()
    report = json.loads(last)
    outrider, good, missing, wrong_ids, unsupported = report["contestants"]
    assert [entry["name"] for entry in report["contestants"]] == list(contestants)
    assert (outrider["k"], outrider["mode"], outrider["dtype"]) == (2, "draft", "bf16")
    assert outrider["tokens_per_s"]["min"] > 0
    assert outrider["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert (outrider["tokens"], outrider["same_text"], outrider["turns"]) == (8, 1.0, 2)
    assert outrider["versions"]["outrider"]
    assert good["tokens_per_s"]["median"] == pytest.approx(100.0)
    assert good["settings"] == {"k": "4"}
    assert good["same_text"] == 0.0
    assert good["idle_cpu"] < 0.5
    assert missing["error"] == "no/such/python cannot be run: No such file or directory"
    assert "other token ids" in wrong_ids["error"]
    assert "no int8" in unsupported["error"]
    assert report["hardware"]["cores"] >= 1
    text = "\n".join(table)
    assert all(name in text for name in ("outrider", "openvino", "draft", "100"))
    assert missing["error"] in text


def test_exit_code_if_no_contestant_runs(options):
    done = run_script(INTERLEAVE, "vllm:plain", "--python", "vllm=no/such/python", *options)
    assert done.returncode == 1
    assert "error" in json.loads(done.stdout.splitlines()[-1])["contestants"][0]


@pytest.mark.parametrize(
    "contestant",
    [
        "outrider",
        "outrider:fast",
        "none:plain",
        "outrider:plain:speed=9",
        "outrider:ngram:k=x",
        "outrider:plain:dtype=q1",
    ],
)
def test_unknown_contestant(options, contestant):
    done = run_script(INTERLEAVE, contestant, *options)
    assert done.returncode == 2
    assert f"contestant '{contestant}' is unknown" in done.stderr


def test_every_worker_reports_an_error_as_json(tmp_path):
    for file in PEERS.glob("*_peer.py"):
        command = [sys.executable, file, "--target", tmp_path]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=60
        )
        assert "tokenizer.json is missing" in json.loads(done.stdout)["error"], file


@pytest.mark.parametrize(
    ("engine", "arguments", "error"),
    [
        ("transformers", ("--mode", "tree"), "this engine has no mode tree; it has plain, draft, ngram"),
        ("llamacpp_python", ("--dtype", "int4"), "this engine has no int4 weights here; it has bf16, f16, q8_0, q4_0"),
        ("outrider", ("--dtype", "q8_0"), "this engine needs models in its own format"),
        ("outrider", ("--mode", "tree"), "mode tree needs --draft DIR"),
    ],
)
def test_what_an_engine_does_not_support(engine, arguments, error):
    command = [sys.executable, PEERS / f"{engine}_peer.py", "--target", embedded("mini"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=120)
    assert json.loads(done.stdout)["error"].startswith(error)
