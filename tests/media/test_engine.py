"""The engine: who makes a block, what the caches hold, and what a broken scorer does."""

import math

import pytest
import torch

from outrider.errors import OutriderError
from outrider.media import DrafterOnly, FixedBlocks, Maker, MediaEngine, QualityGate, StreamDecoder, Stride, TargetOnly
from outrider.media.contract import BlockGenerator, Scorer
from outrider.media.engine import block_noise
from tests.media.made_up import SHAPE, Adder, Numbers, Scores

GATE = QualityGate(0.5)


def engine(*scores, eager=False, limits=None, **drafter):
    return MediaEngine(Numbers(10), Numbers(1, **drafter), Adder(), Scores(*scores, limits=limits), eager_commits=eager)


def makers(result):
    return "".join("T" if block.maker is Maker.TARGET else "d" for block in result.blocks)


def latents(result):
    return [float(block.latent.mean()) for block in result.blocks]


def test_the_made_up_models_keep_the_contract():
    assert isinstance(Numbers(1), BlockGenerator)
    assert isinstance(Adder(), StreamDecoder)
    assert isinstance(Scores(), Scorer)


def test_a_gate_accepts_and_rejects():
    result = engine([0.9, 0.8], [0.9, 0.4], [0.5, 0.5]).generate("", GATE)
    assert makers(result) == "TdTd"
    # 10; 1 + 10; 10 + 21; 1 + 52: every block follows the blocks before it, whoever made them.
    assert latents(result) == [10, 11, 31, 53]
    assert result.content.tolist() == [10, 10, 21, 21, 52, 52, 105, 105]
    assert [block.score for block in result.blocks] == [None, pytest.approx(0.8), pytest.approx(0.4), 0.5]
    assert result.accepted_share == pytest.approx(2 / 3)
    assert result.drafter_share == 0.5
    assert result.failures == 0


def test_results_say_that_they_are_not_exact():
    result = engine([1.0], [1.0], [1.0]).generate("", QualityGate(0.5, quality=0.97))
    assert result.exact is False
    document = result.to_json()
    assert document["exact"] is False
    assert document["threshold"] == 0.5
    assert document["accepted_share"] == 1
    assert document["quality"] == 0.97
    assert set(document["blocks"][1]["seconds"]) == {"draft", "decode", "score", "commit", "generate"}
    assert document["seconds"]["generate"] > 0


def test_the_decoder_forgets_rejected_drafts():
    scores = [[0.0], [0.0], [0.0]]
    routed = engine(*scores).generate("", GATE)
    alone = engine().generate("", TargetOnly())
    assert makers(routed) == "TTTT"
    assert torch.equal(routed.content, alone.content)
    assert latents(routed) == latents(alone)
    assert routed.accepted_share == 0
    assert alone.accepted_share is None


@pytest.mark.parametrize("router", [GATE, TargetOnly(), DrafterOnly(), Stride(2), FixedBlocks([1, 2])])
def test_late_commits_change_nothing(router):
    results = [engine([0.9], [0.1], [0.9], [0.2], eager=eager).generate("", router) for eager in (False, True)]
    assert latents(results[0]) == latents(results[1])
    assert torch.equal(results[0].content, results[1].content)
    assert results[1].target_commits == 4


def test_accepted_blocks_at_the_end_are_not_committed():
    late = engine([0.9], [0.9], [0.9])
    result = late.generate("", GATE)
    assert late.target.calls == ["generate 0"]
    assert result.target_commits == 0
    eager = engine([0.9], [0.9], [0.9], eager=True)
    eager.generate("", GATE)
    assert eager.target.calls == ["generate 0", "commit 0", "commit 1", "commit 2", "commit 3"]
    target_only = engine()
    target_only.generate("", TargetOnly())
    assert target_only.target.calls[-2:] == ["commit 2", "generate 3"]
    assert target_only.drafter.calls == []


def test_the_first_block_is_neither_drafted_nor_scored():
    forced = engine([0.9], [0.9], [0.9])
    assert not forced.generate("", GATE).blocks[0].drafted
    assert len(forced.scorer.seen) == 3
    free = engine([0.9], [0.9], [0.9], [0.9])
    assert makers(free.generate("", QualityGate(0.5, force_first=False))) == "dddd"


def test_a_budget_limits_the_target():
    result = engine([0.1], [0.1], [0.1]).generate("", QualityGate(0.5, budget=2))
    assert makers(result) == "TTdd"
    assert result.blocks[2].score is None


def fail():
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("score", "message"),
    [
        ([0.9, math.nan], "not a finite number"),
        ([math.inf], "not a finite number"),
        (fail, "raised RuntimeError: out of memory"),
        ([], "shape (0,)"),
        (0.9, "shape ()"),
        ([[0.9]], "shape (1, 1)"),
        (lambda: None, "raised"),
    ],
)
def test_a_failed_score_rejects_the_draft(score, message):
    result = engine([0.9], score, [0.9]).generate("", GATE)
    assert makers(result) == "TdTd"
    assert result.failures == 1
    assert message in result.blocks[2].failure
    assert result.blocks[2].score is None
    assert result.to_json()["scorer_failures"] == 1


def test_blocks_come_one_by_one():
    media = engine([0.9], [0.1])
    run = media.stream("", GATE, blocks=3)
    assert next(run).index == 0
    assert media.drafter.calls == []
    assert [block.index for block in run] == [1, 2]
    assert run.target_commits == 2


def test_noise_depends_on_seed_and_block_only():
    assert torch.equal(block_noise(SHAPE, 3, 1), block_noise(SHAPE, 3, 1))
    assert not torch.equal(block_noise(SHAPE, 3, 1), block_noise(SHAPE, 3, 2))
    assert not torch.equal(block_noise(SHAPE, 3, 1), block_noise(SHAPE, 4, 1))


def test_mistakes_are_one_line():
    with pytest.raises(OutriderError, match=r"latents of shape \(2, 3\) and the drafter of shape \(2, 4\)"):
        engine(shape=(2, 4))
    with pytest.raises(OutriderError, match="blocks is 5; these models make 1 to 4"):
        engine().generate("", TargetOnly(), blocks=5)
    with pytest.raises(OutriderError, match="blocks is 0"):
        engine().generate("", TargetOnly(), blocks=0)
    with pytest.raises(OutriderError, match=r"threshold is 1\.5, but this scorer's scores lie from 0 to 1"):
        engine(limits=(0.0, 1.0)).generate("", QualityGate(1.5))
    wrong = engine([0.9])
    wrong.drafter.generate = lambda block, noise, cache: torch.zeros(7)
    with pytest.raises(OutriderError, match=r"the drafter made a latent of shape \(7,\) for block 1"):
        wrong.generate("", GATE)
