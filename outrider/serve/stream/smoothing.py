"""Spreads the tokens of a round over the duration of a round."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from outrider.serve.stream.request_stream import StreamChunk

_LAST_ROUND_WEIGHT = 0.3  # weight of the last round in the expected duration of a round


async def smooth_chunks(
    chunks: AsyncIterator[list[StreamChunk]], loop: asyncio.AbstractEventLoop
) -> AsyncIterator[list[StreamChunk]]:
    """Yield the tokens one by one, spread until the next round is expected.

    The first token is sent at once. If the next round comes early, the remaining tokens are sent
    with it, so no token is later than one round or out of order. The last chunk is never delayed.

    Args:
        chunks: the chunks of each round.
        loop: the event loop whose clock is used.
    """
    pending = deque[StreamChunk]()
    next_send = 0.0  # time at which the first pending chunk is sent
    interval = 0.0  # seconds between two pending chunks
    expected_duration = 0.0  # of a round; 0.0: not known yet
    last_arrival = 0.0
    next_chunks = asyncio.ensure_future(anext(chunks))
    try:
        while True:
            timeout = max(next_send - loop.time(), 0.0) if pending else None
            done, _ = await asyncio.wait([next_chunks], timeout=timeout)
            if not done:
                yield [pending.popleft()]
                next_send += interval
                continue
            arrived = next_chunks.result()
            now = loop.time()
            if arrived[-1].last:
                yield [*pending, *arrived]
                return
            next_chunks = asyncio.ensure_future(anext(chunks))
            if last_arrival:
                weight = _LAST_ROUND_WEIGHT if expected_duration else 1.0
                expected_duration += (now - last_arrival - expected_duration) * weight
            last_arrival = now
            token_chunks = [part for chunk in arrived for part in _split_by_token(chunk)]
            # Send everything while the duration of a round is not known.
            send_now = token_chunks[:1] if expected_duration else token_chunks
            yield [*pending, *send_now]
            pending = deque(token_chunks[len(send_now) :])
            interval = expected_duration / len(token_chunks)
            next_send = now + interval
    finally:
        next_chunks.cancel()


def _split_by_token(chunk: StreamChunk) -> list[StreamChunk]:
    """Return a chunk as one chunk per token."""
    if len(chunk.tokens) < 2:
        return [chunk]
    parts = list[StreamChunk]()
    start = 0
    last = len(chunk.token_texts) - 1
    for i, token_text in enumerate(chunk.token_texts):
        # Text that is held back for a stop string makes the chunk shorter or longer than the texts
        # of its tokens.
        end = len(chunk.text) if i == last else min(start + len(token_text), len(chunk.text))
        parts.append(
            replace(
                chunk,
                text=chunk.text[start:end],
                tokens=chunk.tokens[i : i + 1],
                from_draft=chunk.from_draft[i : i + 1],
                logprobs=chunk.logprobs[i : i + 1],
                token_texts=(token_text,),
            )
        )
        start = end
    return parts
