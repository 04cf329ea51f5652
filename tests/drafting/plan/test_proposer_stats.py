"""Tests of what the planner knows of a proposer: acceptance, the best draft length, trials, and its state."""

from dataclasses import replace

import pytest

from outrider.drafting.plan.pass_cost import Clock, CostModel, PassCost
from outrider.drafting.plan.proposer_stats import Outcome, ProposerStats
from outrider.drafting.plan.round_load import RoundLoad

FLAT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)  # a pass only reads the weights
TENTH = PassCost(tokens=(1, 2), seconds=(0.1, 0.1), entry=0, pair=0)
LOAD = RoundLoad(seqs=1, total_seqs=1, prompt_tokens=0, cached=0, remaining_tokens=99, at_start=False)


def costs(target=FLAT, draft=TENTH):
    return CostModel(target=target, draft=draft, host=0.0)


def stats_of(model=None, k=12):
    return ProposerStats(model or costs(), max_draft_tokens=k)


def outcome(accepted, *, k=4, rounds=10):
    """Return rounds of one sequence in which `accepted` of `k` draft tokens are accepted."""
    return Outcome(
        rounds=rounds,
        seqs=rounds,
        output_tokens=rounds * (1 + accepted),
        nodes=rounds * k,
        reached=tuple(rounds * (i <= accepted) for i in range(k)),
        accepted=tuple(rounds * (i < accepted) for i in range(k)),
        depth=rounds * k,
        draft_seconds=0.1 * rounds * k,
    )


def best_length(stats, cached=0):
    return stats.best_length(1, cached, Clock(stats.costs))


def test_acceptance_follows_the_outcomes():
    stats = stats_of()
    for _ in range(20):
        stats.learn(outcome(2), cached=0)
    assert stats.acceptance[0] > 0.9
    assert stats.acceptance[1] > 0.9
    assert stats.acceptance[2] < 0.1
    assert best_length(stats)[0] == 2


def test_nothing_is_drafted_if_nothing_is_accepted():
    stats = stats_of()
    for _ in range(20):
        stats.learn(outcome(0), cached=0)
    assert best_length(stats) == (0, 1.0)


def test_trimmed_drafts_have_the_whole_limit():
    stats = stats_of()
    stats.estimates_acceptance = True
    for _ in range(20):
        stats.learn(outcome(4), cached=0)
    length, gain = best_length(stats)
    assert length == 12
    assert gain == pytest.approx(5 / 1.4, rel=0.05)
    stats.estimates_acceptance = False
    assert not stats.estimates_acceptance


def test_single_tokens_are_drafted_where_longer_drafts_lose():
    """A draft token takes half a pass. The estimates let 4 be drafted, of which 1 is accepted."""
    half = PassCost(tokens=(1, 2), seconds=(0.5, 0.5), entry=0, pair=0)
    stats = stats_of(costs(FLAT, half))
    stats.estimates_acceptance = True
    for _ in range(20):
        stats.learn(replace(outcome(1), draft_seconds=20.0), cached=0)
    length, gain = best_length(stats)
    assert length == 1
    assert gain == pytest.approx(2 / 1.5, rel=0.05)


def test_lookups_keep_the_whole_limit():
    """Their estimates tell where a first token is worth it, so its acceptance says nothing about the other places."""
    stats = stats_of(costs(FLAT, None))
    stats.estimates_acceptance = True
    for _ in range(20):
        stats.learn(replace(outcome(1), output_tokens=5, draft_seconds=0.0), cached=0)
    assert best_length(stats)[0] == 12


def test_rounds_without_use_are_counted_until_the_next_use():
    stats = stats_of()
    before = stats.idle_rounds
    stats.count_rounds(7, used=False)
    assert stats.idle_rounds == before + 7
    stats.count_rounds(3, used=True)
    assert stats.idle_rounds == 0


def test_speedup_over_whole_texts_needs_passes():
    stats = stats_of()
    stats.add_time(spent=1.0, plain=2.0, saved=1.0, passes=10)
    assert stats.text_gain is None
    stats.add_time(spent=10.0, plain=20.0, saved=10.0, passes=100)
    assert stats.text_gain == pytest.approx(2.0)
    assert stats.saved_seconds == 11.0


def test_a_hopeless_trial_ends_early():
    stats = stats_of()
    stats.start_trial()
    stats.estimates_acceptance = True
    left = stats.trial_passes_left
    assert left
    stats.count_trial_passes(1, LOAD, Clock(stats.costs))
    assert stats.trial_passes_left == left - 1
    stats.learn(outcome(0), cached=0)
    stats.count_trial_passes(1, LOAD, Clock(stats.costs))
    assert stats.trial_passes_left == 0


def test_state_restores_what_was_learned():
    stats, other = stats_of(), stats_of()
    for _ in range(20):
        stats.learn(outcome(3), cached=0)
    other.restore(stats.state())
    assert (other.acceptance, best_length(other)) == (stats.acceptance, best_length(stats))


def test_draft_length_follows_the_context():
    """Keys and values that each pass reads make longer drafts pay; those that each token multiplies do not."""
    reading = stats_of(costs(replace(FLAT, entry=1e-3)))
    assert best_length(reading, 16_384)[0] > best_length(reading)[0]
    multiplying = stats_of(costs(replace(FLAT, pair=1e-3)))
    assert best_length(multiplying, 16_384)[0] < best_length(multiplying)[0]


def test_draft_window_limits_the_cost_of_a_long_context():
    """A draft that reads a whole long context does not pay; one that reads a window does."""
    whole = replace(TENTH, entry=1e-4)
    unlimited, windowed = stats_of(costs(FLAT, whole)), stats_of(costs(FLAT, replace(whole, window=512, fed=0.01)))
    assert best_length(unlimited, 256)[1] > 1
    assert best_length(unlimited, 16_384)[1] == 1
    assert best_length(windowed, 16_384)[1] > 1
    assert windowed.prefill_seconds(1, 16_384) == windowed.prefill_seconds(1, 512)
