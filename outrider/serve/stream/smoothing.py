"""Spreads the tokens of a round over the duration of a round."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from outrider.serve.stream.ticket import StreamChunk

_WEIGHT = 0.3  # weight of the last round in the expected duration


async def smoothed(
    pieces: AsyncIterator[list[StreamChunk]], times: asyncio.AbstractEventLoop
) -> AsyncIterator[list[StreamChunk]]:
    """Yield the tokens one by one, spread until the next round is expected.

    The first token is sent at once. If the next round comes early, the remaining tokens are sent with it, so no token
    is later than one round or out of order. The last chunk is never delayed.
    """
    left, due, step = deque[StreamChunk](), 0.0, 0.0
    expected, last = 0.0, 0.0
    coming = asyncio.ensure_future(anext(pieces))
    try:
        while True:
            wait = max(due - times.time(), 0.0) if left else None
            if not (await asyncio.wait([coming], timeout=wait))[0]:
                yield [left.popleft()]
                due += step
                continue
            new, now = coming.result(), times.time()
            if new[-1].last:
                yield [*left, *new]
                return
            coming = asyncio.ensure_future(anext(pieces))
            if last:
                expected += (now - last - expected) * (_WEIGHT if expected else 1.0)
            last = now
            single = [part for piece in new for part in _parted(piece)]
            out = single if not expected else single[:1]
            yield [*left, *out]
            left = deque(single[len(out) :])
            step = expected / len(single)
            due = now + step
    finally:
        coming.cancel()


def _parted(piece: StreamChunk) -> list[StreamChunk]:
    """Split a chunk into one chunk per token with text."""
    if len(piece.tokens) < 2:
        return [piece]
    parts, at = list[StreamChunk](), 0
    for i, word in enumerate(piece.token_texts):
        end = len(piece.text) if i == len(piece.token_texts) - 1 else min(at + len(word), len(piece.text))
        parts.append(
            replace(
                piece,
                text=piece.text[at:end],
                tokens=piece.tokens[i : i + 1],
                from_draft=piece.from_draft[i : i + 1],
                logprobs=piece.logprobs[i : i + 1],
                token_texts=(word,),
            )
        )
        at = end
    return parts
