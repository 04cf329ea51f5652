"""Threads that share an engine."""

import gc
import threading
from contextlib import suppress

import pytest

from outrider import LLM, OutriderError, SamplingParams
from outrider.engine.turns import Turns
from outrider.models.loader.embedded import embedded

PROMPTS = [f"def f{i}(x):\n    return" for i in range(6)]
WANT = SamplingParams(max_tokens=24, ignore_eos=True)
_PATIENCE = 60.0  # seconds until a thread counts as hung


@pytest.fixture(scope="module")
def llm():
    return LLM(target=embedded("nano"), proposer="ngram", dtype="float32", k=3, max_num_seqs=3, max_model_len=128)


@pytest.fixture(scope="module")
def texts(llm):
    return [llm.generate(prompt, WANT)[0].text for prompt in PROMPTS]


def in_threads(*functions):
    """Run functions in threads that start together. Return their results in order; an error is a result, too."""
    results = [None] * len(functions)
    start = threading.Barrier(len(functions))

    def run(i):
        start.wait()
        try:
            results[i] = functions[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    return results


def streamed(llm, prompt):
    chunks = list(llm.stream(prompt, WANT))
    done = chunks[-1].completion
    assert "".join(chunk.text for chunk in chunks) == done.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == done.token_ids
    assert tuple(drafted for chunk in chunks for drafted in chunk.from_draft) == done.from_draft
    return done.text


def test_threads_get_the_texts_of_one(llm, texts):
    for _ in range(3):
        found = in_threads(
            *(lambda prompt=prompt: llm.generate(prompt, WANT)[0].text for prompt in PROMPTS[:4]),
            *(lambda prompt=prompt: streamed(llm, prompt) for prompt in PROMPTS[4:]),
        )
        assert found == texts
    assert not llm.engine.busy()


def test_requests_of_threads_run_in_the_same_rounds(llm, texts):
    sizes = []
    llm.engine.on_round = lambda round: sizes.append(len(round.batch.seqs))
    with llm.engine.turns:  # so that both threads have queued their requests before the first round
        threads = [threading.Thread(target=llm.generate, args=(prompt, WANT), daemon=True) for prompt in PROMPTS[:2]]
        for thread in threads:
            thread.start()
        while len(llm.engine.turns._calls) < 2:
            threads[0].join(0.01)
    for thread in threads:
        thread.join(_PATIENCE)
        assert not thread.is_alive()
    llm.engine.on_round = None
    assert sizes[0] == 2


def test_a_stream_that_is_not_read_does_not_stop_others(llm, texts):
    stream = llm.stream(PROMPTS[0], WANT)
    next(stream)
    assert in_threads(lambda: llm.generate(PROMPTS[1], WANT)[0].text) == [texts[1]]
    stream.close()
    assert not llm.engine.busy()


def test_a_stream_may_be_left_within_a_round(llm, texts):
    """The garbage collector may end it there."""
    streams = [llm.stream(PROMPTS[0], WANT)]
    next(streams[0])

    def leave(_):
        streams.clear()
        gc.collect()

    llm.engine.on_round = leave
    assert llm.generate(PROMPTS[1], WANT)[0].text == texts[1]
    llm.engine.on_round = None
    assert not llm.engine.busy()


def test_an_error_in_one_thread_ends_no_other(llm, texts):
    found = in_threads(
        lambda: llm.generate(PROMPTS[0], WANT)[0].text,
        lambda: llm.generate([99999999], WANT),
        lambda: llm.generate(PROMPTS[1], WANT)[0].text,
    )
    assert [found[0], found[2]] == texts[:2]
    assert isinstance(found[1], OutriderError)


def test_all_threads_get_the_error_of_an_engine_that_cannot_run(llm):
    llm.engine.block("no memory")
    found = in_threads(*[lambda: llm.generate(PROMPTS[0], WANT)] * 3)
    llm.engine.block("")
    assert list(map(str, found)) == ["no memory"] * 3
    assert not llm.engine.busy()


def test_weights_change_between_rounds(llm, texts):
    done = threading.Event()

    def generate():
        found = [llm.generate(prompt, WANT)[0].text for prompt in PROMPTS[:3]]
        done.set()
        return found

    def forget():
        while not done.is_set():
            llm.weights.reset_prefix_cache()

    assert in_threads(generate, forget) == [texts[:3], None]


def test_who_needs_no_round_goes_first():
    turns, order = Turns(), []
    turns.take()

    def wait(name, wants_round):
        turns.take(lambda: wants_round)
        order.append(name)
        turns.give()

    threads = []
    for case in (("first", True), ("second", True), ("no round", False)):
        threads.append(threading.Thread(target=wait, args=case, daemon=True))
        threads[-1].start()
        while len(turns._waiting) < len(threads):
            threads[-1].join(0.01)
    turns.give()
    for thread in threads:
        thread.join(_PATIENCE)
    assert order == ["no round", "first", "second"]


def test_calls_wait_for_the_end_of_a_turn_and_their_errors_leave_it_free():
    turns, order = Turns(), []
    with turns:
        with turns:
            turns.call(lambda: order.append("call"))
        order.append("turn")
    assert order == ["turn", "call"]
    with suppress(ZeroDivisionError):
        turns.call(lambda: 1 / 0)
    assert in_threads(lambda: turns.call(lambda: order.append("other"))) == [None]
    assert order[-1] == "other"
