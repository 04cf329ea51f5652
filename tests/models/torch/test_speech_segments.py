"""Outputs of windows, cut into segments."""

import pytest

from outrider.models.torch.speech.segments import cut_window
from outrider.models.torch.speech.timestamps import TimestampRules

RULES = TimestampRules(begin=100, end_of_text=90, no_timestamps=99, max_initial=None)


def cut(tokens, frame=0, frames=3000):
    output = cut_window(tokens, RULES, frame=frame, frames=frames, frames_per_second=100)
    return [(each.start, each.end, each.token_ids) for each in output.segments], output.frames


def test_pairs_end_segments_and_the_rest_is_dropped():
    segments, frames = cut([100, 1, 150, 150, 2, 180, 190, 3], frame=200)
    assert [each[2] for each in segments] == [(100, 1, 150), (150, 2, 180, 190)]
    assert [each[:2] for each in segments] == [pytest.approx((2.0, 3.0)), pytest.approx((3.0, 3.6))]
    assert frames == 160


def test_one_timestamp_at_the_end_ends_the_window():
    segments, frames = cut([100, 1, 150, 151, 2, 180])
    assert [each[2] for each in segments] == [(100, 1, 150), (151, 2, 180)]
    assert segments[1][:2] == pytest.approx((1.02, 1.6))
    assert frames == 3000


@pytest.mark.parametrize(
    ("tokens", "end"), [([100, 1, 2], 30.0), ([100, 1, 150], 1.0), ([1], 30.0), ([100], 30.0), ([], 30.0)]
)
def test_output_without_pairs_is_one_segment(tokens, end):
    segments, frames = cut(tokens)
    assert segments == [(0.0, pytest.approx(end), tuple(tokens))]
    assert frames == 3000


def test_every_window_advances():
    assert cut([100, 100, 1])[1] == 3000
    assert cut([100, 1, 101, 101])[1] == 2
