"""The cells of the GPU run on a tiny pair of models, which needs no GPU."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from time import monotonic

import catalog
import cells
import pytest
import torch
import typer
import worker
from page import page
from pair import SCALES, Inputs
from typer.testing import CliRunner

from tests.helpers import failing_worker, tiny

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "short.sh"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"max_position_embeddings": 1024, "num_hidden_layers": 2, "hidden_size": 32}
    models = {
        name: tiny.save(folder / name, tiny.make_config("LlamaConfig", **sizes), seed=seed)
        for seed, name in enumerate(("target", "draft"))
    }
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"category": "code", "prompt": "def add(a, b):"}) + "\n")
    options = ("--target", models["target"], "--draft", models["draft"], "--prompts", prompts)
    tried = ("--device", "cpu", "--like", "tiny", "--dtype", "float32", "--max-tokens", 4)

    def run(*arguments):
        command = [
            "env",
            f"PYTHON={sys.executable}",
            "OMP_NUM_THREADS=1",
            SCRIPT,
            folder / "out",
            *options,
            *tried,
            *arguments,
        ]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads((folder / "out" / "results.json").read_text()), done.stdout

    return run


def test_some_cells(run):
    document, printed = run("--cells", "parts:gpu,triton:race,graphs:race,graphs:texts")
    results = document["cells"]
    order = ["parts:gpu", "triton:load", "triton:race", "graphs:load", "graphs:race", "graphs:texts"]
    assert list(results) == order
    assert [name for name in order if "error" in results[name]] == []
    assert results["parts:gpu"]["skipped"] == "the tests need a GPU"
    assert results["graphs:race"]["result"]["tau"] >= 1
    assert results["graphs:texts"]["result"]["k = 4"] == {"different": 0, "first_positions": [-1]}
    assert document.keys() >= {"hardware", "versions", "commit", "options"}
    assert page(document) in printed
    assert "| graphs | k = 4 | 0 of 1 | [-1] |" in printed


@pytest.mark.heavy
def test_all_cells(run):
    document, printed = run("--seconds", 500)
    results = {name: outcome["result"] for name, outcome in document["cells"].items() if "result" in outcome}
    assert [name for name, outcome in document["cells"].items() if "error" in outcome] == []
    assert results["graphs:k_auto"]["1.0"].keys() == {"auto", "0", "2", "4"}
    assert results["graphs:k_auto"]["1.0"]["4"]["k"] > results["graphs:k_auto"]["1.0"]["0"]["k"] == 0
    passes = results["graphs:step"]["ms_by_cached_and_tokens"]
    assert list(passes) == ["64", "128"]
    assert results["graphs:split"].keys() == {"1", "2", "4", "8"}
    assert all(each["ms"] > 0 and each["limit_share"] > 0 for times in passes.values() for each in times.values())
    round, race = results["graphs:round"], results["graphs:race"]
    assert round["beyond_ms"] == pytest.approx(round["round_ms"] - round["target_ms"] - round["draft_ms"])
    assert race["against_plain"] == pytest.approx(race["speculative"]["tokens_per_s"] / race["plain"]["tokens_per_s"])
    assert 1 <= race["tau"] <= 5
    offline = results["graphs:offline_8"]
    assert offline["batch"] == SCALES["tiny"].slots
    assert offline["plain"]["first_token_ms"]["mean"] <= offline["plain"]["first_token_ms"]["last"]
    assert {"64 cached, 1 x 1", "256 cached, 8 x 5, soft cap"} < results["graphs:attention"].keys()
    assert results["graphs:sampled"].keys() == {"plain", "block", "walk", "rejection", "block, top_p 0.95"}
    assert results["graphs:sampled"]["plain"]["tau"] == 1 <= results["graphs:sampled"]["walk"]["tau"]
    assert 0 < results["graphs:head"]["1"]["draft_ms"] < results["graphs:head"]["5"]["draft_ms"]
    assert "## Start and memory" in printed


@pytest.mark.heavy
def test_the_head_of_a_cell_leaves_the_draft_model_as_it_was(run):
    """Cells of other draft lengths run after it, and it is the cell that replaces the proposer."""
    document, _ = run("--cells", "graphs:head,graphs:texts,graphs:split,graphs:peers")
    assert [name for name, outcome in document["cells"].items() if "error" in outcome] == []
    assert document["cells"]["graphs:split"]["result"]["4"]["draft_ms"] > 0


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """Return a function that runs cells in a process that fails in some of them."""
    monkeypatch.setattr(cells, "start", failing_worker.start)
    monkeypatch.setattr(cells, "GRACE", 0.3)

    def watched(*names, seconds=60):
        run = cells.Run(out=tmp_path / "out.json", options={}, end=monotonic() + seconds)
        run.run(names)
        return {name: "result" in outcome or outcome for name, outcome in run.results.items()}

    return watched


def test_the_cells_after_one_that_ends_its_process_run_in_another_process(watched):
    found = watched("graphs:kernels", "graphs:race", "triton:round", "triton:sampled", "triton:texts", "parts:gpu")
    assert [name for name, outcome in found.items() if outcome is True] == [
        "graphs:load",
        "graphs:race",
        "triton:load",
        "triton:texts",
        "parts:gpu",
    ]
    assert "its process ended" in found["graphs:kernels"]["error"]
    assert "did not answer" in found["triton:round"]["error"]
    assert found["triton:sampled"]["error"] == "CUDA error"


def test_cells_without_time_are_skipped(watched):
    """The results of a run that is cut short are those of its first cells."""
    assert watched("graphs:race", seconds=0)["graphs:race"] == {"skipped": "no time is left"}


def test_a_missing_file_skips_its_cell(monkeypatch):
    monkeypatch.setattr(worker, "find", lambda _: catalog.Cell("no_such_file:run", 5))
    inputs = Inputs(
        small=(Path(), Path()), like="tiny", device=torch.device("cpu"), dtype=torch.float32, prompts=None, max_tokens=2
    )
    outcome = worker.Worker(inputs).run("parts:triton_rules", 5)
    assert "no_such_file.py cannot be imported" in outcome["skipped"]


def test_unknown_names_are_errors(tmp_path):
    for arguments in (["--cells", "graphs:jump"], ["--cells", "jump"], ["--like", "70b"]):
        result = CliRunner().invoke(application(), [str(tmp_path / "out.json"), *arguments])
        assert result.exit_code == 2
        assert "unknown" in result.output


def application():
    app = typer.Typer()
    app.command()(cells.main)
    return app


def test_every_cell_has_a_function_or_a_file_to_come():
    """A name in the catalog that is misspelled would only be found on the GPU."""
    coming = {"triton_rules", "triton_attention", "triton_products"}
    for name in (*catalog.default_cells(), "graphs:peers", "graphs:load"):
        module, _, function = catalog.find(name).run.partition(":")
        if module not in coming:
            assert callable(getattr(importlib.import_module(module), function))
