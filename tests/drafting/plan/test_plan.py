"""Tests of the cost model, its calibration, and the cost planner."""

import math
import os
import random
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Batch, DraftBudget, Request, SequenceState
from outrider.drafting.plan.calibrate import PassTimes, measure_pass
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.known_costs import cost_file, known_costs
from outrider.drafting.plan.pass_cost import Clock, CostModel, PassCost, Sample
from outrider.drafting.plan.pricing import DraftPricing
from outrider.drafting.plan.round_load import RoundLoad
from outrider.drafting.plan.window import FIXED_DRAFT_LENGTH, PlanWindow
from outrider.drafting.propose.leaves import draft_model
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.testing.toy_target import ToyTarget


def sample(tokens, seconds, seqs=1, cached=0):
    return Sample(tokens=tokens, seqs=seqs, cached=cached, seconds=seconds)


FLAT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)  # a pass only reads the weights
STEEP = PassCost(tokens=(1, 64), seconds=(1.0, 64.0), entry=0.0, pair=0.0)  # a pass is limited by arithmetic
FREE = PassCost(tokens=(1, 64), seconds=(0.01, 0.01), entry=0.0, pair=0.0)


def costs(target, draft=FREE):
    return CostModel(target=target, draft=draft, host=0.0)


def batch(rows, start=40, first=0):
    """Return a batch of `rows` decoding sequences. Requests are numbered from `first` on."""
    fields = {"prompt_token_ids": (0,), "params": SamplingParams(), "seed": 0, "end_ids": frozenset(), "max_tokens": 99}
    seqs = tuple(
        SequenceState(request=Request(id=first + b, **fields), slot=b, token_ids=[0] * (start + 1)) for b in range(rows)
    )
    return Batch(seqs=seqs, start=(start,) * rows, feed=((0,),) * rows, budget=DraftBudget((20,) * rows))


def simulate(planner, rows, acceptance, rounds, *, took=lambda k: (1.0, 0.0), seed=0, waits=0, first=0, source=None):
    """Simulate rounds, and return the draft length of each.

    Args:
        planner: the planner.
        rows: number of sequences.
        acceptance: acceptance rate by position.
        rounds: number of rounds.
        took: returns the seconds of the target and of the draft for a draft length.
        seed: the seed of the accepted tokens.
        waits: number of rounds of prefill of the draft model, after rounds without a draft.
        first: number of the first request.
        source: bits of `Draft.source` of all draft tokens, which then have estimates; None: neither.
    """
    rng = random.Random(seed)
    stats = Stats()
    chosen = []
    prefill_rounds = 0
    decoding = batch(rows, first=first)
    for _ in range(rounds):
        planned = planner.plan(decoding, stats)
        prefill_rounds = prefill_rounds + 1 if any(planned.draft_budget) else 0
        if 0 < prefill_rounds <= waits:
            draft = replace(tree.empty(rows, torch.device("cpu")), num_prefilling=sum(map(bool, planned.draft_budget)))
        else:
            draft = tree.chain(torch.zeros(rows, max(planned.draft_budget)), planned.draft_budget)
        if source is not None:
            probs = tuple(math.prod(acceptance[: i + 1]) for i in range(draft.size))
            draft = replace(draft, accept_prob=tuple(probs[:width] for width in draft.width))
            draft = replace(draft, source=tuple((source,) * width for width in draft.width))
        ks = planner.trim(planned, draft).width
        chosen.append(max(ks))
        passes = []
        for k in ks:
            accepted = next((i for i in range(k) if rng.random() >= acceptance[i]), k)
            passes.append((k, accepted, accepted + 1))
        target_seconds, draft_seconds = took(ks[0])
        stats = stats + Stats.of_passes(passes)
        stats = Stats(
            **{
                name: getattr(stats, name)
                for name in ("passes", "output_tokens", "draft_tokens", "offered", "reached", "accepted")
            },
            rounds=len(chosen),
            target_seconds=stats.target_seconds + target_seconds,
            draft_seconds=stats.draft_seconds + draft_seconds,
        )
    return chosen


@pytest.mark.parametrize(("source", "speculates"), [(0b01, True), (0b10, False)])
def test_draft_tokens_of_a_lookup_take_no_pass_of_the_draft_model(source, speculates):
    """A draft token of the model takes 0.6 of a pass of the target, which its acceptance of 60% is not worth."""
    planner = CostPlanner(costs(FLAT, replace(FLAT, seconds=(0.6, 0.6))), max_draft_tokens=12, model_sources=0b10)
    chosen = simulate(planner, 1, [0.6] * 12, 600, took=lambda k: (1.0, 0.01 if speculates else 0.6 * k), source=source)
    assert (sum(map(bool, chosen[300:])) > 250) is speculates


def test_costs_are_interpolated_between_measurements():
    cost = PassCost.fit([sample(1, 2.0), sample(4, 2.0), sample(8, 6.0)])
    assert [cost(c, seqs=1, cached=0) for c in (1, 4, 6, 8, 10)] == [2.0, 2.0, 4.0, 6.0, 8.0]


def test_disturbed_measurement_is_ignored():
    cost = PassCost.fit([sample(1, 9.0), sample(2, 2.0), sample(4, 3.0)])
    assert [cost(c, seqs=1, cached=0) for c in (1, 2, 4)] == [2.0, 2.0, 3.0]


def test_fit_separates_reading_the_cache_from_attention():
    def true_cost(tokens, seqs, cached):
        return 1.0 + tokens * 0.5 + 3e-4 * seqs * cached + 2e-5 * tokens * cached

    shapes = [(1, 1, 0), (8, 1, 0), (1, 1, 1000), (8, 1, 1000), (4, 4, 1000)]
    samples = [sample(tokens, true_cost(tokens, seqs, cached), seqs, cached) for tokens, seqs, cached in shapes]
    cost = PassCost.fit(samples)
    assert cost(5, seqs=2, cached=700) == pytest.approx(true_cost(5, 2, 700))
    assert PassCost.fit([sample(1, 1.0), sample(8, 1.0), sample(1, 0.5, 1, 100)]).entry == 0


def test_cost_of_prompt_tokens_without_logits():
    """A small model spends most of its time on the output layer, so a prefill is faster."""
    prefill = Sample(tokens=200, seqs=1, cached=0, seconds=10.0, scored=False)
    cost = PassCost.fit([sample(1, 1.0), sample(101, 51.0), prefill])
    assert cost(1, seqs=1, cached=0, feed=100) == pytest.approx(1.0 + 100 * 0.05)
    assert replace(cost, fed=None)(1, seqs=1, cached=0, feed=100) == pytest.approx(51.0)


def test_cost_model_round_trip_through_json():
    for model in (costs(STEEP), costs(FLAT, None)):
        assert CostModel.loads(model.dumps()) == model
    assert costs(STEEP).verify(2, 3, cached=0, feed=1) == 9.0
    assert costs(FLAT).propose(2, 3, cached=0) == pytest.approx(0.03)
    with pytest.raises(KeyError):
        CostModel.loads("{}")


def test_draft_length_follows_the_acceptance():
    assert simulate(CostPlanner(costs(FLAT), max_draft_tokens=12), 1, [0.95] * 12, 200)[-1] == 12
    tenth = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
    medium = simulate(
        CostPlanner(costs(FLAT, tenth), max_draft_tokens=12), 1, [0.6] * 12, 400, took=lambda k: (1.0, 0.1 * k)
    )
    assert 1 <= sorted(medium[200:])[100] <= 5  # 4 is best: (1 - a^5) / ((1 - a)(1 + 4 c)) at a = 0.6, c = 0.1


def test_no_drafts_if_a_draft_token_costs_as_much_as_an_output_token():
    took = lambda k: (4.0 * (1 + k), 0.0)  # noqa: E731
    assert set(simulate(CostPlanner(costs(STEEP), max_draft_tokens=12), 4, [1.0] * 12, 100, took=took)) == {0}


def test_speculation_stops_and_is_tried_again():
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    chosen = simulate(
        CostPlanner(costs(FLAT, fifth), max_draft_tokens=12), 1, [0.0] * 12, 3000, took=lambda k: (1.0, 0.2 * k)
    )
    late = chosen[100:]
    assert 0 < sum(0.2 * k for k in late) < 0.012 * len(late)
    planner = CostPlanner(costs(FLAT), max_draft_tokens=12)
    simulate(planner, 1, [0.0] * 12, 60)
    assert planner.proposers[0].acceptance[0] < 0.5
    assert simulate(planner, 1, [1.0] * 12, 3000)[-1] > 5


@pytest.mark.parametrize("unit", [0.01, 0.2])
def test_cheap_trials_are_more_frequent(unit):
    """Failed trials take about 1% of the time, for any cost of a trial. The time between trials is limited."""
    draft = PassCost(tokens=(1, 64), seconds=(unit, unit), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, draft), max_draft_tokens=12)
    chosen = simulate(planner, 8, [0.0] * 12, 4000, took=lambda k: (1.0, unit * k))[1000:]
    drafting_rounds = [i for i, k in enumerate(chosen) if k]
    assert sum(chosen) * unit < 0.04 * len(chosen)
    pauses = [after - before for before, after in pairwise(drafting_rounds) if after - before > 8]
    assert max(pauses) < (150 if unit == 0.01 else 800)


def test_trials_are_more_frequent_if_speculation_has_paid_before():
    def drafting_rounds(good_rounds):
        planner = CostPlanner(costs(FLAT, fifth), max_draft_tokens=12)
        took = lambda k: (1.0, 0.2 * k)  # noqa: E731
        simulate(planner, 1, [0.95] * 12, good_rounds, took=took)
        return sum(map(bool, simulate(planner, 1, [0.0] * 12, 3000, took=took)[500:]))

    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    assert 0 < drafting_rounds(0) < 0.7 * drafting_rounds(200)


def test_planner_learns_from_rounds_that_take_longer_than_expected():
    # The cost model says that drafting is free, but a draft token takes as long as an output token.
    chosen = simulate(CostPlanner(costs(FLAT), max_draft_tokens=12), 1, [0.9] * 12, 400, took=lambda k: (1.0, 1.0 * k))
    assert set(chosen[-20:]) <= {0, 1}


@pytest.mark.parametrize("rate", [0.4, 0.6, 0.8])
def test_planner_learns_the_fixed_cost_of_speculation(rate):
    """Any draft makes a round 50% longer. The planner still chooses a nearly optimal draft length."""
    sloped = PassCost(tokens=(1, 64), seconds=(1.0, 7.3), entry=0.0, pair=0.0)
    draft = PassCost(tokens=(1, 2), seconds=(0.02, 0.02), entry=0.0, pair=0.0)
    took = lambda k: ((1.5 if k else 1.0) + 0.1 * k, 0.02 * k)  # noqa: E731
    chosen = simulate(CostPlanner(costs(sloped, draft), max_draft_tokens=12), 1, [rate] * 12, 1500, took=took)[500:]
    tau = [sum(rate**i for i in range(k + 1)) for k in range(13)]
    speed = sum(tau[k] for k in chosen) / sum(sum(took(k)) for k in chosen)
    best = max(tau[k] / sum(took(k)) for k in range(13))
    assert speed > 0.98 * best


def test_probes_tell_plain_decoding_from_the_fixed_cost_of_speculation():
    """Most rounds of plain decoding are probes here. The others have drafts, which make a round 60% longer."""
    planner = CostPlanner(costs(FLAT), max_draft_tokens=4)
    chosen = simulate(planner, 1, [0.6] * 4, 2000, took=lambda k: (1.6 if k else 1.0, 0.01 * k))
    assert sum(map(bool, chosen)) > 1700
    assert planner.expected_seconds(1, 0, cached=40) == pytest.approx(1.0, abs=0.1)
    assert planner.expected_seconds(1, 4, cached=40) == pytest.approx(1.6, abs=0.1)


@pytest.mark.parametrize(("acceptance", "passes"), [(0.0, 4), (0.5, 8)])
def test_hopeless_trial_ends_early(acceptance, passes):
    tenth = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, tenth), max_draft_tokens=12)
    chosen = simulate(planner, 1, [acceptance] * 12, 30, took=lambda k: (1.0, 0.1 * k))
    assert chosen.index(0) == passes


def test_the_price_of_draft_tokens_follows_an_easy_or_hard_passage_half_way(monkeypatch):
    """The speedup is 1.44 now, and 2.25 over whole texts."""
    planner = CostPlanner(costs(FLAT))
    (proposer,) = planner.proposers
    proposer.best_length = lambda *_: (4, 1.44)
    proposer.add_time(spent=100.0, plain=225.0, saved=0.0, passes=100)
    proposer.idle_rounds = 0
    gains = []
    monkeypatch.setattr(DraftPricing, "set_speed", lambda pricing, load, gain: gains.append(gain))
    planner.plan(batch(1), Stats())
    assert gains == [pytest.approx(1.8)]  # the geometric mean


def test_padded_drafts_have_equal_lengths():
    """The sixth token of one sequence then costs two tokens, and the second token of the other one is free."""
    cost = costs(PassCost(tokens=(1, 64), seconds=(1.0, 16.75), entry=0.0, pair=0.0))  # 0.25 for each further token
    load = RoundLoad.of(batch(2))
    widths = []
    for padded in (False, True):
        pricing = DraftPricing(Clock(cost), padded=padded)
        pricing.set_speed(load, 1.0)
        widths.append(pricing.profitable_widths([(0.9,) * 5 + (0.6,), (0.9, 0.1)], load))
        widths.append(pricing.pass_tokens((5, 2)))
    assert widths == [(6, 1), 7, (5, 2), 10]


def test_plain_decoding_is_reconsidered_for_a_new_text():
    """Otherwise windows and texts of equal lengths could keep a decision for ever."""
    first, second = batch(1), batch(1, first=1)
    load = RoundLoad.of(first)
    plain, speculating = PlanWindow(load, end_round=64), PlanWindow(load, 0, end_round=64)
    plain.seqs = speculating.seqs = first.seqs
    assert plain.continues(first, load, 0)
    assert not plain.continues(second, load, 0)
    assert speculating.continues(second, load, 0)
    assert plain.next_plain(load).end_round == 8


@pytest.mark.parametrize("acceptance", [[0.95] * 12, [0.0] * 12])
def test_trial_continues_while_the_draft_model_prefills(acceptance):
    """Prefill rounds do not count as rounds of the trial. A failed trial still ends."""
    planner = CostPlanner(costs(FLAT), max_draft_tokens=12)
    chosen = simulate(planner, 8, acceptance, 600, waits=9)
    drafting = sum(map(bool, chosen[300:]))
    assert drafting == 300 if acceptance[0] else 0 < drafting < 60


def test_plain_decoding_continues_when_sequences_join_or_leave(monkeypatch):
    planner = CostPlanner(costs(STEEP), max_draft_tokens=12)
    decisions = []
    plain_rounds = 0
    seconds = 8.0 * 40
    assert set(simulate(planner, 8, [0.0] * 12, 40, took=lambda k: (8.0 * (1 + k), 0.0))) == {0}
    decide = PlanWindow.next

    def counted(window, load, *args, **kwargs):
        decisions.append(load.seqs)
        return decide(window, load, *args, **kwargs)

    monkeypatch.setattr(PlanWindow, "next", counted)
    for rounds in range(40, 240):
        changing = batch(7 + rounds // 3 % 2)  # the number of sequences changes in every third round
        plain_rounds += not any(planner.plan(changing, Stats(rounds=rounds, target_seconds=seconds)).draft_budget)
        seconds += len(changing.seqs)
    assert plain_rounds == 200
    assert 200 / 32 < len(decisions) <= 200 / 8
    assert planner.proposers[0].idle_rounds > 200  # these rounds count until the next trial


def test_drafting_starts_when_the_first_sequence_decodes():
    """Its prompt is prefilled in several rounds."""
    planner = CostPlanner(costs(FLAT), max_draft_tokens=4)
    assert simulate(planner, 1, [0.9] * 4, 40)[-1] == 4
    (other,) = batch(1).seqs
    seq = SequenceState(request=replace(other.request, id=7), slot=0, token_ids=[0] * 31)
    for rounds in range(3):  # ten of 31 tokens in each round
        prefill = Batch(seqs=(seq,), start=(10 * rounds,), feed=((0,) * 10,), budget=DraftBudget((0,)))
        assert not any(planner.plan(prefill, Stats(rounds=40 + rounds)).draft_budget)
    decoding = Batch(seqs=(seq,), start=(30,), feed=((0,),), budget=DraftBudget((20,)))
    assert planner.plan(decoding, Stats(rounds=43)).draft_budget == (4,)


def test_fast_prompt_does_not_count_as_a_gain():
    """The estimate of a prompt is extrapolated, and may be far too high."""
    planner = CostPlanner(costs(STEEP), max_draft_tokens=4)
    prompt = replace(batch(1, start=59), start=(0,), feed=((0,) * 60,), budget=DraftBudget((0,)))
    planner.plan(prompt, Stats())
    planner.plan(batch(1, start=60), Stats(rounds=1, target_seconds=5.0, output_tokens=1))
    assert planner.spent_seconds == 5.0
    assert planner.plain_seconds == pytest.approx(5.0)


def test_seeded_request_gets_a_fixed_draft_length_during_plain_decoding():
    planner = CostPlanner(costs(STEEP), max_draft_tokens=12, replay=True)
    unseeded = batch(2)
    simulate(planner, 2, [0.0] * 12, 40, took=lambda k: (2.0 * (1 + k), 0.0))
    stats = Stats(rounds=40, target_seconds=80.0)
    assert not any(planner.plan(unseeded, stats).draft_budget)
    request = replace(unseeded.seqs[0].request, id=9, params=SamplingParams(seed=1, temperature=1.0))
    seqs = (*unseeded.seqs, SequenceState(request=request, slot=2, token_ids=[0] * 11))
    with_seeded = Batch(seqs=seqs, start=(10,) * 3, feed=((0,),) * 3, budget=DraftBudget((20,) * 3))
    assert planner.plan(with_seeded, replace(stats, rounds=41)).draft_budget == (FIXED_DRAFT_LENGTH,) * 3


def test_draft_model_prefills_only_sequences_that_repay_it():
    draft = PassCost(tokens=(1, 1024), seconds=(0.1, 10.0), entry=0, pair=0)  # 0.1 rounds, and more for long prefills
    planner = CostPlanner(costs(FLAT, draft), max_draft_tokens=4)
    took = lambda k: (1.0, 0.1 * k)  # noqa: E731
    assert simulate(planner, 2, [0.9] * 4, 101, took=took)[-1] == 4
    prefilled = batch(2)

    def with_third(budget, start):
        """Return the batch of two prefilled sequences and a third one."""
        request = replace(prefilled.seqs[0].request, id=budget + start)
        seqs = (*prefilled.seqs, SequenceState(request=request, slot=2, token_ids=[0] * (start + 1)))
        return Batch(seqs=seqs, start=(10, 10, start), feed=((0,),) * 3, budget=DraftBudget((20, 20, budget)))

    budgets = []
    for budget, start in ((20, 10), (20, 1000), (2, 500)):
        planned = deepcopy(planner).plan(with_third(budget, start), Stats(rounds=101))
        budgets.append(planned.draft_budget)
    assert [bool(third) for _, _, third in budgets] == [True, False, False]
    assert all(first and second for first, second, _ in budgets)


def test_draft_that_shares_the_cache_of_the_target_has_no_prefill():
    """A prefill of this prompt would take longer than the text."""
    draft = PassCost(tokens=(1, 1024), seconds=(0.1, 10.0), entry=0, pair=0, fed=1.0)
    started = []
    for shares_cache in (False, True):
        planner = CostPlanner(costs(FLAT, replace(draft, shares_cache=shares_cache)), max_draft_tokens=4)
        simulate(planner, 1, [0.9] * 4, 100, took=lambda k: (1.0, 0.1 * k))
        next_text = batch(1, start=500, first=7)
        prefill = replace(next_text, start=(0,), feed=((0,) * 500,), budget=DraftBudget((0,)))
        assert not any(planner.plan(prefill, Stats(rounds=100)).draft_budget)  # plain decoding
        started.append(any(planner.plan(next_text, Stats(rounds=101)).draft_budget))
    assert started == [False, True]


def test_calibration_knows_whether_a_draft_shares_the_cache_of_the_target():
    target = LLM(None, proposer="quantized:int4", max_num_seqs=1, max_model_len=96, k=2).parts
    times = PassTimes(draft_model(target.proposer))
    times.measure(0)
    assert times.cost().shares_cache
    own = PassTimes(target.target)
    own.measure(0)
    assert not own.cost().shares_cache


def test_speculation_continues_after_the_last_token_of_a_text():
    planner = CostPlanner(costs(FLAT), max_draft_tokens=4)
    chosen = simulate(planner, 1, [0.9] * 4, 100)
    assert chosen[-1] == 4
    last = batch(1).limited((0,))
    for rounds in range(100, 110):  # at least one of them begins a window
        assert not any(planner.plan(last, Stats(rounds=rounds)).draft_budget)
    assert any(planner.plan(batch(1, first=7), Stats(rounds=110)).draft_budget)


def test_plan_never_raises_a_budget():
    planner = CostPlanner(costs(FLAT), max_draft_tokens=12)
    limited = batch(3).limited((0, 2, 20))
    budget = planner.plan(limited, Stats()).draft_budget
    assert budget[0] == 0
    assert budget[1] <= 2


def _times(monkeypatch, took=lambda target, tokens: tokens * 1e-3):
    """Let a pass over n tokens take `took(target, n)` seconds. Return the list of all passes."""
    passes = []

    def run(target, shape):
        passes.append(shape.tokens)
        return took(target, shape.tokens)

    monkeypatch.setattr("outrider.drafting.plan.calibrate.run_pass", run)
    return passes


def test_calibration_of_a_toy_target():
    cost = measure_pass(ToyTarget(slots=4, context=64))
    assert cost.tokens[0] == 1
    assert cost.tokens[-1] > 100
    assert all(a <= b for a, b in zip(cost.seconds, cost.seconds[1:], strict=False))


def test_costs_are_cached_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = ToyTarget(slots=2, context=32)
    _times(monkeypatch)
    (first,) = known_costs(target, [None])
    assert first.draft is None
    assert known_costs(target, [None]) == [first]
    assert known_costs(target, [None, target])[1].draft == first.target
    assert cost_file(target).parent.parent == tmp_path
    assert cost_file(target) != cost_file(ToyTarget(slots=3, context=32))
    cost_file(target).write_text("{")
    assert known_costs(target, [None]) == [first]
    assert cost_file(target).read_text().startswith("[")


def test_other_kernels_have_other_costs(monkeypatch):
    target = ToyTarget(slots=2, context=32)
    before = cost_file(target)
    monkeypatch.setattr("outrider.drafting.plan.known_costs.sources_hash", lambda: "other sources")
    assert cost_file(target) != before


@pytest.mark.parametrize("pass_seconds", [1e-4, 1e-2, 0.3])
def test_a_start_measures_for_a_second_at_most(tmp_path, monkeypatch, pass_seconds):
    """If the first two passes take longer, they are all that is measured. Later starts continue."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = ToyTarget(slots=2, context=32)
    passes = _times(monkeypatch, lambda target, tokens: pass_seconds * (1 + 0.1 * tokens))
    spent = []
    for _ in range(40):
        passes.clear()
        (costs,) = known_costs(target, [None])
        spent.append(sum(pass_seconds * (1 + 0.1 * tokens) for tokens in passes))
    assert spent[0] <= max(1.0, 2 * pass_seconds * 1.8)
    assert max(spent[1:]) <= 0.1  # with the passes that check the file
    assert costs.target(8, seqs=1, cached=0) == pytest.approx(1.8 * pass_seconds)
    assert costs.target(4, seqs=1, cached=0) == pytest.approx(1.4 * pass_seconds, rel=0.1)
    if pass_seconds < 0.01:
        assert len(passes) == 4  # nothing is left to measure


def test_least_recently_used_cost_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _times(monkeypatch)
    monkeypatch.setattr("outrider.drafting.plan.known_costs.FILES", 3)
    targets = [ToyTarget(slots=2, context=context) for context in range(32, 37)]
    files = [cost_file(target) for target in targets]
    for age, target in enumerate(targets[:3]):
        known_costs(target, [None])
        os.utime(files[age], (age, age))
    known_costs(targets[0], [None])  # now the second file is the least recently used one
    for target in targets[3:]:
        known_costs(target, [None])
    assert [file.exists() for file in files] == [True, False, False, True, True]
    assert set(files[0].parent.iterdir()) == {files[0], *files[3:]}


def test_cost_file_is_written_atomically(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _times(monkeypatch)
    target = ToyTarget(slots=2, context=32)
    known_costs(target, [None])
    before = cost_file(target).read_text()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    assert known_costs(target, [None], whole=True)
    assert cost_file(target).read_text() == before
    assert list(cost_file(target).parent.iterdir()) == [cost_file(target)]


@pytest.mark.parametrize(("slow_model", "first_slow"), [("target", 2), ("draft", 2)])
def test_inaccurate_cost_file_is_measured_again(tmp_path, monkeypatch, slow_model, first_slow):
    """A file is measured again if some of its passes were too slow, but not if all are slower by one factor."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = {"target": ToyTarget(slots=2, context=32), "draft": ToyTarget(slots=2, context=40)}
    target, draft = models["target"], models["draft"]
    scale = {"all": 1.0, "slow": 2.0}

    def took(model, tokens):
        factor = scale["slow"] if model is models[slow_model] and tokens >= first_slow else 1.0
        return tokens * 1e-3 * scale["all"] * factor

    passes = _times(monkeypatch, took)
    known_costs(target, [draft])
    scale["slow"] = 1.0
    (corrected,) = known_costs(target, [draft])
    assert corrected.target(8, seqs=1, cached=0) == pytest.approx(8e-3)
    assert corrected.draft(8, seqs=1, cached=0) == pytest.approx(8e-3)
    known_costs(target, [draft], whole=True)
    passes.clear()
    scale["all"] = 3.0
    assert known_costs(target, [draft])[0].target(8, seqs=1, cached=0) == pytest.approx(8e-3)
    assert len(passes) <= 8


@pytest.mark.usefixtures("measured_costs")
def test_auto_draft_length_gives_the_output_of_plain_decoding(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.drafting.plan.known_costs.cache_folder", lambda: tmp_path)  # not that of the kernels
    params = SamplingParams(max_tokens=24)
    prompts = ["def add(a, b):\n    return", "Once upon a time"]
    outputs = []
    for k in ("auto", 0):
        llm = LLM(None, k=k, max_num_seqs=2, max_model_len=96, dtype="float32")
        outputs.append([completion.token_ids for completion in llm.generate(prompts, params)])
    assert outputs[0] == outputs[1]
    with pytest.raises(OutriderError, match="k is 'many', a string; use a number of draft tokens"):
        LLM(embedded("nano"), k="many")


@pytest.mark.slow
@torch.inference_mode()
def test_calibration_leaves_an_empty_cache(monkeypatch):
    # One pass measures every shape, though not precisely.
    monkeypatch.setattr("outrider.drafting.plan.calibrate.PASSES", 1)
    llm = LLM(None, proposer="none", max_num_seqs=2, max_model_len=96, dtype="float32")
    before = llm.generate("def add(a, b):", SamplingParams(max_tokens=8))[0].token_ids
    measure_pass(llm.parts.target)
    assert llm.generate("def add(a, b):", SamplingParams(max_tokens=8))[0].token_ids == before


def test_planner_does_not_probe_forever_if_speculation_almost_pays():
    """With a gain of about 1, probes cost nothing. But with probes only, the planner would never learn that it pays."""
    tenth = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, tenth), max_draft_tokens=12)
    poor = simulate(planner, 1, [0.08] * 12, 12, took=lambda k: (1.0, 0.1 * k))
    assert any(poor)
    planner.proposers[0].estimates_acceptance = True
    good = simulate(planner, 1, [0.9] * 12, 300, took=lambda k: (1.0, 0.1 * k))
    assert sum(map(bool, good[100:])) > 150


def test_speculation_is_tried_again_soon_after_a_bad_start():
    """The beginning of a text is often hard to draft."""
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, fifth), max_draft_tokens=12)
    took = lambda k: (1.0, 0.2 * k)  # noqa: E731
    simulate(planner, 1, [0.0] * 12, 30, took=took)
    assert sum(map(bool, simulate(planner, 1, [0.9] * 12, 150, took=took))) > 75


def test_trial_starts_at_once_for_new_requests():
    """A failed trial on earlier requests does not delay it."""
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    took = lambda k: (1.0, 0.2 * k)  # noqa: E731
    started = []
    for first in (0, 1):
        planner = CostPlanner(costs(FLAT, fifth), max_draft_tokens=12)
        assert simulate(planner, 1, [0.0] * 12, 20, took=took)[-1] == 0
        started.append(any(simulate(planner, 1, [0.9] * 12, 3, took=took, first=first)))
    assert started == [False, True]


def test_sequences_of_a_trial_continue_if_other_prefills_do_not_pay():
    expensive_prefill = PassCost(tokens=(1, 64), seconds=(0.01, 0.01), entry=0, pair=0, fed=0.02)
    planner = CostPlanner(costs(FLAT, expensive_prefill), max_draft_tokens=12)
    simulate(planner, 8, [0.9] * 12, 9, took=lambda k: (1.0, 0.01 * k))
    assert not planner.proposers[0].trial_passes_left
    assert sum(map(bool, planner.plan(batch(8), Stats(rounds=9)).draft_budget)) == 2
