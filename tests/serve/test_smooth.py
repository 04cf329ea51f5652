"""Tokens spread over time: never out of order, never later than a round, and the end at once; in a time of its own."""

from __future__ import annotations

import asyncio

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Completion, FinishReason
from outrider.llm import LLM
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.stream.smoothing import smoothed
from outrider.serve.stream.text import StreamText
from outrider.serve.stream.ticket import StreamChunk, StreamContent
from tests.serve.test_serve import OPTIONS

END = object()


class Leaping(asyncio.SelectorEventLoop):
    """A loop whose time passes only while all wait, and then at once."""

    def __init__(self):
        super().__init__()
        self.now, look = 1.0, self._selector.select

        def select(timeout):
            self.now += timeout or 0.0
            return look(0)

        self._selector.select = select

    def time(self):
        return self.now


def leap(work):
    with asyncio.Runner(loop_factory=Leaping) as runner:
        return runner.run(work)


def heard(driver, watch):
    """The pieces of a text of 64 tokens."""

    async def run():
        (mine,) = driver.submit("a = 1", SamplingParams(max_tokens=64, ignore_eos=True), watch)
        return [each async for pieces in mine.chunks() for each in pieces]

    driver.start()
    try:
        return asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        driver.stop()


def piece(*words, end=False):
    done = Completion(
        prompt_token_ids=(1,),
        token_ids=(),
        text="",
        finish_reason=FinishReason.LENGTH,
        seed=0,
        from_draft=(),
        logprobs=(),
        stats=None,
    )
    tokens = tuple(map(ord, "".join(word[0] for word in words)))
    return StreamChunk(
        text="".join(words),
        token_texts=words,
        tokens=tokens,
        from_draft=(True,) * len(words),
        completion=done if end else None,
    )


async def told(rounds):
    """(seconds, words) of what comes out where rounds come in so."""
    loop, out = asyncio.get_running_loop(), []

    async def come():
        for wait, *words in rounds:
            await asyncio.sleep(wait)
            yield [piece(*[word for word in words if word is not END], end=words[-1] is END)]

    began = loop.time()
    async for pieces in smoothed(come(), loop):
        out.append((round(loop.time() - began, 6), [each.text for each in pieces]))
    return out


def test_tokens_come_one_by_one_until_the_next_round():
    assert leap(told([(0.0, "a"), (1.0, "b", "c", "d", "e"), (1.0, "f", "g"), (1.0, "h", END)])) == [
        (0.0, ["a"]),
        (1.0, ["b"]),
        (1.25, ["c"]),
        (1.5, ["d"]),
        (1.75, ["e"]),
        (2.0, ["f"]),
        (2.5, ["g"]),
        (3.0, ["h"]),
    ]


def test_what_is_left_goes_out_with_the_next_round():
    out = leap(told([(0.0, "a"), (1.0, "b", "c", "d", "e"), (0.3, "f", "g"), (5.0, "h", END)]))
    assert out[:4] == [(0.0, ["a"]), (1.0, ["b"]), (1.25, ["c"]), (1.3, ["d", "e", "f"])]
    assert out[-1] == (6.3, ["h"])


@pytest.mark.parametrize("last", [("z", END), ("y", "z", END)])
def test_the_end_waits_for_nothing(last):
    out = leap(told([(0.0, "a"), (1.0, "b", "c", "d"), (0.1, *last)]))
    assert out[-1][0] == 1.1
    assert "".join(word for _, words in out for word in words) == "abcd" + "".join(last[:-1])


def test_text_that_is_held_back_stays_in_order():
    async def come():
        yield [piece("x")]
        await asyncio.sleep(1)
        held = piece("ab", "cd", "ef")
        yield [StreamChunk(text="abc", token_texts=held.token_texts, tokens=held.tokens, from_draft=held.from_draft)]
        await asyncio.sleep(1)
        yield [StreamChunk(text="def", token_texts=(), completion=piece("x", end=True).completion)]

    async def run():
        return [each async for pieces in smoothed(come(), asyncio.get_running_loop()) for each in pieces]

    out = leap(run())
    assert [each.text for each in out] == ["x", "ab", "c", "", "def"]
    assert [len(each.tokens) for each in out] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("watch", "together", "told"),
    [
        (StreamContent.TEXT, 1e9, [1, 64]),
        (StreamContent.TEXT, 0.0, list(range(1, 65))),
        (StreamContent.ROUNDS, 1e9, [1, 64]),
        (StreamContent.END, 0.0, [1, 64]),
    ],
)
def test_quick_rounds_are_told_together_and_edges_at_once(watch, together, told, monkeypatch):
    monkeypatch.setattr("outrider.serve.async_llm.TOGETHER", together)
    driver, given = (
        AsyncLLM(LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=1), max_queued_requests=1, max_num_seqs=1),
        [],
    )
    wake = driver._wake

    def noted(tickets):
        given.extend(each.given for each in tickets)
        wake(tickets)

    monkeypatch.setattr(driver, "_wake", noted)

    pieces = heard(driver, watch)
    assert given == told  # tokens, each time that the reader was woken
    assert sum(len(each.tokens) for each in pieces) == 64
    assert len(pieces) == 64 if watch is StreamContent.ROUNDS else len(pieces) <= len(told)
    assert pieces[-1].completion is not None
    if watch is not StreamContent.END:
        assert "".join(each.text for each in pieces) == pieces[-1].completion.text


def test_readers_hear_of_what_is_there_before_a_round_that_reads_prompts(monkeypatch):
    monkeypatch.setattr("outrider.serve.async_llm.TOGETHER", 1e9)
    driver = AsyncLLM(
        LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=2), max_queued_requests=2, max_num_seqs=2
    )  # its thread does not run
    params = SamplingParams(max_tokens=64, ignore_eos=True)

    async def run():
        (mine,) = driver.submit("a = 1", params, StreamContent.TEXT)
        for _ in range(9):
            driver._run_round()
        before = mine.written, mine.given
        monkeypatch.setattr("outrider.serve.async_llm.TOGETHER", 0.0)
        monkeypatch.setattr(driver, "_step", lambda: None)
        driver._run_round()  # a round in which nobody's prompt is read
        quiet = mine.given
        driver.submit("b = 2", params, StreamContent.TEXT)
        driver._run_round()
        return *before, quiet, mine.given

    assert asyncio.run(run()) == (9, 1, 1, 9)


@pytest.mark.parametrize("watch", [StreamContent.TEXT, StreamContent.ROUNDS])
def test_what_cannot_be_told_ends_its_reader_although_no_round_follows(watch, monkeypatch):
    monkeypatch.setattr("outrider.serve.async_llm.TOGETHER", 1e9)
    driver = AsyncLLM(LLM(**{**OPTIONS, "proposer": "none"}, max_num_seqs=1), max_queued_requests=1, max_num_seqs=1)
    whole = driver._chunk

    def broken(row, ticket):
        if row.num_output_tokens > 40:
            raise RuntimeError("out of words")
        return whole(row, ticket)

    monkeypatch.setattr(driver, "_chunk", broken)

    pieces = heard(driver, watch)
    assert "out of words" in pieces[-1].error


def test_words_add_up_to_the_text():
    llm = LLM(**OPTIONS, max_num_seqs=1)
    tokens = llm.encode("naïve “quotes” – 日本語 🙂🙃 done")
    wording = StreamText(llm.decode, lambda token: llm.decode([token]), ())
    told = [(wording.grow(some, None), wording.words(some)) for some in (tokens[i : i + 3] for i in range(0, 99, 3))]
    assert all("".join(words) == text for text, words in told)
    assert "".join(text for text, _ in told) == llm.decode(tokens)
    assert "�" not in "".join(text for text, _ in told)


def test_a_stop_string_that_may_come_is_held_back():
    wording = StreamText(lambda tokens: "".join(map(chr, tokens)), chr, ("END",))
    assert [wording.grow([ord(letter)], None) for letter in "aENxEN"] == ["a", "", "", "ENx", "", ""]
