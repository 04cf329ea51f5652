"""Calibration of targets whose passes take as long as if all sequences had the most tokens, for made-up times."""

import pytest

from outrider.drafting.plan.calibrate import PassTimes, measure_pass
from outrider.drafting.plan.pass_cost import CostModel
from outrider.testing import ToyTarget

SLOTS = 8


class PaddedTarget(ToyTarget):
    padded = True


def seconds(seqs, tokens):
    """Return the time of a pass in which a sequence costs more than a token."""
    return 10.0 + 2.0 * seqs + 0.5 * tokens


@pytest.fixture
def measured(monkeypatch):
    """Let passes take `seconds`. Return the tokens and sequences of those that are measured."""
    shapes = []

    def run(target, shape):
        shapes.append((shape.tokens, shape.seqs))
        return seconds(shape.seqs, shape.tokens)

    monkeypatch.setattr("outrider.drafting.plan.calibrate.run_pass", run)
    monkeypatch.setattr("outrider.drafting.plan.calibrate._SLOW", 1e9)
    return shapes


@pytest.mark.parametrize("seqs", [1, 4, SLOTS])
@pytest.mark.parametrize("each", [1, 3, 9])
def test_time_of_a_padded_target_depends_on_sequences_and_tokens_of_each(seqs, each, measured):
    cost = measure_pass(PaddedTarget(slots=SLOTS, context=512))
    model = CostModel(target=cost, draft=None, host=1.0)
    assert model.verify(seqs, each - 1, cached=0) == pytest.approx(1.0 + seconds(seqs, seqs * each))
    assert CostModel.loads(model.dumps()) == model
    assert cost.most_tokens == 32 * SLOTS


def test_time_of_another_target_depends_on_the_sum_of_the_tokens(measured):
    cost = measure_pass(ToyTarget(slots=SLOTS, context=512))
    assert cost.full_tokens == ()
    assert cost(8, seqs=1, cached=0) == cost(8, seqs=8, cached=0)


def test_padded_target_of_one_slot_is_like_any_other(measured):
    assert measure_pass(PaddedTarget(slots=1, context=512)) == measure_pass(ToyTarget(slots=1, context=512))


def test_too_short_a_measurement_of_a_padded_target_has_the_sum_of_the_tokens(measured):
    times = PassTimes(PaddedTarget(slots=SLOTS, context=512))
    times.measure(0.0)
    assert measured == [(1, 1), (SLOTS, SLOTS)]
    cost = times.cost()
    assert cost.full_tokens == ()
    assert cost.most_tokens == SLOTS
    assert cost(1, seqs=1, cached=0) == seconds(1, 1)
    assert cost(SLOTS, seqs=SLOTS, cached=0) == seconds(SLOTS, SLOTS)


def test_a_short_measurement_knows_passes_over_all_slots(measured):
    times = PassTimes(PaddedTarget(slots=SLOTS, context=512))
    times.measure(300.0)
    assert measured[:4] == [(1, 1), (SLOTS, SLOTS), (4 * SLOTS, SLOTS), (12 * SLOTS, SLOTS)]
    assert times.cost()(4 * SLOTS, seqs=SLOTS, cached=0) == seconds(SLOTS, 4 * SLOTS)
