"""Routers: which blocks they give to whom."""

import math

import pytest
import torch

from outrider.errors import OutriderError
from outrider.media import DrafterOnly, FixedBlocks, QualityGate, RandomGate, Router, Stride, TargetOnly
from outrider.media.contract import Choice, Position
from outrider.media.routers.gate import parse_aggregate


def choices(router, blocks=8, seed=0):
    by_target = 0
    text = ""
    for block in range(blocks):
        choice = router.choose(Position(block=block, blocks=blocks, by_target=by_target, seed=seed))
        by_target += choice is Choice.TARGET
        text += {Choice.TARGET: "T", Choice.DRAFT: "d", Choice.SCORE: "?"}[choice]
    return text


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (TargetOnly(), "TTTTTTTT"),
        (DrafterOnly(), "dddddddd"),
        (QualityGate(0.5), "T???????"),
        (QualityGate(0.5, force_first=False), "????????"),
        (QualityGate(0.5, budget=1), "Tddddddd"),
        (QualityGate(0.5, force_first=False, budget=0), "dddddddd"),
        (Stride(3), "TddTddTd"),
        (Stride(3, force_first=False), "ddTddTdd"),
        (Stride(1), "TTTTTTTT"),
        (FixedBlocks([6, 7]), "ddddddTT"),
        (RandomGate(0), "TTTTTTTT"),
        (RandomGate(1), "Tddddddd"),
        (RandomGate(1, force_first=False), "dddddddd"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_choices(router, expected):
    assert isinstance(router, Router)
    assert choices(router) == expected


def test_random_choices_have_their_rate_and_their_seed():
    router = RandomGate(0.3)
    drawn = "".join(choices(router, seed=seed)[1:] for seed in range(300))
    assert 0.26 < drawn.count("d") / len(drawn) < 0.34
    assert choices(router, seed=5) == choices(RandomGate(0.3), seed=5)
    assert len({choices(router, seed=seed) for seed in range(20)}) > 10


@pytest.mark.parametrize(
    ("aggregate", "score"), [("min", 0.2), ("mean", 0.5), ("window:2", 0.4), ("window:1", 0.2), ("window:9", 0.5)]
)
def test_aggregates(aggregate, score):
    judgment = QualityGate(score - 0.01, aggregate=aggregate).judge(torch.tensor([0.6, 0.2, 0.6, 0.6]))
    assert judgment.score == pytest.approx(score)
    assert judgment.accepted
    assert not QualityGate(score + 0.01, aggregate=aggregate).judge(torch.tensor([0.6, 0.2, 0.6, 0.6])).accepted


def test_a_score_equal_to_the_threshold_is_accepted():
    assert QualityGate(0.5).judge(torch.tensor([0.5])).accepted


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QualityGate(math.nan), "threshold is nan"),
        (lambda: QualityGate(math.inf), "threshold is inf"),
        (lambda: QualityGate(0.5, budget=0), "budget is 0; use at least 1"),
        (lambda: QualityGate(0.5, budget=-1, force_first=False), "budget is -1"),
        (lambda: parse_aggregate("max"), "use min, mean, or window:N"),
        (lambda: parse_aggregate("window:0"), "use min, mean, or window:N"),
        (lambda: Stride(0), "k of the stride is 0"),
        (lambda: RandomGate(1.2), "use a number from 0 to 1"),
        (lambda: RandomGate(math.nan), "use a number from 0 to 1"),
        (lambda: FixedBlocks([-1]), "block -1 does not exist"),
    ],
)
def test_mistakes_are_one_line(make, message):
    with pytest.raises(OutriderError, match=message):
        make()
