"""Tests of the scheduler: chunked prefill, priorities, fairness, and the end of sequences."""

import random

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason, Request
from outrider.engine.prefill_budget import PrefillBudget
from outrider.engine.scheduler import Scheduler
from outrider.errors import OutriderError
from outrider.testing import ToyTarget
from tests.helpers.conformance import EVERY, PROPOSERS
from tests.helpers.engines import make_engine, run, tightened


def request(id, prompt, limit=5):
    return Request(
        id=id, prompt_token_ids=(1,) * prompt, params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=limit
    )


def test_chunked_prefill_with_decoding_sequences():
    scheduler = Scheduler(slots=4, chunk=8, context=64)
    for id, prompt in enumerate((1, 20, 3)):
        scheduler.add(request(id, prompt))
    scheduler.admit(ToyTarget().cache)
    batch = scheduler.next()
    assert [len(feed) for feed in batch.feed] == [1, 7]
    assert batch.emits == (True, False)
    assert batch.draft_budget == (4, 0)


@pytest.mark.parametrize(("base", "per_token"), [(0.01, 0.001), (0.03, 0.0001), (0.0, 0.01)])
def test_time_limit_of_a_round(base, per_token):
    """The limit applies once the time of a token is known. A round prefills at least 16 tokens."""
    budget = PrefillBudget(512, seconds=0.05)
    budget.learn(0, base)
    for _ in range(40):
        tokens = budget.chunk(decoding=3)
        seconds = base + per_token * tokens
        budget.learn(tokens, seconds)
    minimum = base + per_token * 16
    assert seconds == pytest.approx(max(min(0.05, base + per_token * 509), minimum), rel=0.05)
    assert budget.chunk(decoding=0) == 512


def test_scheduler_records_the_time_of_rounds():
    scheduler = Scheduler(slots=2, chunk=PrefillBudget(64, seconds=1.0), context=256)
    for id, prompt in enumerate((1, 200)):
        scheduler.add(request(id, prompt))
    scheduler.admit(ToyTarget(slots=2, context=256).cache)
    fed = []
    for _ in range(8):
        batch = scheduler.next()
        fed.append(len(batch.feed[1]))
        scheduler.record_round(batch, 0.05 * fed[-1])
    assert fed[0] == 63
    assert fed[-1] == 20


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_all_requests_finish(chunk):
    """There are more requests than slots, with long and short prompts. All finish within a limit of rounds."""
    engine = make_engine(ToyTarget(), EVERY["ngram"], rows=3, chunk=chunk)
    rng = random.Random(0)
    prompts = [[1] * rng.choice([1, 2, 60]) for _ in range(12)]
    seqs = run(engine, prompts, SamplingParams(), limit=6, ends=frozenset())
    assert [seq.num_output_tokens for seq in seqs] == [6] * 12
    assert engine.stats.rounds <= sum(-(-len(prompt) // chunk) + 6 for prompt in prompts)


def test_decoding_sequences_run_in_every_round():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=4, chunk=2)
    engine.add(request(0, 1, limit=30))
    engine.add(request(1, 100))
    for _ in range(20):
        assert 0 in {seq.request.id for seq in engine.step()}


@pytest.mark.parametrize("rounds", range(5))
def test_abort_frees_the_slot_after_any_round(rounds):
    target = ToyTarget(slots=2)
    engine = make_engine(target, PROPOSERS["model"], rows=2, chunk=4)
    for id in range(3):
        engine.add(request(id, 9, limit=30))
    for _ in range(rounds):
        engine.step()
    for id in (0, 2):
        engine.abort(id)
    finished = []
    while engine.busy():
        finished += [seq for seq in engine.step() if seq.finish_reason]
    assert [seq.request.id for seq in finished] == [1]
    assert finished[0].finish_reason is FinishReason.LENGTH
    assert target.cache.text == [[], []]


def test_errors_of_invalid_sizes():
    with pytest.raises(OutriderError, match="at least 1"):
        Scheduler(slots=0, chunk=1, context=8)
    with pytest.raises(OutriderError, match="at least 1"):
        Scheduler(slots=1, chunk=0, context=8)
    with pytest.raises(OutriderError, match="above 0"):
        PrefillBudget(64, seconds=0.0)


def finish_order(engine):
    """Run all requests and return their ids in the order in which they finish."""
    order = []
    while engine.busy():
        order += [seq.request.id for seq in engine.step() if seq.finish_reason]
    return order


def request_with_priority(id, priority, limit=4):
    params = SamplingParams(priority=priority)
    return Request(id=id, prompt_token_ids=(1,), params=params, seed=0, end_ids=frozenset(), max_tokens=limit)


def test_order_by_priority_then_arrival():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=1)
    for id, priority in enumerate((0, 5, -3, 0, 5, -3)):
        engine.add(request_with_priority(id, priority))
    assert finish_order(engine) == [2, 5, 0, 3, 1, 4]


def test_low_priority_request_is_not_delayed_forever():
    """A new request of better priority arrives whenever one ends."""
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=1)
    engine.add(request_with_priority(0, 1))
    finished = []
    arrivals = 0
    while 0 not in finished:
        arrivals += 1
        engine.add(request_with_priority(arrivals, 0))
        done = []
        while not done:
            done = [seq.request.id for seq in engine.step() if seq.finish_reason]
        finished += done
    assert 5 < len(finished) <= 64 // 4 + 2


def test_admission_waits_until_the_prompt_can_be_fed():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=4, chunk=10)
    for id in range(4):
        engine.add(request(id, 25, limit=3))
    assert {seq.request.id for seq in engine.step()} == {0}
    assert sorted(finish_order(engine)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("prompts", "admitted"),
    [
        ((5, 5, 5, 5), 2),  # the first two have more tokens than the round may feed
        ((8, 2), 1),
        ((1, 1, 1, 1), 4),  # one token is no prompt to feed
        ((1, 1, 6, 2), 3),  # sequences of one token leave 6 tokens of the round
        ((1, 1, 5, 2), 4),
    ],
)
def test_admission_stops_when_the_round_is_full(prompts, admitted):
    scheduler = Scheduler(slots=4, chunk=8, context=64)
    for id, prompt in enumerate(prompts):
        scheduler.add(request(id, prompt))
    assert len(scheduler.admit(ToyTarget().cache)) == admitted


def test_admission_reserves_memory_for_all_running_sequences():
    scheduler = Scheduler(slots=4, chunk=64, context=64)
    for id in range(4):
        scheduler.add(request(id, 4, limit=6))
    cache = tightened(ToyTarget(), 35).cache  # each sequence needs 10 tokens
    assert len(scheduler.admit(cache)) == 3
    assert scheduler.admit(cache) == []
