"""What a round costs, and how far it pays to speculate."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Batch, Request, SequenceState
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.plan.calibrate import calibrate, cost_file, known_costs, measure_pass
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.pass_cost import CostModel, PassCost, Sample
from outrider.plan.window import FIXED_DRAFT_LENGTH
from outrider.testing.toy_target import ToyTarget


def sample(columns, seconds, rows=1, cached=0):
    return Sample(tokens=columns, seqs=rows, cached=cached, seconds=seconds)


FLAT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)  # as where reading the weights is all
STEEP = PassCost(tokens=(1, 64), seconds=(1.0, 64.0), entry=0.0, pair=0.0)  # as where arithmetic is
FREE = PassCost(tokens=(1, 64), seconds=(0.01, 0.01), entry=0.0, pair=0.0)


def costs(target, draft=FREE):
    return CostModel(target=target, draft=draft, host=0.0)


def batch(rows, start=10, first=0):
    """Rows of requests that are numbered from `first` on."""
    asked = {"prompt_token_ids": (0,), "params": SamplingParams(), "seed": 0, "end_ids": frozenset(), "max_tokens": 99}
    some = tuple(
        SequenceState(request=Request(id=first + b, **asked), slot=b, token_ids=[0] * (start + 1)) for b in range(rows)
    )
    return Batch(seqs=some, start=(start,) * rows, feed=((0,),) * rows, draft_budget=(20,) * rows)


def live(planner, rows, chances, rounds, *, took=lambda k: (1.0, 0.0), seed=0, waits=0, first=0):
    """Rounds in which the guess at position i is kept with chances[i]; the k of each.

    Texts must be read for so many rounds (`waits`) before there are guesses, whenever there were none before.
    """
    chance, stats, chosen, read = random.Random(seed), Stats(), [], 0
    for _ in range(rounds):
        planned = planner.plan(batch(rows, first=first), stats)
        read = read + 1 if any(planned.draft_budget) else 0
        if 0 < read <= waits:
            draft = replace(tree.empty(rows, torch.device("cpu")), num_prefilling=sum(map(bool, planned.draft_budget)))
        else:
            draft = tree.chain(torch.zeros(rows, max(planned.draft_budget)), planned.draft_budget)
        ks = planner.trim(planned, draft).width
        chosen.append(max(ks))
        passes = []
        for k in ks:
            kept = next((i for i in range(k) if chance.random() >= chances[i]), k)
            passes.append((k, kept, kept + 1))
        target, draft = took(ks[0])
        stats = stats + Stats.of_passes(passes)
        stats = Stats(
            **{
                name: getattr(stats, name)
                for name in ("passes", "output_tokens", "draft_tokens", "offered", "reached", "accepted")
            },
            rounds=len(chosen),
            target_seconds=stats.target_seconds + target,
            draft_seconds=stats.draft_seconds + draft,
        )
    return chosen


def test_costs_lie_on_the_lines_between_what_was_measured():
    cost = PassCost.fit([sample(1, 2.0), sample(4, 2.0), sample(8, 6.0)])
    assert [cost(c, rows=1, cached=0) for c in (1, 4, 6, 8, 10)] == [2.0, 2.0, 4.0, 6.0, 8.0]


def test_a_disturbed_measurement_is_not_believed():
    cost = PassCost.fit([sample(1, 9.0), sample(2, 2.0), sample(4, 3.0)])
    assert [cost(c, rows=1, cached=0) for c in (1, 2, 4)] == [2.0, 2.0, 3.0]


def test_reading_the_cache_and_multiplying_by_it_are_told_apart():
    def true(columns, rows, cached):
        return 1.0 + columns * 0.5 + 3e-4 * rows * cached + 2e-5 * columns * cached

    shapes = [(1, 1, 0), (8, 1, 0), (1, 1, 1000), (8, 1, 1000), (4, 4, 1000)]
    cost = PassCost.fit([sample(c, true(c, r, s), r, s) for c, r, s in shapes])
    assert cost(5, rows=2, cached=700) == pytest.approx(true(5, 2, 700))
    assert PassCost.fit([sample(1, 1.0), sample(8, 1.0), sample(1, 0.5, 1, 100)]).entry == 0


def test_what_is_read_takes_less_than_what_is_scored():
    """As in a small model, which spends most of its time on its output layer."""
    read = Sample(tokens=200, seqs=1, cached=0, seconds=10.0, scored=False)
    cost = PassCost.fit([sample(1, 1.0), sample(101, 51.0), read])
    assert cost(1, rows=1, cached=0, feed=100) == pytest.approx(1.0 + 100 * 0.05)
    assert replace(cost, fed=None)(1, rows=1, cached=0, feed=100) == pytest.approx(51.0)


def test_costs_are_written_and_read():
    for model in (costs(STEEP), costs(FLAT, None)):
        assert CostModel.loads(model.dumps()) == model
    assert costs(STEEP).verify(2, 3, cached=0, feed=1) == 9.0
    assert costs(FLAT).propose(2, 3, cached=0) == pytest.approx(0.03)
    with pytest.raises(KeyError):
        CostModel.loads("{}")


def test_good_guesses_are_followed_far_and_bad_ones_not():
    assert live(CostPlanner(costs(FLAT), most=12), 1, [0.95] * 12, 200)[-1] == 12
    tenth = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
    middling = live(CostPlanner(costs(FLAT, tenth), most=12), 1, [0.6] * 12, 400, took=lambda k: (1.0, 0.1 * k))
    assert 1 <= sorted(middling[200:])[100] <= 5  # 4 is best: (1 - a^5) / ((1 - a)(1 + 4 c)) at a = 0.6, c = 0.1


def test_where_a_guess_costs_as_much_as_a_token_nothing_is_guessed():
    took = lambda k: (4.0 * (1 + k), 0.0)  # noqa: E731
    assert set(live(CostPlanner(costs(STEEP), most=12), 4, [1.0] * 12, 100, took=took)) == {0}


def test_speculation_is_given_up_and_tried_again():
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    chosen = live(CostPlanner(costs(FLAT, fifth), most=12), 1, [0.0] * 12, 3000, took=lambda k: (1.0, 0.2 * k))
    late = chosen[100:]
    assert 0 < sum(0.2 * k for k in late) < 0.012 * len(late)
    planner = CostPlanner(costs(FLAT), most=12)
    live(planner, 1, [0.0] * 12, 60)
    assert planner.proposers[0].acceptance[0] < 0.5
    assert live(planner, 1, [1.0] * 12, 3000)[-1] > 5


@pytest.mark.parametrize("unit", [0.01, 0.2])
def test_cheap_trials_come_sooner(unit):
    """Whatever a trial costs, trials that come to nothing take about a hundredth of the time, and no row waits long."""
    draft = PassCost(tokens=(1, 64), seconds=(unit, unit), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, draft), most=12)
    chosen = live(planner, 8, [0.0] * 12, 4000, took=lambda k: (1.0, unit * k))[1000:]
    tries = [i for i, k in enumerate(chosen) if k]
    assert sum(chosen) * unit < 0.04 * len(chosen)
    rests = [b - a for a, b in pairwise(tries) if b - a > 8]
    assert max(rests) < (150 if unit == 0.01 else 800)


def test_what_has_paid_before_is_tried_more_often():
    def tries(before):
        planner, took = CostPlanner(costs(FLAT, fifth), most=12), lambda k: (1.0, 0.2 * k)
        live(planner, 1, [0.95] * 12, before, took=took)
        return sum(map(bool, live(planner, 1, [0.0] * 12, 3000, took=took)[500:]))

    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    assert 0 < tries(0) < 0.7 * tries(200)


def test_rounds_that_take_longer_than_expected_are_learnt_from():
    # Guesses are said to be free, and take as long as a token.
    chosen = live(CostPlanner(costs(FLAT), most=12), 1, [0.9] * 12, 400, took=lambda k: (1.0, 1.0 * k))
    assert set(chosen[-20:]) <= {0, 1}


@pytest.mark.parametrize("chance", [0.4, 0.6, 0.8])
def test_work_besides_the_columns_of_guesses_is_learnt_from_rounds_without_any(chance):
    """Guesses make a round half as long again: nothing is lost by that, and what pays is still done."""
    sloped = PassCost(tokens=(1, 64), seconds=(1.0, 7.3), entry=0.0, pair=0.0)
    draft = PassCost(tokens=(1, 2), seconds=(0.02, 0.02), entry=0.0, pair=0.0)
    took = lambda k: ((1.5 if k else 1.0) + 0.1 * k, 0.02 * k)  # noqa: E731
    chosen = live(CostPlanner(costs(sloped, draft), most=12), 1, [chance] * 12, 1500, took=took)[500:]
    tau = [sum(chance**i for i in range(k + 1)) for k in range(13)]
    speed = sum(tau[k] for k in chosen) / sum(sum(took(k)) for k in chosen)
    best = max(tau[k] / sum(took(k)) for k in range(13))
    assert speed > 0.98 * best


@pytest.mark.parametrize("chances", [[0.95] * 12, [0.0] * 12])
def test_rows_that_are_still_read_say_nothing_of_the_guesses(chances):
    """A trial is of guesses, however long it takes until there are any; and one that comes to nothing still ends."""
    planner = CostPlanner(costs(FLAT), most=12)
    chosen = live(planner, 8, chances, 600, waits=9)
    guessing = sum(map(bool, chosen[300:]))
    assert guessing == 300 if chances[0] else 0 < guessing < 60


def test_a_planner_at_rest_does_not_think_again_whenever_a_row_comes_or_goes():
    planner, decided, rests, seconds = CostPlanner(costs(STEEP), most=12), [], 0, 8.0 * 40
    assert set(live(planner, 8, [0.0] * 12, 40, took=lambda k: (8.0 * (1 + k), 0.0))) == {0}
    decide = planner._decide
    planner._decide = lambda *args: (decided.append(len(args[0].seqs)), decide(*args))
    for rounds in range(40, 240):
        some = batch(7 + rounds // 3 % 2)  # every third round
        rests += not any(planner.plan(some, Stats(rounds=rounds, target_seconds=seconds)).draft_budget)
        seconds += len(some.seqs)
    assert rests == 200
    assert 200 / 32 < len(decided) <= 200 / 8  # and yet it does when that has gone on for a while
    assert planner.proposers[0].idle_rounds > 200  # rounds: what is not tried waits for its trial all the while


def test_guesses_begin_with_the_first_row_that_decodes():
    """However many rounds have read its prompt."""
    planner = CostPlanner(costs(FLAT), most=4)
    assert live(planner, 1, [0.9] * 4, 40)[-1] == 4
    (row,) = batch(1).seqs
    long = SequenceState(request=replace(row.request, id=7), slot=0, token_ids=[0] * 31)
    for rounds in range(3):  # ten tokens each, of thirty-one
        reading = Batch(seqs=(long,), start=(10 * rounds,), feed=((0,) * 10,), draft_budget=(0,))
        assert not any(planner.plan(reading, Stats(rounds=40 + rounds)).draft_budget)
    decoding = Batch(seqs=(long,), start=(30,), feed=((0,),), draft_budget=(20,))
    assert planner.plan(decoding, Stats(rounds=43)).draft_budget == (4,)


def test_whoever_expects_the_same_text_again_gets_the_same_guesses_from_a_planner_at_rest():
    planner, some = CostPlanner(costs(STEEP), most=12, replay=True), batch(2)
    live(planner, 2, [0.0] * 12, 40, took=lambda k: (2.0 * (1 + k), 0.0))
    at_rest = Stats(rounds=40, target_seconds=80.0)
    assert not any(planner.plan(some, at_rest).draft_budget)
    fixed = replace(some.seqs[0].request, id=9, params=SamplingParams(seed=1, temperature=1.0))
    joined = (*some.seqs, SequenceState(request=fixed, slot=2, token_ids=[0] * 11))
    more = Batch(seqs=joined, start=(10,) * 3, feed=((0,),) * 3, draft_budget=(20,) * 3)
    assert planner.plan(more, replace(at_rest, rounds=41)).draft_budget == (FIXED_DRAFT_LENGTH,) * 3


def test_a_text_is_read_by_the_draft_only_if_its_own_guesses_repay_that():
    reading = PassCost(tokens=(1, 1024), seconds=(0.1, 10.0), entry=0, pair=0)  # a tenth of a round, and more for more
    planner = CostPlanner(costs(FLAT, reading), most=4)
    took = lambda k: (1.0, 0.1 * k)  # noqa: E731
    assert live(planner, 2, [0.9] * 4, 101, took=took)[-1] == 4
    few, stats = batch(2), Stats(rounds=planner._stats.rounds + planner._window.rounds)

    def later(left, start):
        """Besides two rows that are read already, a third."""
        other = replace(few.seqs[0].request, id=left + start)
        rows = (*few.seqs, SequenceState(request=other, slot=2, token_ids=[0] * (start + 1)))
        return Batch(seqs=rows, start=(10, 10, start), feed=((0,),) * 3, draft_budget=(20, 20, left))

    state, budgets = planner._window, []
    for left, start in ((20, 10), (20, 1000), (2, 500)):
        planner._window = replace(state)
        budgets.append(planner.plan(later(left, start), stats).draft_budget)
    assert [bool(third) for _, _, third in budgets] == [True, False, False]
    assert all(one and two for one, two, _ in budgets)


def test_budgets_are_never_raised():
    planner = CostPlanner(costs(FLAT), most=12)
    some = batch(3)
    short = Batch(seqs=some.seqs, start=some.start, feed=some.feed, draft_budget=(0, 2, 20))
    budget = planner.plan(short, Stats()).draft_budget
    assert budget[0] == 0
    assert budget[1] <= 2


def test_calibration_measures_what_runs():
    target = ToyTarget(slots=4, context=64)
    cost = measure_pass(target)
    assert cost.tokens[0] == 1
    assert all(a <= b for a, b in zip(cost.seconds, cost.seconds[1:], strict=False))
    assert calibrate(target, None).draft is None


def test_costs_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = ToyTarget(slots=2, context=32)
    monkeypatch.setattr("outrider.plan.calibrate._measure", lambda target, rows, columns, cached: columns * 1e-3)
    first = known_costs(target, None)
    assert known_costs(target, None) == first
    assert cost_file(target, None).parent.parent == tmp_path
    assert cost_file(target, None) != cost_file(target, target)
    cost_file(target, None).write_text("{")
    known_costs(target, None)
    assert CostModel.loads(cost_file(target, None).read_text())


def test_costs_asked_for_longest_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("outrider.plan.calibrate._measure", lambda target, rows, columns, cached: columns * 1e-3)
    monkeypatch.setattr("outrider.plan.calibrate._FILES", 3)
    targets = [ToyTarget(slots=2, context=context) for context in range(32, 37)]
    files = [cost_file(target, None) for target in targets]
    for age, target in enumerate(targets[:3]):
        known_costs(target, None)
        os.utime(files[age], (age, age))
    known_costs(targets[0], None)  # and so the second was asked for longest ago
    for target in targets[3:]:
        known_costs(target, None)
    assert [file.exists() for file in files] == [True, False, False, True, True]
    assert set(files[0].parent.iterdir()) == {files[0], *files[3:]}


def test_costs_are_written_whole_or_not(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("outrider.plan.calibrate._measure", lambda target, rows, columns, cached: columns * 1e-3)
    target = ToyTarget(slots=2, context=32)
    known_costs(target, None)
    before = cost_file(target, None).read_text()

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr("os.replace", fail)
    assert known_costs(target, None, fresh=True)
    assert cost_file(target, None).read_text() == before
    assert list(cost_file(target, None).parent.iterdir()) == [cost_file(target, None)]


@pytest.mark.parametrize(("who", "least"), [("target", 2), ("draft", 1)])
def test_costs_of_a_busy_moment_are_measured_anew(tmp_path, monkeypatch, who, least):
    """What was slower then than beside all else is found out; what is slower altogether changes no decision."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, draft, passes = ToyTarget(slots=2, context=32), ToyTarget(slots=2, context=32), []
    slow, scale = {"target": target, "draft": draft}[who], [1.0, 2.0]

    def took(target, rows, columns, cached):
        passes.append(columns)
        return columns * 1e-3 * scale[0] * (scale[1] if target is slow and columns >= least else 1.0)

    monkeypatch.setattr("outrider.plan.calibrate._measure", took)
    monkeypatch.setattr("outrider.plan.calibrate._read", lambda target, columns: columns * 5e-4)
    known_costs(target, draft)
    scale[1] = 1.0
    mended = known_costs(target, draft)
    assert mended.target(8, rows=1, cached=0) == pytest.approx(8e-3)
    assert mended.draft == mended.target
    assert CostModel.loads(cost_file(target, draft).read_text()) == mended
    passes.clear()
    scale[0] = 3.0
    assert known_costs(target, draft) == mended
    assert len(passes) < 20


@pytest.mark.usefixtures("measured_costs")
def test_auto_writes_the_same_text(tmp_path, monkeypatch):
    monkeypatch.setattr("outrider.plan.calibrate.cache_folder", lambda: tmp_path)  # that of the kernels stays
    monkeypatch.setattr("outrider.plan.calibrate._SWEEPS", 1)
    params = SamplingParams(max_tokens=24)
    prompts = ["def add(a, b):\n    return", "Once upon a time"]
    texts = [
        [
            c.token_ids
            for c in LLM(None, k=k, max_num_seqs=2, max_model_len=96, dtype="float32").generate(prompts, params)
        ]
        for k in ("auto", 0)
    ]
    assert texts[0] == texts[1]
    with pytest.raises(OutriderError, match="k is 'many'; use a number of draft tokens"):
        LLM(embedded("nano"), k="many")


@torch.inference_mode()
def test_calibration_leaves_an_empty_cache():
    llm = LLM(None, proposer="none", max_num_seqs=2, max_model_len=96, dtype="float32")
    before = llm.generate("def add(a, b):", SamplingParams(max_tokens=8))[0].token_ids
    calibrate(llm.parts.target, None)
    assert llm.generate("def add(a, b):", SamplingParams(max_tokens=8))[0].token_ids == before


def test_guesses_that_just_fail_to_pay_are_not_followed_by_rounds_to_look_at_for_ever():
    """Where the gain is about 1, rounds without guesses cost nothing; but who makes only those never learns better."""
    tenth = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, tenth), most=12)
    poor = live(planner, 1, [0.08] * 12, 12, took=lambda k: (1.0, 0.1 * k))
    assert any(poor)
    planner.proposers[0].estimates_acceptance = True
    good = live(planner, 1, [0.9] * 12, 300, took=lambda k: (1.0, 0.1 * k))
    assert sum(map(bool, good[100:])) > 150


def test_a_text_that_begins_badly_is_guessed_later_on():
    """What fails in a text's first rounds is tried again within the text, and not only after a thousand tokens."""
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    planner = CostPlanner(costs(FLAT, fifth), most=12)
    took = lambda k: (1.0, 0.2 * k)  # noqa: E731
    live(planner, 1, [0.0] * 12, 30, took=took)
    assert sum(map(bool, live(planner, 1, [0.9] * 12, 150, took=took))) > 75


def test_other_texts_are_tried_at_once():
    """What failed of the texts before says little of them."""
    fifth = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0, pair=0)
    took = lambda k: (1.0, 0.2 * k)  # noqa: E731
    begun = []
    for first in (0, 1):
        planner = CostPlanner(costs(FLAT, fifth), most=12)
        assert live(planner, 1, [0.0] * 12, 20, took=took)[-1] == 0
        begun.append(any(live(planner, 1, [0.9] * 12, 3, took=took, first=first)))
    assert begun == [False, True]


def test_rows_of_a_trial_go_on_where_the_others_texts_are_too_dear_to_read():
    dear = PassCost(tokens=(1, 64), seconds=(0.01, 0.01), entry=0, pair=0, fed=0.08)
    planner = CostPlanner(costs(FLAT, dear), most=12)
    live(planner, 8, [0.9] * 12, 9, took=lambda k: (1.0, 0.01 * k))
    assert not planner.proposers[0].trial_passes_left
    told = Stats(rounds=planner._stats.rounds + planner._window.rounds)
    assert sum(map(bool, planner.plan(batch(8), told).draft_budget)) == 2
