"""The estimate of acceptance from the margins of a draft model."""

import math

from outrider.drafting.propose.draft_model.confidence import Confidence

MARGIN = 2.0


def first_estimate(confidence, *slots):
    rule = confidence.stop_rule(slots, 0.0, (), ())
    return 1 / (1 + math.exp(-(rule.weight[0] * MARGIN + rule.bias[0])))


def draft(confidence, slot, *, accepted, times):
    for _ in range(times):
        confidence.learn(slot, [7], [MARGIN], [7 if accepted else 8])


def test_rejections_lower_the_estimates_of_their_text():
    """Texts of the first kind are easy to draft. The next text is of another kind, and an easy one runs beside it."""
    confidence = Confidence()
    for _ in range(9):
        confidence.begin_text(0)
        draft(confidence, 0, accepted=True, times=20)
    confidence.begin_text(1)
    before = first_estimate(confidence, 1)
    draft(confidence, 1, accepted=False, times=8)
    assert before > 0.95
    assert first_estimate(confidence, 1) < 0.8 < first_estimate(confidence, 0, 1) < 0.9 < first_estimate(confidence, 0)
    confidence.begin_text(1)
    assert first_estimate(confidence, 1) > 0.9
