"""Tests of streams: smoothed chunks, and how the tokens of rounds become chunks of text.

The tests of smoothing run on an event loop with simulated time.
"""

import asyncio
from dataclasses import replace

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Completion, FinishReason
from outrider.engine.codec import EncodedPrompt
from outrider.llm import LLM
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.stream.request_stream import PUBLISH_INTERVAL, StreamChunk, StreamContent, Wakeup
from outrider.serve.stream.smoothing import smooth_chunks
from outrider.serve.stream.text import StreamText
from tests.helpers.serving import OPTIONS

LAST = object()  # marks the last round


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time, which advances at once while all tasks wait."""

    def __init__(self):
        super().__init__()
        self.now = 1.0
        real_select = self._selector.select

        def select(timeout):
            self.now += timeout or 0.0
            return real_select(0)

        self._selector.select = select

    def time(self):
        return self.now


def run_simulated(coroutine):
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(coroutine)


def collect_chunks(async_llm, content):
    """Return the chunks of a completion of 64 tokens."""

    async def run():
        (stream,) = async_llm.submit(
            EncodedPrompt(async_llm.codec.encode("a = 1")), SamplingParams(max_tokens=64, ignore_eos=True), content
        )
        return [chunk async for chunks in stream.chunks() for chunk in chunks]

    async_llm.start()
    try:
        return asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        async_llm.stop()


def make_chunk(*texts, last=False):
    """Return a chunk with one token for each text."""
    completion = Completion(
        prompt_token_ids=(1,),
        token_ids=(),
        text="",
        finish_reason=FinishReason.LENGTH,
        seed=0,
        from_draft=(),
        logprobs=(),
        stats=None,
    )
    return StreamChunk(
        text="".join(texts),
        token_texts=texts,
        tokens=tuple(ord(text[0]) for text in texts),
        from_draft=(True,) * len(texts),
        completion=completion if last else None,
    )


async def smoothed_texts(rounds):
    """Return [(seconds, texts)] of the smoothed chunks. A round is (seconds after the round before, *token texts)."""
    loop = asyncio.get_running_loop()
    output = []

    async def chunks_of_rounds():
        for wait, *texts in rounds:
            await asyncio.sleep(wait)
            yield [make_chunk(*[text for text in texts if text is not LAST], last=texts[-1] is LAST)]

    start = loop.time()
    async for chunks in smooth_chunks(chunks_of_rounds(), loop):
        output.append((round(loop.time() - start, 6), [chunk.text for chunk in chunks]))
    return output


def test_tokens_are_spread_until_next_round():
    assert run_simulated(
        smoothed_texts([(0.0, "a"), (1.0, "b", "c", "d", "e"), (1.0, "f", "g"), (1.0, "h", LAST)])
    ) == [
        (0.0, ["a"]),
        (1.0, ["b"]),
        (1.25, ["c"]),
        (1.5, ["d"]),
        (1.75, ["e"]),
        (2.0, ["f"]),
        (2.5, ["g"]),
        (3.0, ["h"]),
    ]


def test_remaining_tokens_are_sent_with_early_round():
    output = run_simulated(smoothed_texts([(0.0, "a"), (1.0, "b", "c", "d", "e"), (0.3, "f", "g"), (5.0, "h", LAST)]))
    assert output[:4] == [(0.0, ["a"]), (1.0, ["b"]), (1.25, ["c"]), (1.3, ["d", "e", "f"])]
    assert output[-1] == (6.3, ["h"])


@pytest.mark.parametrize("last", [("z", LAST), ("y", "z", LAST)])
def test_last_chunk_is_not_delayed(last):
    output = run_simulated(smoothed_texts([(0.0, "a"), (1.0, "b", "c", "d"), (0.1, *last)]))
    assert output[-1][0] == 1.1
    assert "".join(text for _, texts in output for text in texts) == "abcd" + "".join(last[:-1])


def test_held_back_text_stays_in_order():
    async def rounds():
        yield [make_chunk("x")]
        await asyncio.sleep(1)
        # "def" is held back, so the chunk has less text than its tokens.
        yield [replace(make_chunk("ab", "cd", "ef"), text="abc")]
        await asyncio.sleep(1)
        yield [StreamChunk(text="def", token_texts=(), completion=make_chunk("x", last=True).completion)]

    async def run():
        return [chunk async for chunks in smooth_chunks(rounds(), asyncio.get_running_loop()) for chunk in chunks]

    output = run_simulated(run())
    assert [chunk.text for chunk in output] == ["x", "ab", "c", "", "def"]
    assert [len(chunk.tokens) for chunk in output] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("content", "interval", "expected"),
    [
        (StreamContent.TEXT, 1e9, [1, 64]),
        (StreamContent.TEXT, 0.0, list(range(1, 65))),
        (StreamContent.ROUNDS, 1e9, [1, 64]),
        (StreamContent.END, 0.0, [1, 64]),
    ],
)
def test_first_and_last_token_are_published_at_once(content, interval, expected, monkeypatch):
    monkeypatch.setattr("outrider.serve.async_llm.PUBLISH_INTERVAL", interval)
    llm = LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=1)
    async_llm = AsyncLLM(llm, max_queued_requests=1, max_num_seqs=1)
    wake = Wakeup.notify
    published = []  # number of published tokens at each wakeup of the reader

    def record_and_wake(wakeup, streams):
        published.extend(stream.num_published for stream in streams)
        wake(wakeup, streams)

    monkeypatch.setattr(Wakeup, "notify", record_and_wake)

    chunks = collect_chunks(async_llm, content)
    assert published == expected
    assert sum(len(chunk.tokens) for chunk in chunks) == 64
    assert len(chunks) == 64 if content is StreamContent.ROUNDS else len(chunks) <= len(expected)
    assert chunks[-1].completion is not None
    if content is not StreamContent.END:
        assert "".join(chunk.text for chunk in chunks) == chunks[-1].completion.text


def test_tokens_are_published_before_round_with_prefill(monkeypatch):
    now = 0.0
    monkeypatch.setattr("outrider.serve.async_llm.perf_counter", lambda: now)
    llm = LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=2)
    async_llm = AsyncLLM(llm, max_queued_requests=2, max_num_seqs=2)
    step = llm.engine.step
    published = []  # number of published tokens before each round

    async def submit(prompt):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        return async_llm.submit(EncodedPrompt(async_llm.codec.encode(prompt)), params, StreamContent.TEXT)[0]

    async def run():
        loop = asyncio.get_running_loop()
        stream = await submit("a = 1")

        def step_and_submit():
            nonlocal now
            published.append(stream.num_published)
            if len(published) == 10:
                now = 0.6 * PUBLISH_INTERVAL
            if len(published) == 11:
                asyncio.run_coroutine_threadsafe(submit("b = 2"), loop).result(30)
            return step()

        monkeypatch.setattr(llm.engine, "step", step_and_submit)
        async_llm.start()
        async for _ in stream.chunks():
            pass

    try:
        asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        async_llm.stop()
    assert published[1:12] == [1] * 10 + [11]  # round 11 has no prefill, round 12 has one


@pytest.mark.parametrize("content", [StreamContent.TEXT, StreamContent.ROUNDS])
def test_decoding_error_ends_stream_without_further_round(content, monkeypatch):
    monkeypatch.setattr("outrider.serve.async_llm.PUBLISH_INTERVAL", 1e9)
    llm = LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=1)
    async_llm = AsyncLLM(llm, max_queued_requests=1, max_num_seqs=1)
    num_tokens = 0

    def fail_after_40_tokens(**fields):
        nonlocal num_tokens
        num_tokens += len(fields.get("tokens", ()))
        if num_tokens > 40 and "tokens" in fields:
            raise RuntimeError("injected failure")
        return StreamChunk(**fields)

    monkeypatch.setattr("outrider.serve.async_llm.StreamChunk", fail_after_40_tokens)

    chunks = collect_chunks(async_llm, content)
    assert "injected failure" in chunks[-1].error


def test_token_texts_concatenate_to_text():
    llm = LLM(**OPTIONS, max_num_seqs=1)
    tokens = llm.encode("naïve “quotes” – 日本語 🙂🙃 done")
    stream_text = StreamText(llm.decode, lambda token: llm.decode([token]), ())
    full_text = ""
    for i in range(0, 99, 3):
        text = stream_text.add_tokens(tokens[i : i + 3], None)
        assert "".join(stream_text.token_texts(tokens[i : i + 3])) == text
        full_text += text
    assert full_text == llm.decode(tokens)
    assert "�" not in full_text


def test_possible_stop_string_is_held_back():
    stream_text = StreamText(lambda tokens: "".join(map(chr, tokens)), chr, ("END",))
    assert [stream_text.add_tokens([ord(letter)], None) for letter in "aENxEN"] == ["a", "", "", "ENx", "", ""]
