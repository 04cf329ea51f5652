"""The cascade: it drafts the same greedy chains as its draft model, in fewer passes."""

import random

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget, StopRule
from outrider.drafting.propose.draft_model.cascade import Cascade
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.registry import find_proposer
from outrider.drafting.propose.vocabulary.wrapped_target import WrappedTarget
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_seq
from tests.helpers.engines import make_engine, outputs, run

PROMPTS = (
    "<|endoftext|>def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "<|endoftext|><|user|>What is 17 + 25?<|end|><|assistant|>",
    "<|endoftext|>import os\nimport sys\n\n\ndef main():\n    parser = argparse.Argument",
)
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=5)
STOP_RULE = StopRule(weight=(0.4, 0.3), bias=(0.0, -0.2), min_path_prob=0.1, min_draft_probs=(0.15, 0.3), ends=(4,))
CASES = [("float32", 1), ("float32", 3), ("bfloat16", 1), ("bfloat16", 3)]  # dtype and slots
FAST = pytest.mark.fast_cases("bfloat16-3")


class PassCounter(WrappedTarget):
    """Counts the passes of a draft model and records its chains.

    A draft model alone takes one pass for each draft token.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.passes = 0
        self.chains = []

    def score(self, batch, draft, first=-1):
        self.passes += 1
        return super().score(batch, draft, first)

    def draft_greedy(self, batch, vocab, stop_rule=None):
        chains = super().draft_greedy(batch, vocab, stop_rule)
        self.passes += 0 if isinstance(self.inner, Cascade) else max(batch.draft_budget)
        self.chains.append([ids[:count] for ids, count in zip(chains.tokens.tolist(), chains.count, strict=True)])
        return chains


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def models(request):
    """Target, draft model, tokenizer and slots. bfloat16 runs on the native kernels if there is a compiler."""
    dtype, slots = request.param
    mini = load_checkpoint(embedded("mini"), dtype=dtype, device="cpu")
    nano = load_checkpoint(embedded("nano"), dtype=dtype, device="cpu")
    target = make_target(mini, slots=slots, context=160)
    draft_model = make_target(nano, slots=slots, context=160)
    return target, draft_model, mini.tokenizer, slots


def run_both(models, params, k=5, verifier="walk"):
    """Run the prompts with the draft model alone and with a cascade. Return the outputs, chains and passes of both."""
    target, draft_model, tokenizer, slots = models
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    results = []
    for wrap in (lambda model: model, Cascade):
        inner = PassCounter(draft_model)
        outer = PassCounter(wrap(inner))
        engine = make_engine(
            target, lambda setup, outer=outer: DraftModelProposer(setup, outer), verifier=verifier, k=k, rows=slots
        )
        texts = outputs(run(engine, prompts, params, limit=48, ends=frozenset({0, 3})))
        results.append((texts, outer.chains, inner.passes))
    return results


@FAST
def test_greedy_chains_are_equal_and_take_fewer_passes(models):
    (texts, chains, passes), (cascade_texts, cascade_chains, cascade_passes) = run_both(models, GREEDY)
    assert cascade_chains == chains
    assert cascade_texts == texts
    assert sum(map(len, chains)) > 20
    assert cascade_passes < 0.9 * passes


@FAST
def test_sampled_drafts_do_not_use_the_cascade(models):
    (texts, chains, passes), (cascade_texts, cascade_chains, cascade_passes) = run_both(
        models, SAMPLED, verifier="block"
    )
    assert cascade_texts == texts
    assert chains == cascade_chains == []
    assert cascade_passes == passes > 0


@FAST
def test_sampled_requests_with_greedy_drafts_use_the_cascade(models):
    (texts, chains, passes), (cascade_texts, cascade_chains, cascade_passes) = run_both(models, SAMPLED)
    assert cascade_texts == texts
    assert cascade_chains == chains
    assert sum(map(len, chains)) > 20
    assert cascade_passes <= passes


def draft_chains(target, texts, budget, *, vocab=None, stop_rule=None):
    """Return the greedy chains of a target after texts that it has not prefilled."""
    seqs = tuple(make_seq(list(text), slot) for slot, text in enumerate(texts))
    for seq in seqs:
        target.cache.admit(seq.slot, seq.token_ids)
    feed = tuple(tuple(seq.token_ids) for seq in seqs)
    batch = Batch(seqs=seqs, start=(0,) * len(seqs), feed=feed, budget=DraftBudget(budget))
    return target.draft_greedy(batch, vocab or target.vocab, stop_rule)


def random_case(seed):
    """Return repetitive texts and a budget for each."""
    rng = random.Random(seed)
    num_seqs = rng.randint(1, 4)
    texts = [[rng.randrange(5) for _ in range(rng.randint(1, 6))] * rng.randint(1, 4) for _ in range(num_seqs)]
    return texts, tuple(rng.randint(1, 8) for _ in range(num_seqs))


@pytest.mark.parametrize("seed", range(30))
def test_chains_are_equal_for_any_length_and_budget(seed):
    texts, budget = random_case(seed)
    expected = draft_chains(ToyTarget(seed=seed, spread=3.0), texts, budget, vocab=5)
    chains = draft_chains(Cascade(ToyTarget(seed=seed, spread=3.0)), texts, budget, vocab=5)
    assert chains.count == expected.count == budget
    for b, count in enumerate(budget):
        assert chains.tokens[b, :count].tolist() == expected.tokens[b, :count].tolist()
    assert int(chains.tokens.max()) < 5


@pytest.mark.parametrize("seed", range(30))
def test_chains_stop_where_the_draft_model_stops(seed):
    texts, budget = random_case(seed)
    expected = draft_chains(ToyTarget(seed=seed, spread=3.0), texts, budget, stop_rule=STOP_RULE)
    chains = draft_chains(Cascade(ToyTarget(seed=seed, spread=3.0)), texts, budget, stop_rule=STOP_RULE)
    assert chains.count == expected.count
    assert [*map(list, chains.margin)] == [*map(list, expected.margin)]
    assert [*map(list, chains.accept_prob)] == [*map(list, expected.accept_prob)]
    for b, count in enumerate(expected.count):
        assert chains.tokens[b, :count].tolist() == expected.tokens[b, :count].tolist()


def test_random_cases_stop_early_and_at_the_budget():
    stops_early = []
    for seed in range(30):
        texts, budget = random_case(seed)
        counts = draft_chains(ToyTarget(seed=seed, spread=3.0), texts, budget, stop_rule=STOP_RULE).count
        stops_early += [count < most for count, most in zip(counts, budget, strict=True)]
    assert any(stops_early)
    assert not all(stops_early)


def test_new_sequence_in_a_slot_replaces_the_index():
    cascade = Cascade(ToyTarget(seed=3, spread=3.0))
    draft_chains(cascade, [[1, 2, 3, 4] * 5], (6,))
    expected = draft_chains(ToyTarget(seed=3, spread=3.0), [[4, 3, 2, 1] * 5], (6,))
    assert torch.equal(draft_chains(cascade, [[4, 3, 2, 1] * 5], (6,)).tokens, expected.tokens)


def test_cascade_without_folder_is_rejected():
    setup = toy_setup(ToyTarget())
    with pytest.raises(ValueError, match="cascade needs the folder of a draft model; write cascade:DIR"):
        find_proposer("cascade", setup)
