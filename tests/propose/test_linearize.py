"""Chains of trees, for targets whose state is recurrent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, Draft, Packed
from outrider.llm import LLM
from outrider.plan.planner import FixedPlanner
from outrider.propose.linearize import likeliest
from tests.helpers.tiny import Shelf


def test_the_first_of_all_siblings_is_followed():
    tokens = torch.tensor([[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]])
    parent = torch.tensor([[-1, -1, 1, 0, 3], [-1, 0, -1, 2, -1]])
    chance = ((0.5, 0.4, 0.3, 0.2, 0.1), (0.9, 0.8, 0.1, 0.05))
    q = torch.rand(2, 5, 11)
    draft = replace(tree.one_hot_tree(tokens, parent, (5, 4), accept_prob=chance), q=Packed.of(q))
    found = likeliest(draft)
    assert found.chain
    assert found.width == found.depth == (3, 2)
    assert [row[:width] for row, width in zip(found.tokens.tolist(), found.width, strict=True)] == [[5, 8, 9], [1, 2]]
    assert found.accept_prob == ((0.5, 0.2, 0.1), (0.9, 0.8))
    assert torch.equal(found.q.padded()[0], q[0, [0, 3, 4]])
    assert torch.equal(found.q.padded()[1, :2], q[1, :2])


def test_a_row_without_guesses_has_none():
    tokens, parent = torch.tensor([[5, 6], [0, 0]]), torch.tensor([[-1, -1], [-1, -1]])
    found = likeliest(tree.one_hot_tree(tokens, parent, (2, 0)))
    assert found.width == (1, 0)


class _Seen(FixedPlanner):
    """Looks at every draft."""

    def __init__(self) -> None:
        super().__init__(4)
        self.branched = self.guesses = 0

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        self.branched += not draft.chain
        self.guesses += sum(draft.width)
        return draft


@pytest.mark.parametrize(("name", "chains"), [("mamba2", True), ("llama", False)])
def test_a_recurrent_target_gets_chains_alone(tmp_path, name, chains):
    seen = _Seen()
    llm = LLM(
        Shelf(tmp_path).folder(name),
        proposer="recycle",
        planner=seen,
        dtype="float32",
        max_num_seqs=1,
        max_model_len=64,
    )
    llm.generate(["a b a b a b"], SamplingParams(temperature=0.0, max_tokens=40))
    assert seen.guesses
    assert bool(seen.branched) is not chains
