"""The scheduler: nobody waits for ever, nobody is held up, and every row ends as it should."""

from __future__ import annotations

import random

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason, Request
from outrider.engine.prefill_budget import PrefillBudget
from outrider.engine.scheduler import Scheduler
from outrider.errors import OutriderError
from outrider.testing import ToyTarget
from tests.helpers.conformance import EVERY, PROPOSERS
from tests.helpers.engines import make_engine, run


def request(id, prompt, limit=5):
    return Request(
        id=id, prompt_token_ids=(1,) * prompt, params=SamplingParams(), seed=0, end_ids=frozenset(), max_tokens=limit
    )


def test_prompts_are_fed_in_chunks_beside_decoding_rows():
    scheduler = Scheduler(slots=4, chunk=8, context=64)
    for id, prompt in enumerate((1, 20, 3)):
        scheduler.add(request(id, prompt))
    scheduler.admit(ToyTarget().cache)
    batch = scheduler.next()
    assert [len(feed) for feed in batch.feed] == [1, 7]
    assert batch.emits == (True, False)
    assert batch.draft_budget == (4, 0)


@pytest.mark.parametrize(("base", "each"), [(0.01, 0.001), (0.03, 0.0001), (0.0, 0.01)])
def test_a_bound_on_the_time_of_a_round(base, each):
    """Prompts get what the bound leaves, once their price is known, and never nothing; alone they get all."""
    tempo, took = PrefillBudget(512, seconds=0.05), []
    tempo.learn(0, base)
    for _ in range(40):
        fed = tempo.chunk(decoding=3)
        took.append(base + each * fed)
        tempo.learn(fed, took[-1])
    least = base + each * 16
    assert took[-1] == pytest.approx(max(min(0.05, base + each * 509), least), rel=0.05)
    assert tempo.chunk(decoding=0) == 512


def test_a_scheduler_learns_how_long_its_rounds_are():
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
def test_every_row_is_served(chunk):
    """A crowd far larger than the slots, long prompts among short ones: all finish, within a bound on rounds."""
    engine = make_engine(ToyTarget(), EVERY["ngram"], rows=3, chunk=chunk)
    chance = random.Random(0)
    prompts = [[1] * chance.choice([1, 2, 60]) for _ in range(12)]
    rows = run(engine, prompts, SamplingParams(), limit=6, ends=frozenset())
    assert [row.num_output_tokens for row in rows] == [6] * 12
    assert engine.stats.rounds <= sum(-(-len(prompt) // chunk) + 6 for prompt in prompts)


def test_decoding_rows_run_in_every_round():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=4, chunk=2)
    engine.add(request(0, 1, limit=30))
    engine.add(request(1, 100))
    for _ in range(20):
        assert 0 in {row.request.id for row in engine.step()}


@pytest.mark.parametrize("rounds", range(5))
def test_abort_at_any_point_frees_the_slot(rounds):
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
        finished += [row for row in engine.step() if row.finish_reason]
    assert [row.request.id for row in finished] == [1]
    assert finished[0].finish_reason is FinishReason.LENGTH
    assert target.cache.text == [[], []]


def test_bad_sizes():
    with pytest.raises(OutriderError, match="at least 1"):
        Scheduler(slots=0, chunk=1, context=8)
    with pytest.raises(OutriderError, match="at least 1"):
        Scheduler(slots=1, chunk=0, context=8)
    with pytest.raises(OutriderError, match="above 0"):
        PrefillBudget(64, seconds=0.0)


def finished(engine):
    order = []
    while engine.busy():
        order += [row.request.id for row in engine.step() if row.finish_reason]
    return order


def urgent(id, priority, limit=4):
    params = SamplingParams(priority=priority)
    return Request(id=id, prompt_token_ids=(1,), params=params, seed=0, end_ids=frozenset(), max_tokens=limit)


def test_lower_priorities_come_first_and_equals_in_order():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=1)
    for id, priority in enumerate((0, 5, -3, 0, 5, -3)):
        engine.add(urgent(id, priority))
    assert finished(engine) == [2, 5, 0, 3, 1, 4]


def test_nobody_is_overtaken_for_ever():
    """A request of low priority against a stream of better ones, one for each that ends."""
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=1)
    engine.add(urgent(0, 1))
    ended, came = [], 0
    while 0 not in ended:
        came += 1
        engine.add(urgent(came, 0))
        done = []
        while not done:
            done = [row.request.id for row in engine.step() if row.finish_reason]
        ended += done
    assert 5 < len(ended) <= 64 // 4 + 2


def test_slots_are_given_when_prompts_can_be_fed():
    engine = make_engine(ToyTarget(), PROPOSERS["none"], k=0, rows=4, chunk=10)
    for id in range(4):
        engine.add(request(id, 25, limit=3))
    assert {row.request.id for row in engine.step()} == {0}
    assert sorted(finished(engine)) == [0, 1, 2, 3]
