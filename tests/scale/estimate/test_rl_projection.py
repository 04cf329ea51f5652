"""The speedup of a step of reinforcement learning, against published measurements and from the command line."""

import json
import math

import pytest

from outrider import OutriderError
from outrider.scale.estimate.rl import step_limit, step_speedup
from tests.helpers.commands import invoke

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


# NeMo-RL, the same paper: tokens per pass of EAGLE-3 with k = 3, 5 and 7. Generation made 1.77, 1.44 and 1.21 of plain
# decoding for the first row, and 1.53, 0.84 and 0.71 for the second one.
LENGTHS = {0.87: {3: 3.32, 5: 4.35, 7: 5.06}, 0.75: {3: 2.77, 5: 3.23, 7: 3.48}}  # by the acceptance that fits them


@pytest.mark.parametrize("alpha", LENGTHS)
def test_longer_drafts_are_slower_in_a_full_batch(alpha):
    """The batch is not published. With 1024 sequences per GPU, k = 3 is the fastest in every case."""
    results = {k: project("--alpha", str(alpha), "--k", str(k), batch="1024") for k in (3, 5, 7)}
    cases = {k: json.loads(result.stdout.splitlines()[-1])["results"][0]["cases"] for k, result in results.items()}
    for case in ("pessimistic", "middle", "optimistic"):
        speedups = [cases[k][case]["speedup"] for k in (3, 5, 7)]
        assert speedups == sorted(speedups, reverse=True), case
        for k, published in LENGTHS[alpha].items():
            assert cases[k][case]["tau"] == pytest.approx(published, rel=0.04)


def test_a_published_projection():
    """NeMo-RL, Qwen3-235B-A22B in FP8, 2048 GB200, k = 5 with 4 tokens per pass: 3.5 for rollouts, 2.5 for the step.

    A replica has 8 GPUs here, so 256 replicas have a batch of 4096 and the rollouts of two later steps: 48 sequences
    each. The share of the generation, 0.84, follows from the two published figures.
    """
    layout = ("--devices", "8", "--link", "900", "--weight-bits", "8", "--context", "8192")
    result = project(*layout, "--alpha", "0.834", "--k", "5", "--rl", "0.84", target="235B-A22B", batch="48")
    case = json.loads(result.stdout.splitlines()[-1])["results"][0]["cases"]["middle"]
    assert case["tau"] == pytest.approx(4.0, rel=0.01)
    assert case["speedup"] == pytest.approx(3.5, rel=0.1)
    assert case["step_speedup"] == pytest.approx(2.5, rel=0.05)


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


def project(*words, target="8B", machine="B200", batch="4,64"):
    arguments = ["--target", target, "--proposer", "head:0.04", "--machine", machine, "--batch", batch]
    return invoke("project", *arguments, "--json", *words)


def test_command():
    alpha = ("--alpha", "0.8")
    result = project(*alpha, "--rl", "0.7")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["rl"] == {"generation_share": 0.7, "overlap": 0.0, "limit": pytest.approx(1 / 0.3)}
    for entry in document["results"]:
        for case in entry["cases"].values():
            assert case["step_speedup"] == pytest.approx(step_speedup(0.7, case["speedup"]))
    assert "step" in result.output
    assert "at most 3.33" in result.output
    plain = json.loads(project(*alpha).stdout.splitlines()[-1])
    assert "rl" not in plain
    assert "step_speedup" not in plain["results"][0]["cases"]["middle"]
    assert "give --rl as well" in project(*alpha, "--rl-overlap", "0.2").output
    assert "use a share from 0 to 1" in project(*alpha, "--rl", "1.5").output
