"""Native sampling gives the distributions of the torch implementation, with any sampling parameters."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, Packed
from outrider.models.native.sampling import fastest_sampling
from outrider.testing.drive import make_seq
from outrider.verify.logprobs import logprobs
from outrider.verify.sampling import SamplingTensors, apply_sampling, apply_sampling_packed, target_probs
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
CPU = torch.device("cpu")
PARAMS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.3},
    {"top_p": 0.9},
    {"top_p": 0.0001},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.1, "temperature": 0.8},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
)


def sampling_tensors(params_list, vocab):
    """Return the tensors of one sequence for each set of sampling parameters."""
    seqs = []
    for slot, params in enumerate(params_list):
        seqs.append(make_seq([1], slot, SamplingParams(**({"temperature": 1.0} | params))))
    return SamplingTensors.of(seqs, vocab, CPU)


@pytest.mark.parametrize("vocab", [5, 16, 333, 12288])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_probs_equal_torch(vocab, spread):
    logits = torch.randn(len(PARAMS), 4, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    sampling = sampling_tensors(PARAMS, vocab)
    logits_before = logits.clone()
    probs = fastest_sampling(CPU).probs(logits, sampling, slice(None))
    expected = target_probs(logits, sampling, slice(None))
    assert torch.equal(logits, logits_before)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1e-6, 1e4])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_extreme_temperatures_give_valid_distributions(temperature, filters):
    """The logits are far larger than those of a model. `SamplingParams` rejects temperatures beyond these limits."""
    logits = torch.randn(6, 1, 333, generator=torch.Generator().manual_seed(0)) * 1e4 / 3
    logits[0, 0, :2] = torch.tensor([1e4, -1e4])
    sampling = sampling_tensors([{"temperature": temperature} | filters] * 6, 333)
    probs = fastest_sampling(CPU).probs(logits, sampling, slice(None))
    expected = target_probs(logits, sampling, slice(None))
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(probs.sum(-1), torch.ones(6, 1))
    assert torch.equal(probs.argmax(-1), logits.argmax(-1))


def test_packed_nodes_use_the_parameters_of_their_sequence():
    logits = torch.randn(9, 1, 50)
    of = torch.tensor([2, 0, 5, 5, 1, 9, 10, 8, 3])
    sampling = sampling_tensors(PARAMS, 50)
    probs = fastest_sampling(CPU).probs(logits, sampling, of)
    torch.testing.assert_close(probs, target_probs(logits, sampling, of), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_masked_logits_have_probability_zero(params):
    logits = torch.randn(1, 1, 200)
    logits[..., ::3] = -math.inf
    sampling = sampling_tensors([params], 200)
    probs = fastest_sampling(CPU).probs(logits, sampling, slice(None))
    assert (probs[..., ::3] == 0).all()
    torch.testing.assert_close(probs, target_probs(logits, sampling, slice(None)), atol=1e-6, rtol=1e-4)


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0, 1.0]]])
    probs = fastest_sampling(CPU).probs(logits, sampling_tensors([{"top_k": 2}], 5), slice(None))
    assert (probs > 0).tolist() == [[[True, True, True, False, True]]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_non_finite_logits_affect_only_their_sequence(params, value):
    """The engine reports an error for the sequence. The other sequences must be correct."""
    logits = torch.randn(2, 1, 64)
    logits[0] = value
    probs = fastest_sampling(CPU).probs(logits, sampling_tensors([params, params], 64), slice(None))
    expected = target_probs(logits[1:], sampling_tensors([params], 64), slice(None))
    assert probs[0].sum() == 1
    torch.testing.assert_close(probs[1:], expected, atol=1e-6, rtol=1e-4)


ADJUSTED = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    {"logit_bias": {3: 2.0, 330: -50.0}},
    {"min_tokens": 3},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.2, "logit_bias": {0: 1.0}, "min_tokens": 4, "temperature": 0.0},
    {},
]


def adjusted_sequences(vocab=333):
    seqs = []
    for slot, params in enumerate(ADJUSTED):
        seq = make_seq([1, 5, 5, 9], slot, SamplingParams(**({"temperature": 1.0} | params)))
        request = replace(seq.request, end_ids=frozenset({2, 4, 400}))
        seqs.append(replace(seq, request=request, token_ids=[1, 5, 5, 9, 5, 7, 7]))  # three output tokens
    return SamplingTensors.of(seqs, vocab, CPU)


def random_logits(*shape):
    return torch.randn(*shape, 333, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("last", [False, True])
def test_adjusted_logits_equal_torch_for_chains(last):
    sampling = adjusted_sequences()
    tokens = torch.tensor([[7, 5, 8, 7]] * len(ADJUSTED))
    draft = tree.chain(tokens, (4, 0, 2, 3, 4, 1) if not last else (4,) * 6)
    logits = random_logits(len(ADJUSTED), 1 if last else 5)
    before = logits.clone()
    probs = apply_sampling(logits, sampling, draft, last=last, kernels=fastest_sampling(CPU))
    expected = apply_sampling(logits, sampling, draft, last=last)
    assert torch.equal(logits, before)
    for b, width in enumerate(draft.width):
        nodes = slice(None) if last else slice(1 + width)  # the others are padding
        torch.testing.assert_close(probs[b, nodes], expected[b, nodes], atol=1e-6, rtol=1e-4)


def test_adjusted_logits_equal_torch_for_packed_trees():
    sampling = adjusted_sequences()
    size = len(ADJUSTED)
    draft = Draft(
        tokens=torch.tensor([[7, 5, 5, 8]] * size),
        parent=torch.tensor([[-1, 0, -1, 2]] * size),
        kind=torch.zeros(size, 4, dtype=torch.int64),
        count=torch.tensor([4, 3, 4, 2, 4, 1]),
        q=None,
        width=(4, 3, 4, 2, 4, 1),
        depth=(2, 2, 2, 2, 2, 1),
        chain=False,
    )
    at = torch.zeros(size, 5, dtype=torch.int64)
    rows = 0
    for b, width in enumerate(draft.width):
        at[b, : 1 + width] = torch.arange(rows, rows + 1 + width)
        at[b, 1 + width :] = rows
        rows += 1 + width
    packed = Packed(values=random_logits(rows), at=at)
    probs = apply_sampling_packed(packed, sampling, draft, kernels=fastest_sampling(CPU))
    expected = apply_sampling_packed(packed, sampling, draft)
    torch.testing.assert_close(probs.values, expected.values, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("vocab", [5, 16, 333, 12288])
@pytest.mark.parametrize("top", [0, 1, 7, 400])
def test_logprobs_equal_torch(vocab, top):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(6, vocab, generator=generator) * 3
    logits[2, vocab // 2 :] = -torch.inf
    rows, tokens = [5, 0, 2, 2, 3], [0, vocab - 1, 1, 0, 2]
    values = fastest_sampling(CPU).logprobs(logits, rows, tokens, top)
    expected = logprobs(logits, rows, tokens, top)
    assert values.tokens == pytest.approx(expected.tokens, rel=1e-5, abs=1e-5)
    finite = [sum(value > -math.inf for value in row) for row in expected.top]
    for n, ids, best, expected_ids, expected_best in zip(
        finite, values.top_ids, values.top, expected.top_ids, expected.top, strict=True
    ):
        assert len(ids) == min(top, vocab)
        assert ids[:n] == expected_ids[:n]
        assert best == pytest.approx(expected_best, rel=1e-5, abs=1e-5)


def test_equal_logits_are_reported_in_order_of_their_ids():
    logits = torch.zeros(1, 333)
    logits[0, 100] = 1.0
    assert fastest_sampling(CPU).logprobs(logits, [0], [5], 3).top_ids == [[100, 0, 1]]


def test_log_probability_is_exact_for_a_long_tail():
    """A sum of a million equal terms in float32 would lose digits."""
    logits = torch.zeros(1, 1_000_000)
    assert fastest_sampling(CPU).logprobs(logits, [0], [7], 0).tokens == [pytest.approx(-math.log(1e6), rel=1e-7)]
