"""Cut the output of one window into segments, and find where the next window begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.models.torch.speech.timestamps import SECONDS_PER_TIMESTAMP, TimestampRules


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """A part of a transcript, as tokens."""

    start: float  # seconds from the beginning of the recording
    end: float
    frame: int  # the first frame of its window
    token_ids: tuple[int, ...]  # with timestamps


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowOutput:
    """The segments of a window."""

    segments: tuple[TokenSegment, ...]
    frames: int  # from the beginning of this window to that of the next one


def cut_window(
    tokens: Sequence[int], rules: TimestampRules, *, frame: int, frames: int, frames_per_second: float
) -> WindowOutput:
    """Cut an output where two timestamps follow each other, as `transformers.generate` does.

    The text behind the last such pair may be cut off by the window's end. It is dropped, and the
    next window begins there. An output that ends with one timestamp says that no speech follows,
    and the next window begins after this one; so it does after an output without such a pair.

    Args:
        tokens: the output, without the end of the text.
        frame: the first frame of the window.
        frames: frames of the window, without padding.
        frames_per_second: frames per second of audio.
    """
    offset = frame / frames_per_second
    is_timestamp = [token >= rules.begin for token in tokens]
    pairs = [i + 1 for i in range(len(tokens) - 1) if is_timestamp[i] and is_timestamp[i + 1]]
    if not pairs:
        return WindowOutput(segments=(_whole(tokens, rules, frame, frames, frames_per_second),), frames=frames)
    ends_alone = is_timestamp[-2:] == [False, True]
    stops = [*pairs, len(tokens)] if ends_alone else [*pairs[:-1], pairs[-1] + 1]
    segments = []
    begin = 0
    for stop in stops:
        part = tuple(tokens[begin:stop])
        # The last segment keeps both timestamps of its pair. The first one is its end.
        last = part[-1] if ends_alone or stop != stops[-1] else part[-2]
        start_seconds = (part[0] - rules.begin) * SECONDS_PER_TIMESTAMP
        end_seconds = (last - rules.begin) * SECONDS_PER_TIMESTAMP
        segments.append(
            TokenSegment(start=offset + start_seconds, end=offset + end_seconds, frame=frame, token_ids=part)
        )
        begin = stop
    if ends_alone:
        return WindowOutput(segments=tuple(segments), frames=frames)
    advance = round((tokens[pairs[-1] - 1] - rules.begin) * SECONDS_PER_TIMESTAMP * frames_per_second)
    # The rules let no segment end at 0.00 s, but a window that does not advance would never end.
    return WindowOutput(segments=tuple(segments), frames=advance or frames)


def _whole(
    tokens: Sequence[int], rules: TimestampRules, frame: int, frames: int, frames_per_second: float
) -> TokenSegment:
    """Return an output without a pair of timestamps as one segment."""
    offset = frame / frames_per_second
    latest = rules.end_of(tokens).latest
    seconds = int(frames / frames_per_second / SECONDS_PER_TIMESTAMP + 1e-9) * SECONDS_PER_TIMESTAMP
    if latest is not None and latest != rules.begin:
        seconds = (latest - rules.begin) * SECONDS_PER_TIMESTAMP
    return TokenSegment(start=offset, end=offset + seconds, frame=frame, token_ids=tuple(tokens))
