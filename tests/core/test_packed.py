"""What is packed says what is padded says: laws, verdicts and whole texts, in batches of rows of all widths."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import PositionNoise
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, DraftKind, Packed, Request, Scores, SequenceState
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.native.rules import fastest_verifier
from outrider.propose.combine import First, Merge
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.draft_model.tree import TreeProposer
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing.drive import random_tree
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT
from outrider.verify.sampling import SamplingTensors, apply_sampling, apply_sampling_packed
from tests.helpers import tiny
from tests.helpers.engines import make_engine, outputs, run

CPU = torch.device("cpu")
ROWS, SIZE, VOCAB = 12, 5, 40
RULES = {**EXACT, **LOSSY}


def packed(padded, width, *, skip=-1):
    """[B, M, V] without what stands beyond `width[b]` in row b; `skip` is where padding is said to lie."""
    at, count = torch.full(padded.shape[:2], skip), 0
    for b, nodes in enumerate(width):
        at[b] = count if skip == -2 else skip
        at[b, :nodes] = torch.arange(count, count + nodes)
        count += nodes
    values = torch.cat([row[:nodes] for row, nodes in zip(padded, width, strict=True)])
    return Packed(values=values, at=at)


def packed_scores(padded, width):
    """The same with a root in each row, to which padding points."""
    return packed(padded, [1 + nodes for nodes in width], skip=-2)


def some_row(b, chance):
    """A row with every parameter set somehow."""
    params = SamplingParams(
        temperature=chance.choice([0.0, 0.7, 1.0, 1.3]),
        top_k=chance.choice([0, 3, 9]),
        top_p=chance.choice([1.0, 0.8]),
        min_p=chance.choice([0.0, 0.1]),
        repetition_penalty=chance.choice([1.0, 1.3]),
        presence_penalty=chance.choice([0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, 0.4]),
        logit_bias=chance.choice([{}, {2: -5.0, 4: 1.5}]),
        min_tokens=chance.choice([0, 3, 6]),
        seed=b,
    )
    prompt = tuple(chance.randrange(VOCAB) for _ in range(4))
    request = Request(id=b, prompt_token_ids=prompt, params=params, seed=b, end_ids=frozenset({0, 7}), max_tokens=99)
    return SequenceState(request=request, slot=b, token_ids=[*prompt, *(chance.randrange(VOCAB) for _ in range(b % 4))])


def guesses(seed, *, chain, drawn):
    """Trees or chains of all widths, some guesses drawn from q; and their q, padded."""
    source, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    width = (SIZE, *(chance.choice([0, 0, 1, SIZE - 1, SIZE]) for _ in range(ROWS - 1)))
    parent = torch.arange(-1, SIZE - 1).expand(ROWS, SIZE)
    if not chain:
        parent = random_tree([SIZE] * ROWS, VOCAB, chance).parent
    kinds = [DraftKind.SAMPLED] if chain else [DraftKind.WITHOUT_REPLACEMENT, DraftKind.SAMPLED]
    law = torch.tensor(
        [[chance.choice([*kinds, DraftKind.ONE_HOT] if drawn else [DraftKind.ONE_HOT]) for _ in range(SIZE)]] * ROWS
    )
    q = (torch.randn(ROWS, SIZE, VOCAB, generator=source) * 2).softmax(-1) * (law != DraftKind.ONE_HOT)[..., None]
    tokens = torch.multinomial(q.flatten(0, 1) + 1e-9, 1, generator=source).view(ROWS, SIZE)
    draft = Draft(
        tokens=tokens,
        parent=parent,
        count=torch.tensor(width),
        kind=law,
        q=None,
        width=width,
        depth=width,
        chain=chain,
    )
    return draft, q if drawn else None


def test_what_is_packed_can_be_padded():
    padded = torch.rand(3, 4, 5)
    assert torch.equal(Packed.of(padded).padded(), padded)
    some = packed(padded, (4, 0, 2))
    assert some.values.shape == (6, 5)
    assert torch.equal(some.padded()[0], padded[0])
    assert not some.padded()[1].any()
    assert torch.equal(some.padded()[2, :2], padded[2, :2])
    assert not some.padded()[2, 2:].any()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
def test_laws(chain, seed):
    """Bit by bit, under all parameters at once and under each alone."""
    chance = random.Random(seed)
    rows = [some_row(b, chance) for b in range(ROWS)]
    if seed % 2:
        alone = chance.choice(["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_tokens"])
        for row in rows:
            kept = {"temperature": 1.0, alone: getattr(row.request.params, alone)}
            row.request = replace(row.request, params=SamplingParams(**kept))
    draft, _ = guesses(seed, chain=chain, drawn=False)
    logits = torch.randn(ROWS, 1 + SIZE, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    knobs = SamplingTensors.of(rows, VOCAB, CPU)
    want, got = (
        apply_sampling(logits, knobs, draft),
        apply_sampling_packed(packed_scores(logits, draft.width), knobs, draft),
    )
    assert len(got.values) == ROWS + sum(draft.width)
    for b, nodes in enumerate(draft.width):
        assert torch.equal(got.padded()[b, : 1 + nodes], want[b, : 1 + nodes])


@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
@pytest.mark.parametrize("chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("name", RULES)
def test_verdicts(name, chain, drawn):
    if not (chain or RULES[name].trees):
        return
    for seed in range(20):
        draft, q = guesses(seed, chain=chain, drawn=drawn)
        source = torch.Generator().manual_seed(seed)
        p = (torch.randn(ROWS, 1 + SIZE, VOCAB, generator=source) * 2).softmax(-1)
        if q is not None:  # close enough that some guesses are kept
            p[:, 1:] = p[:, 1:] * 0.5 + q * 0.5
            p = p / p.sum(-1, keepdim=True)
        noise = PositionNoise(torch.arange(ROWS), torch.arange(ROWS) * 3 + seed)
        whole = draft if q is None else replace(draft, q=Packed.of(q))
        spare = draft if q is None else replace(draft, q=packed(q, draft.width))
        want = RULES[name].rule(whole, p, noise)
        for verifier in (RULES[name], fastest_verifier(RULES[name], CPU)):
            got = verifier.verify(spare, packed_scores(p, draft.width), noise)
            assert got.path.tolist() == want.path.tolist()
            assert got.accepted.tolist() == want.accepted.tolist()
            assert got.bonus.tolist() == want.bonus.tolist()
            torch.testing.assert_close(got.logprob, want.logprob)


def test_cutting_leaves_the_laws_of_what_is_left():
    draft, q = guesses(1, chain=True, drawn=True)
    draft = replace(draft, q=packed(q, draft.width))
    less = tree.cut(draft, (2,) * ROWS)
    assert torch.equal(less.q.padded(), draft.q.padded()[:, :2])
    assert less.q.values is draft.q.values


class PlainTarget:
    """A target whose passes leave nothing packed, and which draws no guesses by itself."""

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
    """The first guesses of another proposer: in row b no more than b % 5, and none in every third round."""

    def __init__(self, inner):
        self._inner, self._round = inner, 0
        self.needs, self.admit, self.commit, self.release = inner.needs, inner.admit, inner.commit, inner.release

    def propose(self, batch):
        self._round += 1
        most = [row.request.id % 5 if self._round % 3 else 0 for row in batch.seqs]
        budget = tuple(min(pair) for pair in zip(batch.draft_budget, most, strict=True))
        return self._inner.propose(replace(batch, draft_budget=budget))


PROPOSERS = {
    "chain": lambda small: lambda setup: DraftModelProposer(setup, small),
    "tree": lambda small: lambda setup: TreeProposer(setup, small),
    "first": lambda small: lambda setup: First(setup, (NgramProposer(setup), DraftModelProposer(setup, small))),
    "merge": lambda small: lambda setup: Merge(setup, (NgramProposer(setup), TreeProposer(setup, small))),
}


@pytest.fixture(scope="module")
def pair():
    big, small = (load_checkpoint(embedded(name), dtype="bfloat16", device="cpu") for name in ("mini", "nano"))
    make = [make_target(each, slots=10, context=96, kernels="native") for each in (big, small)]
    return *make, big.tokenizer


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
@pytest.mark.parametrize(
    ("name", "rule", "rich"),
    [
        *(("chain", rule, True) for rule in EXACT if rule != "traversal"),
        *(("chain", rule, False) for rule in ("walk", "rejection", "block")),
        *(("tree", rule, True) for rule in ("walk", "siblings", "traversal")),
        ("first", "block", True),
        ("merge", "traversal", True),
    ],
)
def test_texts(name, rule, rich, pair):
    """With kernels and packed, and with the plain rules over what is padded."""
    target, small, tokenizer = pair
    chance = random.Random(5)
    rows = [some_row(b, chance) for b in range(10)]
    wants = [
        row.request.params if rich and b % 3 else SamplingParams(temperature=(1.0, 0.0, 0.6, 1.0)[b % 4], seed=b)
        for b, row in enumerate(rows)
    ]
    texts = ("<|endoftext|>def add(a, b):\n    return a + b\n\ndef", "<|endoftext|>The old man and")
    prompts = [tokenizer.encode(texts[b % 2])[: 5 + b] for b in range(10)]
    ways = (target, small, fastest_verifier(EXACT[rule], CPU)), (PlainTarget(target), PlainTarget(small), EXACT[rule])
    engines = [
        make_engine(one, lambda setup, two=two: Uneven(PROPOSERS[name](two)(setup)), verifier=verifier, rows=10)
        for one, two, verifier in ways
    ]
    ours, plain = (outputs(run(engine, prompts, wants, limit=12)) for engine in engines)
    assert ours == plain
    assert len({tuple(text) for text in ours}) > 5
