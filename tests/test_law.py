"""Sampled speculation through the whole engine against the target's exact law: a G-test of the first four tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from outrider.lossy import LOSSY
from outrider.params import SamplingParams
from outrider.propose.model import ModelProposer
from outrider.statistics import g_test
from outrider.testing import ToyTarget, joint_law
from outrider.types import Draw
from outrider.verify import EXACT, Verifier, block, rejection
from tests import biased
from tests.houses import make_engine, outputs, run

VOCAB, TOKENS, SAMPLES, ROWS = 4, 4, 12000, 500
PROMPT = [1, 2]
PARAMS = SamplingParams(temperature=0.8, seed=12345)


def p_value(verifier) -> float:
    """Of `SAMPLES` completions drawn by speculation against the product of the target's own laws."""
    target = ToyTarget(vocab=VOCAB, slots=ROWS, context=32)
    draft = ToyTarget(vocab=VOCAB, slots=ROWS, context=32, seed=1)
    engine = make_engine(target, lambda setup: ModelProposer(setup, draft), verifier=verifier, k=3, rows=ROWS)
    rows = run(engine, [PROMPT] * SAMPLES, PARAMS, limit=TOKENS, ends=frozenset())
    counts = Counter(tuple(text) for text in outputs(rows))
    observed = torch.zeros((VOCAB,) * TOKENS)
    for text, count in counts.items():
        observed[text] = count
    law = joint_law(target, PROMPT, PARAMS, TOKENS)
    return g_test(observed.flatten().int().tolist(), law.flatten().tolist()).p_value


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    assert p_value(name) > 1e-3


BIASED = {
    "drops unlikely guesses": biased.drops_unlikely(rejection),
    "budget looks ahead": biased.looks_ahead(block),
    "block with a token's residual": biased.block_with_token_residual,
    "uncapped block": biased.block_uncapped,
    "greedy bonus": biased.greedy_bonus(rejection),
    "typical": LOSSY["typical"].rule,
    "lenient": LOSSY["lenient"].rule,
}


@pytest.mark.parametrize("name", BIASED)
def test_biased_is_noticed(name):
    def guarded(draft, p, noise):  # the variants are written for drafts that have a guess
        return (BIASED[name] if draft.size else rejection)(draft, p, noise)

    rule = Verifier(name=name, rule=guarded, draw=Draw.SAMPLE, trees=False, exact=False)
    assert p_value(rule) < 1e-6
