"""Tests that a seed gives the same output with any proposer, any k, any batch and any prefill chunk."""

import itertools
import random

import pytest

from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import ToyTarget
from outrider.verify.rules import EXACT
from tests.helpers.conformance import EVERY, LEARNING, PROPOSERS
from tests.helpers.engines import make_engine, outputs, run
from tests.helpers.threads import torch_threads

KS = (0, 1, 4, 8)
BATCHES = (1, 3, 16)
CHUNKS = (3, 512)
PROMPTS = {1: 4, 3: 7, 16: 17}  # by batch size; more than fit at once, so that sequences join running ones
SEEDED = ("walk", "coupled")  # the verifiers with which the output depends on the seed only


def toy_prompts(count: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, 6) for _ in range(rng.randint(1, 20))] for _ in range(count)]


def toy_run(name, *, verifier, k, rows, chunk, temperature, count=None):
    engine = make_engine(ToyTarget(spread=3.0), EVERY[name], verifier=verifier, k=k, rows=rows, chunk=chunk)
    params = SamplingParams(temperature=temperature, seed=11)
    return outputs(run(engine, toy_prompts(count or PROMPTS[rows]), params, limit=16, ends=frozenset()))


@pytest.fixture(scope="module")
def toy_plain():
    """The outputs of plain decoding by verifier and temperature. Greedy ones do not depend on the verifier."""
    plain = {}
    for verifier, temperature in (("walk", 0.0), *((seeded, 0.8) for seeded in SEEDED)):
        plain[verifier, temperature] = toy_run(
            "none", verifier=verifier, k=0, rows=1, chunk=512, temperature=temperature, count=17
        )
    return plain | {(verifier, 0.0): plain["walk", 0.0] for verifier in EXACT}


def combinations(name, rows, temperature):
    """Return triples of verifier, k and chunk: a half of the pairs of verifier and k, and a quarter if greedy.

    They are others for each batch size and each proposer. Variants, with a space in their name, have one k only.
    """
    rules = [rule for rule in EXACT if temperature == 0 or rule in SEEDED]
    if name in LEARNING:  # they may draft trees
        rules = [rule for rule in rules if EXACT[rule].trees]
    ks = (4,) if " " in name else KS
    step = 4 if temperature == 0 and len(ks) == 4 else 2
    shift = BATCHES.index(rows) + list(EVERY).index(name)
    return [
        (verifier, k, random.Random(f"{name} {verifier} {k} {rows}").choice(CHUNKS))
        for (i, verifier), (j, k) in itertools.product(enumerate(rules), enumerate(ks))
        if (i + j + shift) % step == 0
    ]


@pytest.mark.fast_cases(
    "none-1-0.0",
    "model-16-0.8",
    "padded model-3-0.8",
    "foreign model-1-0.8",
    "cascade-1-0.0",
    "text draft-16-0.8",
    "short model-3-0.8",
    "ngram-1-0.8",
    "suffix-1-0.0",
    "suffix with history-16-0.8",
    "group-3-0.8",
    "recycle-1-0.8",
    "lookahead-1-0.0",
    "best-16-0.8",
    "best of three-3-0.8",
    "first-1-0.8",
    "switch-1-0.0",
    "retrieval-16-0.8",
    "merge-3-0.8",
    "merge of two that draw-1-0.8",
    "tree-1-0.0",
    "foreign tree-16-0.8",
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", EVERY)
def test_toy_outputs_equal_plain_decoding(name, rows, temperature, toy_plain):
    for verifier, k, chunk in combinations(name, rows, temperature):
        actual = toy_run(name, verifier=verifier, k=k, rows=rows, chunk=chunk, temperature=temperature)
        assert actual == toy_plain[verifier, temperature][: len(actual)], (verifier, k, chunk)


def test_toy_outputs_are_diverse(toy_plain):
    sampled = toy_plain["walk", 0.8]
    assert len({tuple(tokens) for tokens in sampled}) > 12
    assert sum(map(len, sampled)) > 150
    assert toy_plain["walk", 0.8] != toy_plain["walk", 0.0]


@pytest.fixture(scope="module")
def pair():
    """The target and the draft model of the embedded pair. Finished engines leave their slots free for the next one."""
    big = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    small = load_checkpoint(embedded("nano"), dtype="float32", device="cpu")
    return make_target(big, slots=16, context=96), make_target(small, slots=16, context=96), big.tokenizer


def pair_prompts(tokenizer) -> list[list[int]]:
    texts = [
        "<|endoftext|>def add(a, b):\n    return",
        "<|endoftext|><|user|>What is 17 + 25?<|end|><|assistant|>",
        "<|endoftext|>import os\nimport sys\n\n\ndef main():\n    parser = argparse.Argument",
        "<|endoftext|>The",
    ]
    ids = [tokenizer.encode(text) for text in texts]
    return [ids[i % 4][: 3 + i] if i >= 4 else ids[i] for i in range(17)]


MAKERS = {
    "none": lambda _: NoProposer,
    "ngram": lambda _: NgramProposer,
    "model": lambda small: lambda setup: DraftModelProposer(setup, small),
}


def pair_run(pair, name, *, verifier, k, rows, chunk, temperature, prompts=None):
    target, small, tokenizer = pair
    engine = make_engine(target, MAKERS[name](small), verifier=verifier, k=k, rows=rows, chunk=chunk)
    params = SamplingParams(temperature=temperature, seed=3)
    return outputs(run(engine, pair_prompts(tokenizer)[: prompts or PROMPTS[rows]], params, limit=8))


@pytest.fixture(scope="module")
def pair_plain(pair):
    plain = {}
    for verifier, temperature in itertools.product(SEEDED, (0.0, 0.8)):
        plain[verifier, temperature] = pair_run(
            pair, "none", verifier=verifier, k=0, rows=1, chunk=512, temperature=temperature, prompts=17
        )
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", SEEDED)
@pytest.mark.parametrize("name", MAKERS)
def test_pair_outputs_equal_plain_decoding(name, verifier, temperature, pair, pair_plain):
    for rows, k in itertools.product(BATCHES, KS):
        chunk = (9, 512)[(SEEDED.index(verifier) + BATCHES.index(rows) + KS.index(k)) % 2]
        actual = pair_run(pair, name, verifier=verifier, k=k, rows=rows, chunk=chunk, temperature=temperature)
        assert actual == pair_plain[verifier, temperature][: len(actual)], (rows, k, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", sorted(set(EXACT) - set(SEEDED)))
def test_greedy_pair_outputs_with_every_verifier(verifier, pair, pair_plain):
    for rows, k in itertools.product(BATCHES, KS):
        actual = pair_run(pair, "model", verifier=verifier, k=k, rows=rows, chunk=9, temperature=0.0)
        assert actual == pair_plain["walk", 0.0][: len(actual)], (rows, k)


def test_sequences_of_a_batch_with_different_parameters():
    """All sampling parameters differ. The outputs are those of sequences that run alone."""
    rng = random.Random(1)
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 3]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.1]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([{}, {2: -5.0, 4: 1.5}]),
            min_tokens=rng.choice([0, 6]),
            max_tokens=12,
            seed=i,
        )
        for i in range(16)
    ]
    prompts = toy_prompts(16)
    for name in ("ngram", "model"):
        for k, chunk in ((0, 512), (4, 5), (7, 512)):
            target = ToyTarget(spread=2.0)
            batched = make_engine(target, EVERY[name], k=k, rows=16, chunk=chunk)
            single = make_engine(target, PROPOSERS["none"], k=0, rows=1)
            actual = outputs(run(batched, prompts, params, limit=12))
            expected = outputs(run(single, prompts, params, limit=12))
            assert actual == expected, (name, k, chunk)


def test_outputs_do_not_depend_on_the_number_of_threads(pair):
    """Another number of threads splits float32 sums differently."""
    runs = []
    for threads in (1, 2):
        with torch_threads(threads):
            runs.append(pair_run(pair, "model", verifier="walk", k=4, rows=3, chunk=512, temperature=0.8, prompts=6))
    assert runs[0] == runs[1]
