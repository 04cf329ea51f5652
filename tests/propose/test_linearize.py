"""Reduction of draft trees to chains, for recurrent targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draft, Packed
from outrider.llm import LLM
from outrider.plan.planner import FixedPlanner
from outrider.propose.linearize import linearize
from tests.helpers.tiny import Shelf


def test_linearize_follows_first_siblings():
    tokens = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]])
    parent = torch.tensor([[-1, -1, 1, 0, 3], [-1, 0, -1, 2, -1]])
    accept_prob = ((0.5, 0.4, 0.3, 0.2, 0.1), (0.9, 0.8, 0.1, 0.05))
    q = torch.rand(2, 5, 11)
    draft = replace(tree.one_hot_tree(tokens, parent, (5, 4), accept_prob=accept_prob), q=Packed.of(q))
    chain = linearize(draft)
    assert chain.chain
    assert chain.width == chain.depth == (3, 2)
    chain_tokens = [ids[:width] for ids, width in zip(chain.tokens.tolist(), chain.width, strict=True)]
    assert chain_tokens == [[5, 8, 9], [1, 2]]
    assert chain.accept_prob == ((0.5, 0.2, 0.1), (0.9, 0.8))
    assert torch.equal(chain.q.padded()[0], q[0, [0, 3, 4]])
    assert torch.equal(chain.q.padded()[1, :2], q[1, :2])


def test_linearize_keeps_empty_drafts():
    tokens = torch.tensor([[5, 6], [0, 0]])
    parent = torch.tensor([[-1, -1], [-1, -1]])
    assert linearize(tree.one_hot_tree(tokens, parent, (2, 0))).width == (1, 0)


class CountingPlanner(FixedPlanner):
    """Counts draft tokens and the drafts that are not chains."""

    def __init__(self) -> None:
        super().__init__(4)
        self.num_trees = 0
        self.draft_tokens = 0

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        self.num_trees += not draft.chain
        self.draft_tokens += sum(draft.width)
        return draft


@pytest.mark.parametrize(("name", "chains"), [("mamba2", True), ("llama", False)])
def test_only_recurrent_targets_get_chains(tmp_path, name, chains):
    planner = CountingPlanner()
    llm = LLM(
        Shelf(tmp_path).folder(name),
        proposer="recycle",
        planner=planner,
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
    )
    llm.generate(["a b a b a b"], SamplingParams(temperature=0.0, max_tokens=40))
    assert planner.draft_tokens
    assert bool(planner.num_trees) is not chains
