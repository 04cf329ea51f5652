"""Tests of `outrider train --ray-workers`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.scale.ray.train_settings import RayWorkers
from outrider.scale.ray.training import train_on_ray
from outrider.train.settings import Settings
from tests.helpers.commands import invoke
from tests.helpers.replicas import RAY_ENVIRONMENT

ARGUMENTS = (
    "medusa --target {nano} --data data.jsonl --eval-data held.jsonl --proposer none --temperature 0 --ignore-eos"
    " --max-tokens 12 --epochs 3 --steps-per-generation 1 --threads 1 --dtype float32 --batch-size {batch} --out {out}"
)


def write_prompts(folder):
    texts = ["def add(a, b):", "The cat sat on", "x = [1, 2", "import os", "class A:", "Once upon"]
    lines = [json.dumps({"prompt": text}) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(lines[:4]))
    (folder / "held.jsonl").write_text("\n".join(lines[4:]))


def run_train(folder, *words, out, batch):
    arguments = ARGUMENTS.format(nano=embedded("nano"), batch=batch, out=out).split()
    return subprocess.run(
        [sys.executable, "-m", "outrider", "train", *arguments, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **RAY_ENVIRONMENT, "OMP_NUM_THREADS": "1"},
        timeout=1200,
    )


def losses(file):
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "outrider[ray]"')
def test_two_workers_have_the_losses_of_one_process(tmp_path):
    write_prompts(tmp_path)
    one = run_train(tmp_path, out="one", batch=4)
    assert one.returncode == 0, one.stderr
    two = run_train(tmp_path, "--ray-workers", "2", out="two", batch=2)
    assert two.returncode == 0, two.stderr
    document = json.loads(two.stdout.splitlines()[-1])
    assert (document["cycles"], document["steps"]) == (3, 3)
    expected = losses(tmp_path / "one" / "log.jsonl")
    assert len(expected) == 3
    assert losses(tmp_path / "two" / "log.jsonl") == pytest.approx(expected, rel=1e-4)
    again = run_train(tmp_path, "--ray-workers", "2", "--lr", "0.5", out="two", batch=2)
    assert again.returncode == 2
    assert "two has a training with other options; use another --out" in again.stderr


def test_options_need_workers():
    with pytest.raises(OutriderError, match="--ray-gpus belongs to --ray-workers"):
        RayWorkers(ray_gpus=1)
    with pytest.raises(OutriderError, match="leave --ray-address out"):
        RayWorkers(ray_address="auto")


def test_one_of_torchrun_and_ray_starts_the_processes(monkeypatch, tmp_path):
    settings = Settings(out=str(tmp_path), data=["data.jsonl"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OutriderError, match="torchrun and --ray-workers both start processes"):
        train_on_ray("medusa", settings, RayWorkers(ray_workers=2), as_json=True)


def test_without_ray(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["train", "medusa", "--data", "data.jsonl", "--out", str(tmp_path / "out"), "--ray-workers", "2"]
    result = invoke(*words)
    assert result.exit_code == 2
    assert 'Ray is not installed; run pip install "outrider[ray]"' in result.output
