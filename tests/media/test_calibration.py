"""Choosing a threshold, keeping it in a file, and noticing that it no longer fits."""

import random

import pytest

from outrider.errors import OutriderError
from outrider.media import Calibration, DriftWatch, MediaEngine, QualityGate, load_models, tune
from outrider.media.evaluation.bootstrap import Interval
from outrider.media.models.captions import LANGUAGE
from tests.media.made_up import Adder, Numbers, Scores, write_models


def calibration(share=0.8, drafts=500):
    interval = Interval(value=0.98, low=0.96, high=0.99)
    return Calibration(
        wanted=0.98,
        threshold=0.5,
        aggregate="min",
        quality=interval,
        held_out=interval,
        speedup=1.7,
        accepted_share=share,
        drafts=drafts,
        reached=True,
    )


def test_tune_keeps_the_quality_on_the_prompts_that_choose(tmp_path):
    models = load_models(write_models(tmp_path))
    prompts = LANGUAGE.random_captions(8, 0)
    done = []
    tuned = tune(models.engine, models.held_out_scorer, prompts, quality=0.99, advance=lambda: done.append(1))
    reference, *candidates = tuned.candidates
    assert reference.router == "target-only"
    assert len(done) == 4 * (1 + len(candidates)) + 4 * 2
    chosen = next(each for each in candidates if each.router == tuned.calibration.router().name)
    assert chosen.quality.value >= 0.99
    faster = [each for each in candidates if each.target_share < chosen.target_share]
    assert all(each.quality.value < 0.99 for each in faster)
    assert tuned.calibration.reached == (tuned.calibration.quality.value >= 0.99)
    assert tuned.calibration.quality.low <= tuned.calibration.quality.value <= tuned.calibration.quality.high


@pytest.mark.parametrize("quality", [0, -1, 1.01, float("nan")])
def test_wrong_qualities(quality):
    with pytest.raises(OutriderError, match="above 0 and up to 1"):
        tune(None, None, ["a"] * 9, quality=quality)


def test_too_few_prompts():
    with pytest.raises(OutriderError, match="3 prompts are too few"):
        tune(None, None, ["a"] * 3, quality=0.9)


def test_a_calibration_is_written_and_read(tmp_path):
    file = tmp_path / "calibration.json"
    calibration().write(file)
    assert Calibration.load(file) == calibration()
    router = calibration().router(budget=3)
    assert (router.threshold, router.quality, router.budget) == (0.5, 0.98, 3)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"quality": 1}', "null"])
def test_broken_calibrations(text, tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(OutriderError, match="it is of another kind"):
        Calibration.load(file)
    with pytest.raises(OutriderError, match="No such file"):
        Calibration.load(tmp_path / "none.json")


def watch(share, outputs, *, window=60, seed=0):
    rng = random.Random(seed)
    drift = DriftWatch(calibration(), window=window)
    for _ in range(outputs):
        scores = [[0.9 if rng.random() < share else 0.1] for _ in range(3)]
        engine = MediaEngine(Numbers(2), Numbers(1), Adder(), Scores(*scores))
        drift.update(engine.generate("", QualityGate(0.5)))
    return drift


def test_an_equal_share_is_no_drift():
    for seed in range(5):
        drift = watch(0.8, 40, seed=seed)
        assert not drift.drifted
        assert drift.message() is None


def test_another_share_is_drift():
    drift = watch(0.3, 40)
    assert drift.deviation < -4
    assert "of the last 60 drafts were accepted, but 80 % at calibration" in drift.message()
    assert watch(1.0, 40, window=100).deviation > 4


def test_drift_waits_for_a_full_window():
    drift = watch(0.0, 19)
    assert drift.accepted_share == 0
    assert not drift.drifted
    assert watch(0.0, 20).drifted
    assert DriftWatch(calibration()).accepted_share is None
    assert DriftWatch(calibration()).message() is None


def test_a_window_has_a_least_size():
    with pytest.raises(OutriderError, match="window is 9"):
        DriftWatch(calibration(), window=9)
