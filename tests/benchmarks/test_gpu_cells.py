"""Every cell of the GPU run on a tiny pair of models, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "cells.py"
CELLS = ["bandwidth", "split", "auto", "step", "kernels", "rows", "race", "texts", "memory"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    models = {
        name: tiny.save(folder / name, tiny.make_config("LlamaConfig", **sizes), seed=seed)
        for seed, name in enumerate(("target", "draft"))
    }
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "code", "prompt": "def add(a, b):"}) + "\n")
    out = folder / "out.json"
    options = ("--target", models["target"], "--draft", models["draft"], "--prompts", prompts)
    tried = ("--device", "cpu", "--like", "tiny", "--dtype", "float32", "--max-tokens", 4)

    def run(*arguments):
        done = run_script(SCRIPT, out, *options, *tried, *arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


@pytest.mark.heavy
def test_all_cells(run):
    document = run()
    assert [name for name in document if name in CELLS] == CELLS
    assert {name: document[name].get("error") for name in CELLS} == dict.fromkeys(CELLS)
    results = {name: document[name]["result"] for name in CELLS}
    assert results["split"].keys() == {"1", "2", "4", "8"}
    assert all(part["draft_ms"] > 0 and part["target_ms"] > 0 for part in results["split"].values())
    assert results["auto"]["1.0"].keys() == {"auto", "0", "2", "4", "8"}
    assert results["auto"]["1.0"]["4"]["k"] > results["auto"]["1.0"]["0"]["k"] == 0
    assert results["texts"]["texts"] == 1
    assert document.keys() >= {"loaded", "warm_up", "models", "hardware", "versions", "commit"}


def test_cell_without_time_leaves_the_others(run):
    """The results of a run that is cut short are those of its first cells."""
    document = run("--cells", "rows,step", "--seconds", 0)
    assert document["rows"]["error"] == document["step"]["error"] == "CellTimeout: no time is left"
    assert "result" in run("--cells", "rows", "--seconds", 60)["rows"]
