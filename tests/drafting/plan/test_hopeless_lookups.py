"""A lookup that drafts in vain costs little, for made-up costs like those of a file with 4 bits per weight.

There a pass over two tokens takes 1.7 times as long as over one, so a rejected draft is expensive.
"""

import random
from itertools import accumulate
from operator import mul

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.stats import StatsAccumulator
from outrider.core.types import Batch, DraftBudget, FinishReason, Request, SequenceState
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.pass_cost import CostModel, PassCost

TOKENS = 128  # of each text
LOOKUP = 0.04  # time of a draft; a pass over one token takes 1
COSTS = CostModel(
    target=PassCost(
        tokens=(1, 2, 3, 4, 5, 8, 16), seconds=(1.0, 1.69, 1.98, 2.31, 2.74, 4.4, 9.0), entry=0.0, pair=0.0
    ),
    draft=None,
    host=0.0,
)


def gains(*, estimated, accepted, texts=24, depth=6):
    """Return the speedup of each text, drafts included.

    The proposer has a draft in each round. It estimates that a draft token is accepted with probability `estimated` if
    its parent is, and `accepted` is right.
    """
    rng = random.Random(0)
    planner = CostPlanner(COSTS)
    stats = StatsAccumulator(exact=True)
    result = []
    for text in range(texts):
        seq = _sequence(text)
        spent = 0.0
        while seq.num_output_tokens < TOKENS:
            spent += _round(planner, stats, seq, [estimated] * depth, rng, accepted)
        seq.finish_reason = FinishReason.LENGTH
        result.append(seq.num_output_tokens / spent)
    return result


def _sequence(id):
    fields = {"params": SamplingParams(), "seed": 0, "end_ids": frozenset(), "max_tokens": TOKENS}
    request = Request(id=id, prompt_token_ids=(0,) * 40, **fields)
    return SequenceState(request=request, slot=0, token_ids=[0] * 41)


def _round(planner, stats, seq, estimates, rng, accepted):
    """Run one round, and return its time. Draft tokens are 1, and others follow by 2."""
    left = TOKENS - seq.num_output_tokens - 1
    batch = Batch(seqs=(seq,), start=(len(seq.token_ids) - 1,), feed=((0,),), budget=DraftBudget((left,)))
    planned = planner.plan(batch, stats)
    depth = min(planned.draft_budget[0], len(estimates))
    probs = tuple(accumulate(estimates[:depth], mul))
    draft = planner.trim(planned, tree.chain(torch.ones(1, depth, dtype=torch.int64), (depth,), accept_prob=(probs,)))
    width = draft.width[0]
    count = next((i for i in range(width) if rng.random() >= accepted), width)
    seq.token_ids += [1] * count + [2]
    seq.rounds.append((width, count, count + 1))
    drafting = LOOKUP if depth else 0.0
    verifying = COSTS.verify(1, width, cached=0)
    stats.add([seq.rounds[-1]], drafted=width)
    stats.add_round(draft=drafting, target=verifying, host=0.0, experts=0.0)
    return drafting + verifying


@pytest.mark.parametrize("estimated", [0.05, 0.5])
def test_drafts_that_are_not_worth_verifying_are_given_up(estimated):
    """No draft token is verified, so the planner never learns their acceptance by position."""
    speedups = gains(estimated=estimated, accepted=0.05)
    assert min(speedups) > 0.98
    assert min(speedups[1:]) > 0.99


def test_estimates_that_are_too_high_are_found_out_soon():
    """A rejected draft of 6 tokens takes the time of 3 output tokens. Trials are included."""
    speedups = gains(estimated=0.9, accepted=0.1)
    assert speedups[0] > 0.75
    assert TOKENS * len(speedups) / sum(TOKENS / speedup for speedup in speedups) > 0.97
    assert sorted(speedups)[len(speedups) // 2] > 0.99


def test_good_drafts_are_used():
    assert min(gains(estimated=0.9, accepted=0.9)) > 1.25
