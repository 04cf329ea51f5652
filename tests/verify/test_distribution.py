"""Tests of sampled outputs of the whole engine: a G-test of the first four tokens against the exact distribution."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.noise import PositionNoise, inverse_cdf
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer, ProposerSetup
from outrider.core.types import Batch, Draft, DraftBudget, DraftKind, Draw, Packed, Request, SequenceState
from outrider.drafting.propose.combine import Merge
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.lab.audit.statistics import g_test
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing import ToyTarget, joint_distribution, toy_setup
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT, Verifier, block, rejection
from outrider.verify.sampling import SamplingTensors, apply_sampling
from tests.helpers import biased_verifiers
from tests.helpers.conformance import LEARNING
from tests.helpers.engines import make_engine, outputs, run

# There are 256 outcomes. With this number of samples, a test at p = 0.001 detects a bias with a power of 90% if
# chi-square grows by 1 for every 26 samples. For the mildest of the biased rules below, it grows by 1 for every 20, and
# p is below 1e-8. `check_verifier` tests a rule alone, by enumeration to 1e-12. This file tests the engine around it.
VOCAB, TOKENS, SAMPLES, NUM_SEQS = 4, 4, 3000, 500
PROMPT = [1, 2]
PARAMS = SamplingParams(temperature=0.8, seed=12345)


def p_value(verifier, make=None, samples=SAMPLES) -> float:
    """Return the p-value of sampled speculative outputs against the joint distribution of the target."""
    target = ToyTarget(vocab=VOCAB, slots=NUM_SEQS, context=32)
    draft = ToyTarget(vocab=VOCAB, slots=NUM_SEQS, context=32, seed=1)
    make = make or (lambda setup: DraftModelProposer(setup, draft))
    engine = make_engine(target, make, verifier=verifier, k=3, rows=NUM_SEQS)
    seqs = run(engine, [PROMPT] * samples, PARAMS, limit=TOKENS, ends=frozenset())
    counts = Counter(tuple(tokens) for tokens in outputs(seqs))
    observed = torch.zeros((VOCAB,) * TOKENS)
    for tokens, count in counts.items():
        observed[tokens] = count
    expected = joint_distribution(target, PROMPT, PARAMS, TOKENS)
    return g_test(observed.flatten().int().tolist(), expected.flatten().tolist()).p_value


@pytest.mark.fast_cases("walk-3000", "rejection-3000", "siblings-3000")
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(20 * SAMPLES, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", EXACT)
def test_exact_verifier(name, samples):
    assert p_value(name, samples=samples) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["siblings", "traversal"])  # `walk` has stricter replay tests
@pytest.mark.parametrize("name", LEARNING)
def test_exact_with_proposers_that_learn(name, verifier):
    assert p_value(verifier, LEARNING[name], samples=3000) > 1e-3  # the mildest bias gives p below 1e-11


class TwoSiblings(NoProposer):
    """Drafts two tokens after the last committed token, sampled without replacement."""

    def __init__(self, setup: ProposerSetup, probs: list[float]) -> None:
        super().__init__(setup)
        self.probs = torch.tensor(probs, dtype=torch.float64)

    def propose(self, batch: Batch) -> Draft:
        seeds = torch.tensor([seq.request.seed for seq in batch.seqs])
        uniform = PositionNoise(seeds, torch.zeros_like(seeds)).uniforms(2, batch.noise_stream)
        probs = self.probs.expand(len(seeds), -1)
        first = inverse_cdf(probs, uniform[:, 0])
        second = inverse_cdf(probs.scatter(1, first[:, None], 0.0), uniform[:, 1])
        tokens = torch.stack([first, second], 1)
        return Draft(
            tokens=tokens,
            parent=torch.full_like(tokens, -1),
            count=torch.full_like(seeds, 2),
            kind=torch.full_like(tokens, DraftKind.WITHOUT_REPLACEMENT),
            q=Packed(values=self.probs[None], at=torch.zeros_like(tokens)),
            width=(2,) * len(seeds),
            depth=(1,) * len(seeds),
            chain=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["siblings", "traversal"])
def test_exact_if_several_proposers_sample_without_replacement(verifier):
    """A rejected token of one proposer does not restrict the tokens of another."""
    p = [0.02, 0.2, 0.2, 0.2, 0.2, 0.18]
    count = 20000
    setup = toy_setup(ToyTarget(vocab=6))
    proposers = (
        TwoSiblings(setup, [0.5, 0.3, 0.1, 0.05, 0.03, 0.02]),
        TwoSiblings(setup, [0.4, 0.1, 0.1, 0.1, 0.15, 0.15]),
    )
    request = Request(
        id=0, prompt_token_ids=(0,), params=SamplingParams(temperature=1.0), seed=0, end_ids=frozenset(), max_tokens=9
    )
    seqs = tuple(SequenceState(request=replace(request, seed=seed), slot=seed, token_ids=[0]) for seed in range(count))
    batch = Batch(seqs=seqs, start=(0,) * count, feed=((0,),) * count, budget=DraftBudget((4,) * count))
    draft = Merge(setup, proposers).propose(batch)
    noise = PositionNoise(torch.arange(count), torch.zeros(count, dtype=torch.long))
    target_probs = torch.tensor(p, dtype=torch.float64).expand(count, 5, -1)
    verdict = EXACT[verifier].rule(draft, target_probs, noise)
    first = draft.tokens.gather(1, verdict.path[:, :1].clamp(min=0))[:, 0]
    emitted = torch.where(verdict.accepted > 0, first, verdict.bonus)
    assert g_test(torch.bincount(emitted, minlength=6).tolist(), p).p_value > 1e-3


@pytest.fixture(scope="module")
def pair():
    """The embedded pair in float32, a prompt, and the exact distribution of the tokens after it."""
    big, small = (load_checkpoint(embedded(name), dtype="float32", device="cpu") for name in ("mini", "nano"))
    target, draft = (make_target(checkpoint, slots=64, context=48) for checkpoint in (big, small))
    prompt = big.tokenizer.encode("<|endoftext|>def add(a")
    return target, draft, prompt, filtered_distribution(target, prompt)


FILTERED = SamplingParams(temperature=0.8, top_k=3, seed=99)


def filtered_distribution(target, prompt) -> dict[tuple[int, ...], float]:
    """Return the distribution of the first four tokens under top-k, with a fresh prefill of every prefix."""
    distribution = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for prefix, prob in distribution.items():
            p = next_token_probs(target, [*prompt, *prefix])
            longer |= {(*prefix, token): prob * float(p[token]) for token in p.nonzero()[:, 0].tolist()}
        distribution = longer
    return distribution


def next_token_probs(target, token_ids) -> torch.Tensor:
    """Return the target distribution [V] after tokens, with the parameters `FILTERED`."""
    request = Request(
        id=0, prompt_token_ids=tuple(token_ids), params=FILTERED, seed=0, end_ids=frozenset(), max_tokens=1
    )
    seq = SequenceState(request=request, slot=0, token_ids=token_ids)
    draft = tree.empty(1, target.device)
    target.cache.admit(0, token_ids)
    with torch.inference_mode():
        scores = target.score(Batch(seqs=(seq,), start=(0,), feed=(tuple(token_ids),), budget=DraftBudget((0,))), draft)
        p = apply_sampling(scores.logits, SamplingTensors.of((seq,), target.vocab, target.device), draft)
    target.cache.release(0)
    return p[0, 0].double()


@pytest.mark.slow
@pytest.mark.parametrize(
    "samples", [750, pytest.param(9000, marks=pytest.mark.heavy)]
)  # chi-square grows by 1 for every 10 or 120
@pytest.mark.parametrize("name", ["block", "traversal"])
def test_embedded_pair(name, samples, pair):
    target, draft, prompt, expected = pair
    engine = make_engine(target, lambda setup: DraftModelProposer(setup, draft), verifier=name, k=3, rows=64)
    seqs = run(engine, [prompt] * samples, FILTERED, limit=TOKENS, ends=frozenset())
    counts = Counter(tuple(tokens) for tokens in outputs(seqs))
    assert set(counts) <= set(expected)
    assert len(expected) == 3**TOKENS
    assert engine.stats.tau > 1.2
    assert g_test([counts[tokens] for tokens in expected], list(expected.values())).p_value > 1e-3


BIASED = {
    "drops unlikely draft tokens": biased_verifiers.drops_unlikely(rejection),
    "budget looks ahead": biased_verifiers.looks_ahead(block),
    "block with the residual of a token": biased_verifiers.block_with_token_residual,
    "uncapped block": biased_verifiers.block_uncapped,
    "greedy bonus": biased_verifiers.greedy_bonus(rejection),
    "typical": LOSSY["typical"].rule,
    "lenient": LOSSY["lenient"].rule,
}


@pytest.mark.fast_cases("drops unlikely draft tokens", "block with the residual of a token", "greedy bonus", "lenient")
@pytest.mark.parametrize("name", BIASED)
def test_biased_verifier_is_detected(name):
    def rule(draft, p, noise):  # the biased rules need at least one draft token
        return (BIASED[name] if draft.size else rejection)(draft, p, noise)

    verifier = Verifier(name=name, rule=rule, draw=Draw.SAMPLE, trees=False, exact=False)
    assert p_value(verifier) < 1e-6
