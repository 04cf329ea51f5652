"""Several sequences whose passes take the time of the longest draft, as with recurrent layers, for made-up costs."""

import random

import torch

from outrider.core import tree
from outrider.core.planner import FixedPlanner
from outrider.core.stats import StatsAccumulator
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from tests.drafting.plan.test_plan import batch

SEQS = 8
TARGET = PassCost(tokens=(8, 16, 24, 32, 40, 72), seconds=(25.0, 30.0, 35.0, 40.0, 45.0, 61.0), entry=0.0, pair=0.0)
DRAFT = PassCost(tokens=(1, 8), seconds=(2.3, 3.2), entry=0.0, pair=0.0, shares_cache=True)
COSTS = CostModel(target=TARGET, draft=DRAFT, host=0.0)


def tokens_per_second(planner):
    """Return the speed. The draft model estimates the acceptance of its tokens, which varies from 0.2 to 1."""
    rng = random.Random(0)
    stats = StatsAccumulator(exact=True)
    batched = batch(SEQS)
    spent = 0.0
    for _ in range(150):
        planned = planner.plan(batched, stats)
        paths, seconds = grow(planned, rng)
        widths = tuple(map(len, paths))
        draft = tree.chain(torch.ones(SEQS, max(widths), dtype=torch.int64), widths, accept_prob=tuple(paths))
        widths = planner.trim(planned, draft).width
        verifying = TARGET.base(SEQS * (1 + max(widths)))
        rounds = []
        for path, width in zip(paths, widths, strict=True):
            value = rng.random()
            count = sum(value < prob for prob in path[:width])
            rounds.append((width, count, count + 1))
        stats.add(rounds, drafted=sum(widths))
        stats.add_round(draft=seconds, target=verifying, host=0.0, experts=0.0)
        spent += seconds + verifying
    return stats.total.output_tokens / spent


def grow(planned, rng):
    """Return the probability of each path of a draft, by sequence, and the seconds of drafting."""
    limits = planned.budget.min_draft_probs
    paths = [[] for _ in planned.seqs]
    active = [b for b, budget in enumerate(planned.draft_budget) if budget]
    seconds = 0.0
    while active:
        seconds += DRAFT.base(len(active))
        limit = limits[min(len(active), len(limits)) - 1] if limits else 0.0
        for b in tuple(active):
            prob = (paths[b] or [1.0])[-1] * rng.uniform(0.2, 1.0) ** 0.4
            if prob >= limit:
                paths[b].append(prob)
            if prob < limit or len(paths[b]) == planned.draft_budget[b]:
                active.remove(b)
    return paths, seconds


def test_draft_length_is_nearly_as_good_as_the_best_fixed_one():
    fixed = {k: tokens_per_second(FixedPlanner(k)) for k in range(7)}
    auto = tokens_per_second(CostPlanner(COSTS, padded=True))
    assert fixed[3] > 1.1 * fixed[1]
    assert auto > 0.95 * max(fixed.values())
