"""The commands `outrider media demo`, `bench` and `tune`."""

import json
import sys

import pytest
import torch
from PIL import Image

from outrider.media import DrafterOnly, QualityGate, TargetOnly, load_models
from outrider.media.models.captions import LANGUAGE
from tests.media.commands import document, run
from tests.media.made_up import write_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


def test_demo(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    result = run("demo", "--models", folder, "--threshold", 0.0, "--out", tmp_path / "a.mp4", "--seed", 4)
    report = document(result)
    assert report["exact"] is False
    assert report["files"] == [str(tmp_path / "a.gif")]
    assert 'mp4 cannot be encoded (no encoder; pip install "outrider[media]")' in result.stdout
    makers = {name: [block["maker"] for block in each["blocks"]] for name, each in report["outputs"].items()}
    assert makers["target-only"] == ["target"] * 5
    assert makers["drafter-only"] == ["drafter"] * 5
    assert makers["routed"] == ["target"] + ["drafter"] * 4
    assert report["outputs"]["routed"]["threshold"] == 0
    with Image.open(report["files"][0]) as picture:
        assert picture.n_frames == 10


def test_tune_and_demo_with_its_calibration(folder, tmp_path):
    file = tmp_path / "calibration.json"
    report = document(run("tune", "--models", folder, "--num-prompts", 8, "--quality", 0.5, "--out", file))
    assert report["calibration"] == json.loads(file.read_text())
    assert report["calibration"]["reached"]
    words = ["--models", folder, "--calibration", file, "--out", tmp_path / "a.gif", "--budget", 1]
    routed = document(run("demo", *words))["outputs"]["routed"]
    assert routed["threshold"] == report["calibration"]["threshold"]
    assert routed["quality"] == round(report["calibration"]["quality"]["value"], 4)
    assert routed["drafter_share"] == 0.8


def test_bench(folder, tmp_path):
    plot = tmp_path / "plot.svg"
    result = run("bench", "--models", folder, "--num-prompts", 4, "--rounds", 2, "--plot", plot, "--eager-commits")
    report = document(result)
    assert report["rounds"] == 2
    assert [each["router"] for each in report["base"]] == ["target-only", "drafter-only"]
    assert report["chosen"] in {each["router"] for each in report["gates"]}
    controls = [each["router"] for each in report["controls"]]
    assert {"first block only", "stride 2", "stride 3"} <= set(controls)
    assert sum(name.startswith("random") for name in controls) == 2
    assert report["block_ms"]["commit"] > 0
    assert report["commits"] == "eager"
    assert "not exact" in result.stdout
    assert "<svg" in plot.read_text()


def test_bench_with_given_thresholds(folder):
    report = document(run("bench", "--models", folder, "--num-prompts", 2, "--rounds", 1, "--thresholds", "0,1"))
    assert [each["router"] for each in report["gates"]] == ["gate min ≥ 0", "gate min ≥ 1"]
    assert [each["accepted_share"] for each in report["gates"]] == [1, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("demo --threshold 2", "threshold is 2, but this scorer's scores lie from 0 to 1"),
        ("demo --threshold nan", "threshold is nan"),
        ("demo --threshold 0.5 --aggregate best", "aggregate is 'best'"),
        ("demo --threshold 0.5 --prompt cat", "has another form than the models know"),
        ("demo --threshold 0.5 --calibration x.json", "leave one of them out"),
        ("demo --aggregate mean", "--aggregate belongs to --threshold"),
        ("demo", "has no calibration; give --threshold or --calibration"),
        ("demo --calibration none.json", "calibration none.json cannot be read"),
        ("demo --threshold 0.5 --fps 0", "--fps is 0"),
        ("demo --threshold 0.5 --budget 0", "budget is 0"),
        ("demo --threshold 0.5 --out a.txt", "is not the name of a video file"),
        ("bench --num-prompts 1", "--num-prompts is 1; use at least"),
        ("bench --num-prompts 4 --rounds 5", "--num-prompts is 4; use at least 5"),
        ("bench --thresholds a", "--thresholds"),
        ("bench --thresholds 3", "threshold is 3, but"),
        ("bench --plot a.txt", "is not the name of a plot"),
        ("tune --quality 2", "--quality is 2"),
        ("tune --num-prompts 3", "--num-prompts is 3"),
        ("tune --aggregate best", "aggregate is 'best'"),
        ("tune --out none/a.json", "cannot be written"),
    ],
)
def test_mistakes_are_one_line(folder, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words.split(), "--models", folder)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_copy_without_models_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.media.models.store.EMBEDDED", tmp_path)
    result = run("bench", "--num-prompts", 5)
    assert result.exit_code == 2
    assert "has no video models; train them with python -m recipes.video.train" in result.stderr


def test_a_wrong_folder_is_one_line(tmp_path):
    result = run("demo", "--threshold", 0.5, "--models", tmp_path, "--out", tmp_path / "a.gif")
    assert result.exit_code == 2
    assert "has no readable config.json" in result.stderr


def test_the_embedded_models_make_what_the_captions_say():
    models = load_models()
    assert models.compute_ratio >= 8
    assert models.video.blocks >= 7
    scorer = models.held_out_scorer

    def score(router):
        """The mean over frames of a scorer that never decides."""
        blocks = [
            (caption, block)
            for caption in LANGUAGE.random_captions(3, seed=3)
            for block in models.engine.stream(caption, router)
        ]
        return float(torch.cat([scorer.score(caption, block.content) for caption, block in blocks]).mean())

    target, routed, drafter = score(TargetOnly()), score(QualityGate(0.7)), score(DrafterOnly())
    assert target > 0.85
    assert target > routed > drafter > 0.6
