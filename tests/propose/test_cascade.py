"""A cascade grows the draft model's own greedy chains, in fewer of its passes."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Batch, StopRule
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.draft_model.cascade import Cascade
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.registry import find_proposer
from outrider.propose.vocabulary.wrapped_target import Wrapped
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_row
from tests.helpers.engines import make_engine, outputs, run

PROMPTS = (
    "<|endoftext|>def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "<|endoftext|><|user|>What is 17 + 25?<|end|><|assistant|>",
    "<|endoftext|>import os\nimport sys\n\n\ndef main():\n    parser = argparse.Argument",
)
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=0.8, seed=5)
TRUST = StopRule(weight=(0.4, 0.3), bias=(0.0, -0.2), min_path_prob=0.1, min_draft_probs=(0.15, 0.3), ends=(4,))
PASSES = [("float32", 1), ("float32", 3), ("bfloat16", 1), ("bfloat16", 3)]


class Watched(Wrapped):
    """Counts passes, of which a chain grown alone takes one for each guess, and remembers what was grown."""

    def __init__(self, inner):
        super().__init__(inner)
        self.passes, self.grown = 0, []

    def score(self, batch, draft, first=-1):
        self.passes += 1
        return super().score(batch, draft, first)

    def draft_greedy(self, batch, vocab, stop_rule=None):
        grown = super().draft_greedy(batch, vocab, stop_rule)
        self.passes += 0 if isinstance(self.inner, Cascade) else max(batch.draft_budget)
        self.grown.append([row[:n] for row, n in zip(grown.tokens.tolist(), grown.count, strict=True)])
        return grown


@pytest.fixture(scope="module", params=PASSES, ids=lambda each: f"{each[0]}-{each[1]}")
def house(request):
    """Target, draft, tokenizer and how many rows run at once; in bfloat16 by the native kernels where they compile."""
    dtype, rows = request.param
    big, small = (load_checkpoint(embedded(name), dtype=dtype, device="cpu") for name in ("mini", "nano"))
    target, draft = (make_target(each, slots=rows, context=160) for each in (big, small))
    return target, draft, big.tokenizer, rows


def lives(house, params, k=5, verifier="walk"):
    """The same prompts with the draft model alone and with a cascade: texts, chains and passes of both."""
    target, draft, tokenizer, rows = house
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    found = []
    for wrap in (lambda model: model, Cascade):
        inner = Watched(draft)
        outer = Watched(wrap(inner))
        engine = make_engine(
            target, lambda setup, outer=outer: DraftModelProposer(setup, outer), verifier=verifier, k=k, rows=rows
        )
        texts = outputs(run(engine, prompts, params, limit=48, ends=frozenset({0, 3})))
        found.append((texts, outer.grown, inner.passes))
    return found


def test_the_same_guesses_in_fewer_passes(house):
    (texts, chains, alone), (same_texts, same_chains, together) = lives(house, GREEDY)
    assert same_chains == chains
    assert same_texts == texts
    assert sum(map(len, chains)) > 20
    assert together < 0.9 * alone


def test_rows_that_are_drawn_are_drafted_as_ever(house):
    (texts, chains, alone), (same_texts, same_chains, together) = lives(house, DRAWN, verifier="block")
    assert same_texts == texts
    assert chains == same_chains == []
    assert together == alone > 0


def test_what_is_picked_for_a_row_that_samples_is_looked_up_too(house):
    (texts, chains, alone), (same_texts, same_chains, together) = lives(house, DRAWN)
    assert same_texts == texts
    assert same_chains == chains
    assert sum(map(len, chains)) > 20
    assert together <= alone


def grown(target, texts, budget, *, vocab=None, stop_rule=None):
    """What a target grows after some texts of which it has read nothing."""
    rows = tuple(make_row(list(text), slot) for slot, text in enumerate(texts))
    for row in rows:
        target.cache.admit(row.slot, row.token_ids)
    feed = tuple(tuple(row.token_ids) for row in rows)
    batch = Batch(seqs=rows, start=(0,) * len(rows), feed=feed, draft_budget=budget)
    return target.draft_greedy(batch, vocab or target.vocab, stop_rule)


def fuzz(trial):
    """Texts that repeat themselves, and a budget for each."""
    chance = random.Random(trial)
    rows = chance.randint(1, 4)
    texts = [[chance.randrange(5) for _ in range(chance.randint(1, 6))] * chance.randint(1, 4) for _ in range(rows)]
    return texts, tuple(chance.randint(1, 8) for _ in range(rows))


@pytest.mark.parametrize("trial", range(30))
def test_rows_of_every_length_and_budget(trial):
    texts, budget = fuzz(trial)
    alone = grown(ToyTarget(seed=trial, spread=3.0), texts, budget, vocab=5)
    together = grown(Cascade(ToyTarget(seed=trial, spread=3.0)), texts, budget, vocab=5)
    assert together.count == alone.count == budget
    for b, most in enumerate(budget):
        assert together.tokens[b, :most].tolist() == alone.tokens[b, :most].tolist()
    assert int(together.tokens.max()) < 5


@pytest.mark.parametrize("trial", range(30))
def test_it_stops_where_the_draft_model_would(trial):
    texts, budget = fuzz(trial)
    alone = grown(ToyTarget(seed=trial, spread=3.0), texts, budget, stop_rule=TRUST)
    together = grown(Cascade(ToyTarget(seed=trial, spread=3.0)), texts, budget, stop_rule=TRUST)
    assert together.count == alone.count
    assert [*map(list, together.margin)] == [*map(list, alone.margin)]
    assert [*map(list, together.accept_prob)] == [*map(list, alone.accept_prob)]
    for b, count in enumerate(alone.count):
        assert together.tokens[b, :count].tolist() == alone.tokens[b, :count].tolist()


def test_stopping_is_tried_both_ways():
    cases = [fuzz(trial) for trial in range(30)]
    counts = [grown(ToyTarget(seed=i, spread=3.0), *case, stop_rule=TRUST).count for i, case in enumerate(cases)]
    early = [
        n < most for (_, budget), row in zip(cases, counts, strict=True) for n, most in zip(row, budget, strict=True)
    ]
    assert any(early)
    assert not all(early)


def test_a_slot_forgets_who_had_it_before():
    cascade = Cascade(ToyTarget(seed=3, spread=3.0))
    grown(cascade, [[1, 2, 3, 4] * 5], (6,))
    fresh = grown(ToyTarget(seed=3, spread=3.0), [[4, 3, 2, 1] * 5], (6,))
    assert torch.equal(grown(cascade, [[4, 3, 2, 1] * 5], (6,)).tokens, fresh.tokens)


def test_it_has_a_name():
    setup = toy_setup(ToyTarget())
    with pytest.raises(ValueError, match="cascade needs the folder of a small model; write cascade:DIR"):
        find_proposer("cascade", setup)
