"""Figures of routers: intervals, speedups, controls, tables and plots."""

import sys

import pytest

from outrider.errors import OutriderError
from outrider.media import DrafterOnly, QualityGate, Stride, TargetOnly, load_models
from outrider.media.evaluation.ablations import controls, first_block_share
from outrider.media.evaluation.bootstrap import ratio_interval
from outrider.media.evaluation.plot import check_plot_file, draw_plot
from outrider.media.evaluation.summary import summarize
from outrider.media.evaluation.table import summary_table
from outrider.media.evaluation.thresholds import draft_scores, thresholds_at
from outrider.media.evaluation.trials import Quality, Trial, run_trials
from outrider.media.models.captions import LANGUAGE
from outrider.media.results import Seconds
from outrider.runtime.report.console import standard_output
from tests.media.made_up import write_models


def trial(router, prompt, *, score, seconds, by_target, drafted=0, scored=0, accepted=0, rounds=2):
    return Trial(
        router=router,
        prompt=prompt,
        round=prompt * rounds // 4,
        seconds=seconds,
        blocks=4,
        by_target=by_target,
        drafted=drafted,
        scored=scored,
        accepted=accepted,
        failures=0,
        quality=Quality(score=score, held_out=score / 2, distance=1 - score),
    )


@pytest.fixture
def summaries():
    base = [
        trial("all", i, score=0.8, by_target=4, seconds=Seconds(generate=7, commit=1, decode=0.4)) for i in range(4)
    ]
    gated = [
        trial(
            "gate",
            i,
            score=0.72,
            by_target=2,
            drafted=3,
            scored=3,
            accepted=2,
            seconds=Seconds(generate=2, decode=0.5, score=0.3, draft=(0.2, 0.2, 1.4, 1.4)[i]),
        )
        for i in range(4)
    ]
    return summarize([each for pair in zip(base, gated, strict=True) for each in pair], reference="all")


def test_summaries(summaries):
    base, gate = summaries
    assert base.quality.value == base.quality.low == base.quality.high == 1
    assert base.speedup.median == 1
    assert base.accepted_share is None
    assert base.overhead is None
    assert gate.score == pytest.approx(0.72)
    assert gate.quality.value == pytest.approx(0.9)
    assert gate.held_out.value == pytest.approx(0.9)
    assert gate.distance == pytest.approx(0.28)
    # Rounds of 16.8 against 6 and 8.4 seconds.
    assert (gate.speedup.min, gate.speedup.max) == pytest.approx((2, 2.8))
    assert gate.speedup.median == pytest.approx(2.4)
    assert gate.ms == pytest.approx(3600)
    assert gate.target_share == 0.5
    assert gate.accepted_share == pytest.approx(2 / 3)
    # Decoding one of 5 contents and scoring one of 3 drafts, of 2 seconds for a block of the target.
    assert gate.overhead == pytest.approx((0.5 / 5 + 0.3 / 3) / 2)


def test_intervals_hold_their_estimate():
    values = [0.5 + 0.01 * (i % 7) for i in range(50)]
    interval = ratio_interval(values, [0.55] * 50)
    assert interval.low < interval.value < interval.high
    assert interval == ratio_interval(values, [0.55] * 50)
    assert interval.high - interval.low < 0.03
    wide = ratio_interval(values[:5], [0.55] * 5)
    assert wide.high - wide.low > interval.high - interval.low


def test_thresholds_reject_their_share():
    scores = [i / 100 for i in range(101)]
    assert thresholds_at(scores, (0.2, 0.0, 0.5, 0.5)) == [0.0, 0.2, 0.5]


def test_controls_have_as_many_target_blocks(summaries):
    gate = QualityGate(0.5)
    compared = controls(gate, summaries[1], other_threshold=0.6, blocks=8)
    names = [router.name for router in compared.all()]
    assert names == [
        "gate mean ≥ 0.6",
        "gate min ≥ 0.5, not forced",
        "random 0.57",
        "random 0.50, not forced",
        "first block only",
        "first 4 blocks",
        "last 4 blocks",
        "stride 2",
        "stride 3",
        "stride 4",
    ]
    assert compared.last_blocks.blocks == {4, 5, 6, 7}


def test_the_share_of_the_first_block(summaries):
    base, gate = summaries
    assert first_block_share(gate, gate, base) == pytest.approx(0)
    assert first_block_share(gate, base, base) == pytest.approx(1)
    assert first_block_share(base, base, gate) is None


def test_trials_table_and_plot(tmp_path):
    models = load_models(write_models(tmp_path))
    prompts = LANGUAGE.random_captions(3, 0)
    scores = draft_scores(models.engine, prompts, aggregate="min")
    assert len(scores) == 3 * (models.video.blocks - 1)
    (threshold,) = thresholds_at(scores, [0.5])
    routers = [TargetOnly(), DrafterOnly(), QualityGate(threshold), Stride(2)]
    trials = run_trials(models.engine, models.held_out_scorer, routers, prompts, rounds=3)
    assert len(trials) == 12
    assert {each.round for each in trials} == {0, 1, 2}
    base, drafter, gate, stride = found = summarize(trials, reference="target-only")
    assert base.distance == 0
    assert drafter.distance > gate.distance > 0
    assert (base.target_share, drafter.target_share, stride.target_share) == (1, 0, 0.6)
    assert 0 < gate.accepted_share < 1
    assert gate.overhead > 0
    console = standard_output()
    with console.capture() as captured:
        console.print(summary_table("Figures", found))
    assert "stride 2" in captured.get()
    assert "…" not in captured.get()
    for name in ("plot.svg", "plot.png"):
        file = check_plot_file(str(tmp_path / name))
        draw_plot([("gates", "o", True, [gate]), ("others", "x", False, [base, drafter])], file)
        assert file.stat().st_size > 1000


def test_wrong_names_of_plots(tmp_path, monkeypatch):
    with pytest.raises(OutriderError, match=r"end it with \.svg, \.png, \.pdf"):
        check_plot_file(str(tmp_path / "plot.txt"))
    with pytest.raises(OutriderError, match="cannot be written"):
        check_plot_file(str(tmp_path / "none" / "plot.svg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OutriderError, match="needs matplotlib"):
        check_plot_file(str(tmp_path / "plot.svg"))
