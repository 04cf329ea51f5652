"""Tests of drafts that are compared with the text instead of being verified."""

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.stats import Stats
from outrider.core.types import FinishReason
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.unverified import UnverifiedDrafts
from tests.drafting.plan.test_plan import STEEP, batch, costs

CPU = torch.device("cpu")


def tree_of(tokens, parents):
    draft = tree.chain(torch.tensor(tokens), tuple(map(len, tokens)))
    return replace(draft, parent=torch.tensor(parents), depth=(2,) * len(tokens), chain=False)


def test_outcome_of_chains():
    round = batch(2)
    drafts = UnverifiedDrafts(0, round, tree.chain(torch.tensor([[5, 6, 7], [5, 6, 7]]), (3, 3)))
    assert drafts.outcome() is None  # there is no text yet
    round.seqs[0].token_ids += [5, 6, 9, 9]
    outcome = drafts.outcome()
    assert (outcome.seqs, outcome.output_tokens, outcome.nodes, outcome.depth) == (1, 3, 3, 3)
    assert (outcome.reached, outcome.accepted) == ((1, 1, 1), (1, 1, 0))
    round.seqs[1].token_ids += [5]
    round.seqs[1].finish_reason = FinishReason.STOP
    outcome = drafts.outcome()
    assert (outcome.seqs, outcome.output_tokens, outcome.nodes) == (2, 5, 6)
    assert outcome.draft_seconds is None


def test_outcome_of_trees():
    """Nodes 0 and 1 are siblings, and node 2 follows node 1."""
    round = batch(1)
    drafts = UnverifiedDrafts(0, round, tree_of([[5, 6, 7]], [[-1, -1, 1]]))
    round.seqs[0].token_ids += [6, 7, 1]
    assert drafts.outcome().output_tokens == 3
    round.seqs[0].token_ids[-3:] = [5, 7, 1]
    assert drafts.outcome().output_tokens == 2


@pytest.mark.parametrize("right", [True, False])
def test_planner_learns_during_plain_decoding(right):
    """Wide passes are slow at first sight: trials fail. Once drafts become right, no trial is needed to see it."""
    planner = CostPlanner(costs(replace(STEEP, seconds=(1.0, 16.0)), None), max_draft_tokens=8)
    seqs = batch(4).seqs
    stats = Stats()
    verified = []
    for step in range(500):
        round = batch(4)
        start = len(seqs[0].token_ids) - 1
        round = replace(round, seqs=seqs, start=(start,) * 4)
        planned = planner.plan(round, stats)
        token = 7 if right and step >= 150 else 8
        depth = max(planned.draft_budget)
        draft = planner.trim(planned, tree.chain(torch.full((4, depth), token), planned.draft_budget))
        verified.append(max(draft.width))
        accepted = [width if token == 7 else 0 for width in draft.width]
        for seq, count in zip(seqs, accepted, strict=True):
            seq.token_ids += [7] * (count + 1)
        passes = [(width, count, count + 1) for width, count in zip(draft.width, accepted, strict=True)]
        took = planner.proposers[0].costs.target(4 + sum(draft.width), seqs=4, cached=start)
        delta = Stats.of_passes(passes, drafted=sum(draft.width))
        stats = replace(stats + delta, rounds=step + 1, target_seconds=stats.target_seconds + took)
    assert planner.proposers[0].unverified_rounds > 4
    assert (sum(verified[400:]) > 100) is right
    assert sum(verified[50:150]) < 40
