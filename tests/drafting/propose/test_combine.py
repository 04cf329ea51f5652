"""Tests of the combinations of proposers: `first`, `switch` and `merge`."""

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.proposer import NoProposer
from outrider.core.types import Needs
from outrider.drafting.propose.combine import First, Merge, Switch
from outrider.errors import OutriderError
from outrider.testing import ToyTarget, toy_setup
from tests.drafting.propose.toy_rounds import admit, batch_of, commit, verify

SETUP = toy_setup(ToyTarget())


class Fixed(NoProposer):
    """Drafts the same chain in each round, for the sequences in `slots`."""

    def __init__(self, *tokens, slots=(0, 1), needs=None):
        super().__init__(SETUP)
        self.tokens = tokens
        self.slots = slots
        self.needs = needs or Needs()
        self.budgets = []

    def propose(self, batch):
        self.budgets.append(batch.draft_budget)
        pairs = zip(batch.seqs, batch.draft_budget, strict=True)
        width = tuple(min(budget, len(self.tokens)) if seq.slot in self.slots else 0 for seq, budget in pairs)
        return tree.chain(torch.tensor([self.tokens] * len(width)), width)


class TargetItself(NoProposer):
    """Drafts the likeliest next token of a toy target."""

    def __init__(self, target):
        super().__init__(SETUP)
        self._table = target.table

    def propose(self, batch):
        best = [int(self._table[tuple(seq.token_ids[-2:])].argmax()) for seq in batch.seqs]
        return tree.chain(torch.tensor(best)[:, None], tuple(min(budget, 1) for budget in batch.draft_budget))


def propose(kind, *parts, budget=4, alternative=None):
    """Return the nodes (parent, token) of two sequences, and the bits of the parts. The first names an alternative."""
    proposer = kind(SETUP, parts)
    batch = batch_of(admit(proposer, [[1, 2], [3, 4]]), budget)
    batch.seqs[0].request = replace(batch.seqs[0].request, alternative=alternative)
    draft = proposer.propose(batch)
    nodes = [list(zip(draft.parent[b].tolist(), draft.tokens[b].tolist(), strict=True)) for b in range(2)]
    return [each[:width] for each, width in zip(nodes, draft.width, strict=True)], draft.source


def test_first_uses_the_first_part_that_has_a_draft():
    second = Fixed(5, 6)
    nodes, source = propose(First, Fixed(1, slots=(1,)), second)
    assert nodes == [[(-1, 5), (0, 6)], [(-1, 1)]]
    assert second.budgets == [(4, 0)]
    assert [set(bits[:width]) for bits, width in zip(source, (2, 1), strict=True)] == [{2}, {1}]


def test_switch_asks_only_the_alternative_of_each_sequence():
    one, two = Fixed(1), Fixed(2)
    nodes, _ = propose(Switch, one, two, alternative=1)
    assert nodes == [[(-1, 2)], [(-1, 1)]]
    assert (one.budgets, two.budgets) == ([(0, 4)], [(4, 0)])
    assert Switch(SETUP, [one, two]).needs.alternatives == 2


def test_merge_shares_equal_tokens_and_keeps_the_others_as_branches():
    nodes, source = propose(Merge, Fixed(1, 2), Fixed(1, 3))
    assert sorted(nodes[0]) == [(-1, 1), (0, 2), (0, 3)]
    by_token = dict(zip([token for _, token in nodes[0]], source[0], strict=False))
    assert by_token == {1: 3, 2: 1, 3: 2}


def test_merge_stays_within_the_budget():
    nodes, _ = propose(Merge, Fixed(1, 2, 3), Fixed(4, 5, 6), budget=4)
    assert [len(each) for each in nodes] == [4, 4]


def test_merge_prefers_the_part_that_was_right():
    target = ToyTarget()
    merge = Merge(SETUP, [Fixed(1), TargetItself(target)])
    seqs = admit(merge, [[1, 2], [3, 4]])
    for _ in range(20):
        batch = batch_of(seqs, 2)
        commit(merge, verify(target, batch, merge.propose(batch)))
    draft = merge.propose(batch_of(seqs, 1))
    assert all(bits[0] & 2 for bits in draft.source)


def test_needs_of_all_parts():
    parts = [Fixed(1, needs=Needs(layers=(3, 1))), Fixed(2, needs=Needs(layers=(1, 2)))]
    assert Merge(SETUP, parts).needs == Needs(layers=(1, 2, 3))


@pytest.mark.parametrize("kind", [First, Switch, Merge])
def test_parts_are_checked(kind):
    with pytest.raises(OutriderError, match="name two or more"):
        kind(SETUP, [Fixed(1)])
    with pytest.raises(OutriderError, match="outermost"):
        kind(SETUP, [Fixed(1), Switch(SETUP, [Fixed(1), Fixed(2)])])
