"""The same seed gives the same text: with any proposer, any k, in any batch, however the prompt is fed."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.loader.make import make_target
from outrider.propose.base import NoProposer
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.propose.lookup.ngram import NgramProposer
from outrider.testing import ToyTarget
from outrider.verify.rules import EXACT
from tests.helpers.conformance import EVERY, LEARNING, PROPOSERS
from tests.helpers.engines import make_engine, outputs, run

KS = (0, 1, 4, 8)
BATCHES = (1, 3, 16)
CHUNKS = (3, 512)  # of which every other combination of all else takes one
PROMPTS = {1: 4, 3: 7, 16: 17}  # by batch size: more than fit at once, so that rows join while others run
SEEDED = ("walk", "coupled")  # the verifiers under which the seed alone decides the text


def toy_prompts(count: int) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(1, 6) for _ in range(chance.randint(1, 20))] for _ in range(count)]


def toy_run(name, *, verifier, k, rows, chunk, temperature, count=None):
    engine = make_engine(ToyTarget(spread=3.0), EVERY[name], verifier=verifier, k=k, rows=rows, chunk=chunk)
    params = SamplingParams(temperature=temperature, seed=11)
    return outputs(run(engine, toy_prompts(count or PROMPTS[rows]), params, limit=16, ends=frozenset()))


@pytest.fixture(scope="module")
def toy_plain():
    plain = {}
    for verifier, temperature in itertools.product(EXACT, (0.0, 0.8)):
        plain[verifier, temperature] = toy_run(
            "none", verifier=verifier, k=0, rows=1, chunk=512, temperature=temperature, count=17
        )
    return plain


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", EVERY)
def test_toy(name, rows, temperature, toy_plain):
    # Variants of the draft model differ in what they propose only, so one k serves.
    rules = [rule for rule in EXACT if name not in LEARNING or EXACT[rule].trees]  # they may make trees
    for verifier, k in itertools.product(rules, (4,) if " " in name else KS):
        if temperature == 0 or verifier in SEEDED:
            chunk = CHUNKS[(rules.index(verifier) + KS.index(k) + BATCHES.index(rows)) % 2]
            got = toy_run(name, verifier=verifier, k=k, rows=rows, chunk=chunk, temperature=temperature)
            assert got == toy_plain[verifier, temperature][: len(got)], (verifier, k, chunk)


def test_toy_texts_are_worth_comparing(toy_plain):
    texts = toy_plain["walk", 0.8]
    assert len({tuple(text) for text in texts}) > 12
    assert sum(map(len, texts)) > 150
    assert toy_plain["walk", 0.8] != toy_plain["walk", 0.0]


@pytest.fixture(scope="module")
def pair():
    """Target and draft of the embedded pair, loaded once: an engine that has ended leaves its slots free."""
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
    return {
        (verifier, temperature): pair_run(
            pair, "none", verifier=verifier, k=0, rows=1, chunk=512, temperature=temperature, prompts=17
        )
        for verifier, temperature in itertools.product(SEEDED, (0.0, 0.8))
    }


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("verifier", SEEDED)
@pytest.mark.parametrize("name", MAKERS)
def test_pair(name, verifier, temperature, pair, pair_plain):
    for rows, k in itertools.product(BATCHES, KS):
        chunk = (9, 512)[(SEEDED.index(verifier) + BATCHES.index(rows) + KS.index(k)) % 2]
        got = pair_run(pair, name, verifier=verifier, k=k, rows=rows, chunk=chunk, temperature=temperature)
        assert got == pair_plain[verifier, temperature][: len(got)], (rows, k, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", sorted(set(EXACT) - set(SEEDED)))
def test_pair_greedy_under_every_verifier(verifier, pair, pair_plain):
    for rows, k in itertools.product(BATCHES, KS):
        got = pair_run(pair, "model", verifier=verifier, k=k, rows=rows, chunk=9, temperature=0.0)
        assert got == pair_plain["walk", 0.0][: len(got)], (rows, k)


def test_rows_keep_their_own_parameters():
    """Rows with every parameter set differently, together and alone."""
    chance = random.Random(1)
    wants = [
        SamplingParams(
            temperature=chance.choice([0.0, 0.7, 1.3]),
            top_k=chance.choice([0, 3]),
            top_p=chance.choice([1.0, 0.8]),
            min_p=chance.choice([0.0, 0.1]),
            repetition_penalty=chance.choice([1.0, 1.3]),
            presence_penalty=chance.choice([0.0, 0.5]),
            frequency_penalty=chance.choice([0.0, 0.4]),
            logit_bias=chance.choice([{}, {2: -5.0, 4: 1.5}]),
            min_tokens=chance.choice([0, 6]),
            max_tokens=12,
            seed=i,
        )
        for i in range(16)
    ]
    prompts = toy_prompts(16)
    for name in ("ngram", "model"):
        for k, chunk in ((0, 512), (4, 5), (7, 512)):
            target = ToyTarget(spread=2.0)
            together = make_engine(target, EVERY[name], k=k, rows=16, chunk=chunk)
            got = outputs(run(together, prompts, wants, limit=12))
            plain = outputs(run(make_engine(target, PROPOSERS["none"], k=0, rows=1), prompts, wants, limit=12))
            assert got == plain, (name, k, chunk)


def test_noise_does_not_depend_on_the_thread_count(pair):
    """Float32 sums may be split otherwise by another number of threads; the text must not follow."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = pair_run(pair, "model", verifier="walk", k=4, rows=3, chunk=512, temperature=0.8, prompts=6)
        torch.set_num_threads(2)
        two = pair_run(pair, "model", verifier="walk", k=4, rows=3, chunk=512, temperature=0.8, prompts=6)
    finally:
        torch.set_num_threads(before)
    assert one == two
