"""What is measured in a limited time."""

import math

import pytest

from outrider.lab.fit.rules import CertificatePlan, evaluation_tokens, plan_certificate
from outrider.lab.tune.budget import Budget, RunTime, most_promising, plan_budget
from tests.lab.tune.trials import make_variant, trial

FAST = RunTime(prefill=0.01, token=0.01)
SLOW = RunTime(prefill=1.0, token=0.2)


def test_time_of_a_run():
    assert RunTime.of(trial(make_variant(), seconds=1.0, prefill=0.1, tokens=10)) == (0.1, pytest.approx(0.1))
    assert RunTime.of(trial(make_variant(batch=5), seconds=1.0, prefill=0.1, tokens=50)) == (0.1, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("time", "seconds", "budget"),
    [
        (FAST, math.inf, Budget(128, 29)),
        (FAST, 300.0, Budget(128, 29)),
        (FAST, 30.0, Budget(46, 29)),  # 29 x (0.09 + 2 x 0.47) = 29.9 s
        (FAST, 15.0, Budget(32, 20)),  # 20 x (0.09 + 2 x 0.33) = 15 s
        (SLOW, 15.0, Budget(32, 2)),  # one proposer stays
        (RunTime(0.0, 0.0), 0.0, Budget(32, 2)),
    ],
)
def test_budget(time, seconds, budget):
    assert plan_budget(time, seconds=seconds, variants=29, max_tokens=128) == budget


@pytest.mark.parametrize("time", [FAST, SLOW])
@pytest.mark.parametrize("seconds", [5.0, 15.0, 60.0, 200.0])
def test_a_budget_takes_its_time_at_most(time, seconds):
    budget = plan_budget(time, seconds=seconds, variants=29, max_tokens=128)
    if budget.variants > 2:
        assert budget.variants * (time.run(8) + 2 * time.run(budget.max_tokens)) <= seconds + 1e-9


def test_each_proposer_comes_before_a_second_k():
    ks = (2, 4, "auto")
    variants = [make_variant(), *(make_variant(name, k) for name in ("ngram", "suffix") for k in ks)]
    names = [(each.proposer, each.k) for each in most_promising(variants, 4)]
    assert names == [("", 0), ("ngram", 2), ("ngram", "auto"), ("suffix", "auto")]
    assert most_promising(variants, 9) == variants


@pytest.mark.parametrize(
    ("tokens_per_s", "seconds", "plan"),
    [
        (1000.0, 300.0, CertificatePlan(400, 16)),
        (100.0, 60.0, CertificatePlan(148, 10)),
        (100.0, 33.0, CertificatePlan(100, 5)),
        (100.0, 30.0, None),  # 4 x 288 + 100 x 21 tokens take 32.5 s
        (5.0, 30.0, None),
    ],
)
def test_certificate_tests_less_where_time_is_short(tokens_per_s, seconds, plan):
    assert plan_certificate(400, k=4, tokens_per_s=tokens_per_s, seconds=seconds) == plan


def test_evaluations_take_an_eighth_of_the_training():
    assert evaluation_tokens(100.0, minutes=1) == 46  # 16 texts of 46 tokens take 7.4 s
    assert evaluation_tokens(100.0, minutes=60) == 128
    assert evaluation_tokens(1.0, minutes=0.1) == 16
