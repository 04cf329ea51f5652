"""Tests of the GPU benchmark: every measurement on a tiny pair of models, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "gpu.py"
PARTS = ("step", "race", "round")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"max_position_embeddings": 1024, "num_hidden_layers": 2}
    models = {
        name: tiny.save(folder / name, tiny.make_config("LlamaConfig", **sizes), seed=seed)
        for seed, name in enumerate(("target", "draft"))
    }
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "code", "prompt": "def add(a, b):"}) + "\n")
    options = ("--target", models["target"], "--draft", models["draft"], "--prompts", prompts)

    def run(*arguments):
        return run_script(SCRIPT, *arguments, *options, "--device", "cpu", "--dtype", "float32")

    return run


@pytest.mark.heavy
def test_all_measurements(run):
    short = ("--rounds", 2, "--max-tokens", 6, "--cached", 8, "--nodes", "1,3", "--k", 2)
    done = run("all", "--like", "tiny", *short)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document.keys() >= {*PARTS, "models", "hardware", "versions", "commit", "arguments", "warm_up"}
    step, race, round = (document[name] for name in PARTS)
    assert step["nodes"].keys() == {"1", "3"}
    assert all(each["ms"] > 0 and each["limit_share"] > 0 for each in step["nodes"].values())
    assert step["limit_ms"] == pytest.approx(1e3 * step["bytes"] / step["read_bytes_per_s"])
    assert {"plain", "speculative", "transformers_assisted"} <= race.keys()
    assert race["against_plain"] == pytest.approx(race["speculative"]["tokens_per_s"] / race["plain"]["tokens_per_s"])
    assert 1 <= race["tau"] <= 3
    assert round["beyond_ms"] == pytest.approx(round["round_ms"] - round["target_ms"] - round["draft_ms"])
    assert document["models"]["target"]["graph_bytes"] == 0
    assert document["warm_up"]["first_token_ms"] > 0


def test_unknown_arguments_are_errors(run):
    for arguments in (("jump",), ("step", "--like", "70b")):
        done = run(*arguments)
        assert done.returncode == 1
        assert "is unknown; see --help" in done.stderr
