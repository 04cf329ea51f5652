"""Every cell of the GPU run on a tiny pair of models, which needs no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.helpers.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "cells.py"
CELLS = [
    "bandwidth",
    "split",
    "auto",
    "step",
    "round",
    "kernels",
    "attention",
    "rows",
    "race",
    "sampled",
    "head",
    "texts",
    "memory",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"max_position_embeddings": 1024, "num_hidden_layers": 4, "hidden_size": 64}
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
    step, round, race = (results[name] for name in ("step", "round", "race"))
    assert step["limit_ms"] == pytest.approx(1e3 * step["bytes"] / step["read_bytes_per_s"])
    assert all(each["ms"] > 0 and each["limit_share"] > 0 for each in step["nodes"].values())
    assert round["beyond_ms"] == pytest.approx(round["round_ms"] - round["target_ms"] - round["draft_ms"])
    assert race["against_plain"] == pytest.approx(race["speculative"]["tokens_per_s"] / race["plain"]["tokens_per_s"])
    assert 1 <= race["tau"] <= 5
    assert {"64 cached, 1 x 1", "256 cached, 8 x 5, soft cap"} < results["attention"].keys()
    assert results["sampled"].keys() == {"plain", "block", "walk", "rejection", "block, top_p 0.95"}
    assert results["sampled"]["plain"]["tau"] == 1 <= results["sampled"]["walk"]["tau"]
    assert 0 < results["head"]["1"]["draft_ms"] < results["head"]["5"]["draft_ms"]
    assert results["texts"]["texts"] == 1
    assert document["models"]["target"]["graph_bytes"] == 0
    assert document["warm_up"]["result"]["first_token_ms"] > 0
    assert document.keys() >= {"loaded", "warm_up", "models", "hardware", "versions", "commit"}


def test_the_head_of_a_cell_leaves_the_draft_model_as_it_was(run):
    """Cells of other draft lengths run after it, and it is the cell that replaces the proposer."""
    document = run("--cells", "head,texts,split")
    assert [document[name].get("error") for name in ("head", "texts", "split")] == [None] * 3
    assert document["split"]["result"]["4"]["draft_ms"] > 0


def test_unknown_names_are_errors(run):
    for option in ("--cells", "jump"), ("--like", "70b"):
        with pytest.raises(AssertionError, match="unknown"):
            run(*option)


def test_cell_without_time_leaves_the_others(run):
    """The results of a run that is cut short are those of its first cells."""
    document = run("--cells", "rows,step", "--seconds", 0)
    assert document["rows"]["error"] == document["step"]["error"] == "CellTimeout: no time is left"
    assert "result" in run("--cells", "rows", "--seconds", 60)["rows"]
