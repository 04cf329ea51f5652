"""The speedup of a step of reinforcement learning, against published measurements and from the command line."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from outrider import OutriderError
from outrider.cli.app import app
from outrider.project.rl import step_limit, step_speedup

# Seconds of generation and of the step, without and with speculation.
NEMO_RL_ZERO = (100.0, 151.2, 56.6, 107.5)  # arXiv 2604.26779: Qwen3-8B-Base, EAGLE-3, 32 GB200
NEMO_RL_THINK = (133.6, 185.3, 87.0, 137.4)  # the same, Qwen3-8B
SKYRL = (310.0, 400.7, 152.0, 246.8)  # SkyRL documents: Qwen3.5-9B, MTP, 8 H100


@pytest.mark.parametrize("measured", [NEMO_RL_ZERO, NEMO_RL_THINK, SKYRL])
def test_published_steps(measured):
    generation, step, faster_generation, faster_step = measured
    predicted = step_speedup(generation / step, generation / faster_generation)
    assert predicted == pytest.approx(step / faster_step, rel=0.02)


def test_a_published_asynchronous_run():
    """NeMo-RL, 16 nodes: the exposed generation falls from 10.4 to 0.6 of 75.0 s, and the step to 60.5 s."""
    exposed, step, faster = 10.4, 75.0, 0.6
    other = step - exposed
    generation = exposed + 54.2  # hidden behind other work; any value with the published exposed seconds will do
    whole = generation + other
    speedup = generation / (54.2 + faster)
    predicted = step_speedup(generation / whole, speedup, overlap=54.2 / whole)
    assert predicted == pytest.approx(step / (other + faster))
    assert predicted == pytest.approx(75.0 / 60.5, rel=0.08)  # the rest of the step has become shorter as well


def test_properties():
    assert step_speedup(0.0, 3.0) == 1.0
    assert step_speedup(1.0, 3.0) == pytest.approx(3.0)
    assert step_speedup(0.5, 0.5) < 1  # a draft that costs more than it gains
    assert step_speedup(0.5, 2.0, overlap=0.5) == 1.0  # the generation is hidden already
    assert step_speedup(0.7, 1e9) == pytest.approx(step_limit(0.7)) == pytest.approx(1 / 0.3)
    assert step_limit(1.0) == math.inf
    for share, speedup, overlap in ((1.2, 2.0, 0.0), (-0.1, 2.0, 0.0), (0.5, 0.0, 0.0), (0.5, 2.0, 0.6)):
        with pytest.raises(OutriderError, match="use"):
            step_speedup(share, speedup, overlap=overlap)


def project(*words):
    arguments = ["project", "--target", "8B", "--proposer", "head:0.04", "--alpha", "0.8", "--machine", "H100"]
    return CliRunner().invoke(app, [*arguments, "--batch", "4,64", *words])


def test_command():
    result = project("--rl", "0.7", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["rl"] == {"generation_share": 0.7, "overlap": 0.0, "limit": pytest.approx(1 / 0.3)}
    for entry in document["results"]:
        for case in entry["cases"].values():
            assert case["step_speedup"] == pytest.approx(step_speedup(0.7, case["speedup"]))
    shown = project("--rl", "0.7")
    assert "step" in shown.output
    assert "at most 3.33" in shown.output
    plain = json.loads(project("--json").stdout.splitlines()[-1])
    assert "rl" not in plain
    assert "step_speedup" not in plain["results"][0]["cases"]["middle"]
    assert "give --rl as well" in project("--rl-overlap", "0.2").output
    assert "use a share from 0 to 1" in project("--rl", "1.5").output
