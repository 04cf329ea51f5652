"""Tests that packed and padded tensors give the same probabilities, verdicts and outputs, for all draft widths."""

import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import PositionNoise
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, DraftKind, Packed, Request, Scores, SequenceState
from outrider.drafting.propose.combine import First, Merge
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.draft_model.tree import TreeProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native.rules import fastest_verifier
from outrider.testing.drive import random_tree
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT
from outrider.verify.sampling import SamplingTensors, apply_sampling, apply_sampling_packed
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run

CPU = torch.device("cpu")
BATCH, SIZE, VOCAB = 12, 5, 40
RULES = {**EXACT, **LOSSY}
RULES_AND_SHAPES = [(name, shape) for name in RULES for shape in ("chain", "tree")[: 1 + RULES[name].trees]]


def packed(padded, width, *, skip=-1):
    """Pack [B, M, V]: keep `width[b]` nodes of sequence b. Padding has index `skip`; -2: that of its first node."""
    at = torch.full(padded.shape[:2], skip)
    count = 0
    for b, nodes in enumerate(width):
        at[b] = count if skip == -2 else skip
        at[b, :nodes] = torch.arange(count, count + nodes)
        count += nodes
    values = torch.cat([rows[:nodes] for rows, nodes in zip(padded, width, strict=True)])
    return Packed(values=values, at=at)


def packed_scores(padded, width):
    """Pack scores, which have a root for each sequence. Padding points to the root."""
    return packed(padded, [1 + nodes for nodes in width], skip=-2)


def random_seq(b, rng):
    """Return a sequence with random sampling parameters."""
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.7, 1.0, 1.3]),
        top_k=rng.choice([0, 3, 9]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.4]),
        logit_bias=rng.choice([{}, {2: -5.0, 4: 1.5}]),
        min_tokens=rng.choice([0, 3, 6]),
        seed=b,
    )
    prompt = tuple(rng.randrange(VOCAB) for _ in range(4))
    request = Request(id=b, prompt_token_ids=prompt, params=params, seed=b, end_ids=frozenset({0, 7}), max_tokens=99)
    return SequenceState(request=request, slot=b, token_ids=[*prompt, *(rng.randrange(VOCAB) for _ in range(b % 4))])


def random_draft(seed, *, chain, sampled):
    """Return trees or chains of all widths, and padded q if packed_values draft tokens are `sampled`."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    width = (SIZE, *(rng.choice([0, 0, 1, SIZE - 1, SIZE]) for _ in range(BATCH - 1)))
    parent = torch.arange(-1, SIZE - 1).expand(BATCH, SIZE)
    if not chain:
        parent = random_tree([SIZE] * BATCH, VOCAB, rng).parent
    kinds = [DraftKind.ONE_HOT]
    if sampled:
        kinds = [DraftKind.SAMPLED] if chain else [DraftKind.WITHOUT_REPLACEMENT, DraftKind.SAMPLED]
        kinds.append(DraftKind.ONE_HOT)
    kind = torch.tensor([[rng.choice(kinds) for _ in range(SIZE)]] * BATCH)
    q = (torch.randn(BATCH, SIZE, VOCAB, generator=generator) * 2).softmax(-1)
    q = q * (kind != DraftKind.ONE_HOT)[..., None]
    tokens = torch.multinomial(q.flatten(0, 1) + 1e-9, 1, generator=generator).view(BATCH, SIZE)
    draft = Draft(
        tokens=tokens,
        parent=parent,
        count=torch.tensor(width),
        kind=kind,
        q=None,
        width=width,
        depth=width,
        chain=chain,
    )
    return draft, q if sampled else None


def test_packed_values_can_be_padded():
    padded = torch.rand(3, 4, 5)
    assert torch.equal(Packed.of(padded).padded(), padded)
    packed_values = packed(padded, (4, 0, 2))
    assert packed_values.values.shape == (6, 5)
    assert torch.equal(packed_values.padded()[0], padded[0])
    assert not packed_values.padded()[1].any()
    assert torch.equal(packed_values.padded()[2, :2], padded[2, :2])
    assert not packed_values.padded()[2, 2:].any()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_packed_probabilities_equal_padded_ones_bitwise(chain, seed):
    """Even seeds use all parameters together, odd seeds use one of them."""
    rng = random.Random(seed)
    seqs = [random_seq(b, rng) for b in range(BATCH)]
    if seed % 2:
        name = rng.choice(["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens"])
        for seq in seqs:
            fields = {"temperature": 1.0, name: getattr(seq.request.params, name)}
            seq.request = replace(seq.request, params=SamplingParams(**fields))
    draft, _ = random_draft(seed, chain=chain, sampled=False)
    logits = torch.randn(BATCH, 1 + SIZE, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    sampling = SamplingTensors.of(seqs, VOCAB, CPU)
    expected = apply_sampling(logits, sampling, draft)
    actual = apply_sampling_packed(packed_scores(logits, draft.width), sampling, draft)
    assert len(actual.values) == BATCH + sum(draft.width)
    for b, nodes in enumerate(draft.width):
        assert torch.equal(actual.padded()[b, : 1 + nodes], expected[b, : 1 + nodes])


@pytest.mark.fast_cases(
    "walk-chain-one-hot",
    "coupled-tree-sampled",
    "rejection-chain-sampled",
    "block-chain-one-hot",
    "siblings-tree-sampled",
    "traversal-chain-sampled",
    "typical-tree-one-hot",
    "lenient-chain-sampled",
)
@pytest.mark.parametrize("sampled", [False, True], ids=["one-hot", "sampled"])
@pytest.mark.parametrize(("name", "shape"), RULES_AND_SHAPES)
def test_packed_verdicts_equal_padded_ones(name, shape, sampled):
    for seed in range(20):
        draft, q = random_draft(seed, chain=shape == "chain", sampled=sampled)
        generator = torch.Generator().manual_seed(seed)
        p = (torch.randn(BATCH, 1 + SIZE, VOCAB, generator=generator) * 2).softmax(-1)
        if q is not None:  # make p similar to q, so that packed_values draft tokens are accepted
            p[:, 1:] = p[:, 1:] * 0.5 + q * 0.5
            p = p / p.sum(-1, keepdim=True)
        noise = PositionNoise(torch.arange(BATCH), torch.arange(BATCH) * 3 + seed)
        padded_draft = draft if q is None else replace(draft, q=Packed.of(q))
        packed_draft = draft if q is None else replace(draft, q=packed(q, draft.width))
        expected = RULES[name].rule(padded_draft, p, noise)
        for verifier in (RULES[name], fastest_verifier(RULES[name], CPU)):
            actual = verifier.verify(packed_draft, packed_scores(p, draft.width), noise)
            assert actual.path.tolist() == expected.path.tolist()
            assert actual.accepted.tolist() == expected.accepted.tolist()
            assert actual.bonus.tolist() == expected.bonus.tolist()
            torch.testing.assert_close(actual.logprob, expected.logprob)


def test_cut_keeps_q_of_the_remaining_nodes():
    draft, q = random_draft(1, chain=True, sampled=True)
    draft = replace(draft, q=packed(q, draft.width))
    shorter = tree.cut(draft, (2,) * BATCH)
    assert torch.equal(shorter.q.padded(), draft.q.padded()[:, :2])
    assert shorter.q.values is draft.q.values


class PlainTarget:
    """A target without packed logits and without `draft_sampled`."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        if name == "draft_sampled":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def score(self, batch, draft, first=-1):
        scores = self._inner.score(batch, draft, first)
        return Scores(
            logits=scores.logits,
            hidden_states=scores.hidden_states,
            feed_hidden_states=scores.feed_hidden_states,
            best=scores.best,
        )


class Uneven:
    """Limits another proposer: request b gets at most b % 5 draft tokens, and none in every third round."""

    def __init__(self, inner):
        self._inner = inner
        self._round = 0
        self.needs = inner.needs
        self.admit = inner.admit
        self.commit = inner.commit
        self.release = inner.release

    def propose(self, batch):
        self._round += 1
        limits = [seq.request.id % 5 if self._round % 3 else 0 for seq in batch.seqs]
        budget = tuple(map(min, batch.draft_budget, limits))
        return self._inner.propose(batch.limited(budget))


PROPOSERS = {
    "chain": lambda small: lambda setup: DraftModelProposer(setup, small),
    "tree": lambda small: lambda setup: TreeProposer(setup, small),
    "first": lambda small: lambda setup: First(setup, (NgramProposer(setup), DraftModelProposer(setup, small))),
    "merge": lambda small: lambda setup: Merge(setup, (NgramProposer(setup), TreeProposer(setup, small))),
}


@pytest.fixture(scope="module")
def pair():
    big, small = (load_checkpoint(embedded(name), dtype="bfloat16", device="cpu") for name in ("mini", "nano"))
    targets = [make_target(checkpoint, slots=10, context=96, kernels="native") for checkpoint in (big, small)]
    return *targets, big.tokenizer


@pytest.mark.fast_cases("chain-coupled-True", "chain-rejection-True", "tree-siblings-True", "merge-traversal-True")
@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "rule", "random_params"),
    [
        *(("chain", rule, True) for rule in EXACT if rule != "traversal"),
        *(("chain", rule, False) for rule in ("block", "walk", "rejection")),
        *(("tree", rule, True) for rule in ("walk", "siblings", "traversal")),
        ("first", "block", True),
        ("merge", "traversal", True),
    ],
)
def test_outputs_of_native_kernels_equal_padded_ones(name, rule, random_params, pair):
    target, small, tokenizer = pair
    rng = random.Random(5)
    seqs = [random_seq(b, rng) for b in range(10)]
    params = []
    for b, seq in enumerate(seqs):
        simple = SamplingParams(temperature=(1.0, 0.0, 0.6, 1.0)[b % 4], seed=b)
        params.append(seq.request.params if random_params and b % 3 else simple)
    texts = ("<|endoftext|>def add(a, b):\n    return a + b\n\ndef", "<|endoftext|>The old man and")
    prompts = [tokenizer.encode(texts[b % 2])[: 5 + b] for b in range(10)]
    native = (target, small, fastest_verifier(EXACT[rule], CPU))
    padded = (PlainTarget(target), PlainTarget(small), EXACT[rule])
    results = []
    for model, draft_model, verifier in (native, padded):
        make = PROPOSERS[name](draft_model)
        engine = make_engine(model, lambda setup, make=make: Uneven(make(setup)), verifier=verifier, rows=10)
        results.append(outputs(run(engine, prompts, params, limit=9)))
    assert results[0] == results[1]
    assert len({tuple(tokens) for tokens in results[0]}) > 5
