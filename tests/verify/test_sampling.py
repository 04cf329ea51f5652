"""Tests of the target distribution against the logits processors of transformers, and along the paths of a tree."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as reference

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, Request, SequenceState
from outrider.verify.sampling import SamplingTensors, apply_sampling, has_finite_max

VOCAB = 12
CPU = torch.device("cpu")
PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)
PROMPT, OUTPUT = (1, 2, 2, 5), (3, 2, 7, 3)

temperatures = st.floats(0.1, 3.0)
top_ks = st.integers(1, VOCAB + 3)
top_ps = st.floats(0.01, 1.0)
min_ps = st.floats(0.0, 1.0)
repetitions = st.floats(0.5, 2.0)
penalties = st.floats(-2.0, 2.0)
biases = st.dictionaries(st.integers(0, VOCAB - 1), st.one_of(st.floats(-100, 100), st.just(-math.inf)), max_size=4)
seeds = st.integers(0, 2**31)
every_param = st.fixed_dictionaries(
    {},
    optional={
        "temperature": temperatures,
        "top_k": top_ks,
        "top_p": top_ps,
        "min_p": min_ps,
        "repetition_penalty": repetitions,
        "presence_penalty": penalties,
        "frequency_penalty": penalties,
        "logit_bias": biases,
        "min_tokens": st.integers(0, 8),
    },
)


def make_seq(*, prompt=PROMPT, output=OUTPUT, end_ids=(0, 9), **params):
    request = Request(
        id=0,
        prompt_token_ids=prompt,
        params=SamplingParams(**{"temperature": 1.0, **params}),
        seed=0,
        end_ids=frozenset(end_ids),
        max_tokens=100,
    )
    return SequenceState(request=request, slot=0, token_ids=[*prompt, *output])


def random_logits(seed, *shape):
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def probs_of(seqs, logits, draft=None, **options):
    draft = tree.empty(len(seqs), CPU) if draft is None else draft
    return apply_sampling(logits, SamplingTensors.of(seqs, VOCAB, CPU), draft, **options)


def processors(params, prompt):
    """Yield the logits processors of transformers in the documented order, with own ones for missing penalties."""
    if params.logit_bias:
        yield reference.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in params.logit_bias.items()})
    yield reference.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    yield lambda tokens, logits: penalize(tokens[0, len(prompt) :], logits, params)
    yield reference.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [0, 9])
    yield reference.TemperatureLogitsWarper(params.temperature)
    if params.top_k:
        yield reference.TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield reference.TopPLogitsWarper(params.top_p)
    yield reference.MinPLogitsWarper(params.min_p)


def penalize(output, logits, params):
    """Apply presence and frequency penalty."""
    logits = logits.clone()
    for token in set(output.tolist()):
        count = output.tolist().count(token)
        logits[0, token] -= params.presence_penalty + params.frequency_penalty * count
    return logits


def expected_probs(seq, logits):
    """Return the distribution [V] of a sequence with logits [V], by the processors of transformers."""
    tokens = torch.tensor([seq.token_ids])
    logits = logits[None]
    for process in processors(seq.request.params, seq.request.prompt_token_ids):
        logits = process(tokens, logits)
    return logits.softmax(-1)[0]


def assert_equals_transformers(seq, seed):
    logits = random_logits(seed, 1, 1)
    probs = probs_of([seq], logits)[0, 0]
    expected = expected_probs(seq, logits[0, 0])
    assert torch.allclose(probs, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(probs > 0, expected > 0)


@PROPERTY
@given(temperatures, seeds)
def test_temperature(value, seed):
    assert_equals_transformers(make_seq(temperature=value), seed)


@PROPERTY
@given(top_ks, seeds)
def test_top_k(value, seed):
    assert_equals_transformers(make_seq(top_k=value), seed)


@PROPERTY
@given(top_ps, seeds)
def test_top_p(value, seed):
    assert_equals_transformers(make_seq(top_p=value), seed)


@PROPERTY
@given(min_ps, seeds)
def test_min_p(value, seed):
    assert_equals_transformers(make_seq(min_p=value), seed)


@PROPERTY
@given(repetitions, seeds)
def test_repetition_penalty(value, seed):
    assert_equals_transformers(make_seq(repetition_penalty=value), seed)


@PROPERTY
@given(penalties, penalties, seeds)
def test_presence_and_frequency_penalty(presence, frequency, seed):
    assert_equals_transformers(make_seq(presence_penalty=presence, frequency_penalty=frequency), seed)


@PROPERTY
@given(biases, seeds)
def test_logit_bias(value, seed):
    assert_equals_transformers(make_seq(logit_bias=value), seed)


@pytest.mark.parametrize("count", range(7))
def test_min_tokens(count):
    assert_equals_transformers(make_seq(min_tokens=count), 0)


@settings(PROPERTY, max_examples=150)
@given(every_param, seeds)
def test_all_parameters_in_the_documented_order(params, seed):
    assert_equals_transformers(make_seq(**params), seed)


def test_top_k_keeps_ties():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0] + [-1.0] * 8]])
    probs = probs_of([make_seq(top_k=2)], logits)[0, 0]
    assert (probs > 0).tolist() == [True, True, True] + [False] * 9


def test_top_p_stops_when_the_mass_is_reached_exactly():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * 8).log()[None, None]
    for top_p, count in ((0.5, 1), (0.51, 2), (0.75, 2), (1e-9, 1)):
        assert int((probs_of([make_seq(top_p=top_p)], logits) > 0).sum()) == count


# Greedy decoding.


@PROPERTY
@given(every_param, seeds)
def test_greedy_is_one_hot_at_the_likeliest_token(params, seed):
    greedy = make_seq(**{**params, "temperature": 0.0})
    sampled = make_seq(**{**params, "temperature": 1.0})
    logits = random_logits(seed, 1, 1)
    probs = probs_of([greedy], logits)[0, 0]
    expected = expected_probs(sampled, logits[0, 0])
    assert sorted(probs.tolist()) == [0.0] * (VOCAB - 1) + [1.0]
    assert expected[probs.argmax()] == expected.max()


# Paths of draft tokens.


def draft_of(parent, tokens):
    size = len(tokens)
    draft_tokens = torch.tensor([tokens])
    return Draft(
        tokens=draft_tokens,
        parent=torch.tensor([parent]),
        count=torch.tensor([size]),
        kind=torch.zeros_like(draft_tokens),
        q=None,
        width=(size,),
        depth=(size,),
        chain=parent == list(range(-1, size - 1)),
    )


def tokens_to(parent, tokens, node):
    """Return the tokens on the path to a node."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parent[node]
    return tuple(reversed(path))


SHAPES = [[-1, 0, 1, 2], [-1, -1, 0, 1, 1, 2], [-1, 0, -1, 2, 0]]


@pytest.mark.parametrize("parent", SHAPES, ids=str)
@PROPERTY
@given(every_param, seeds, st.lists(st.integers(0, VOCAB - 1), min_size=6, max_size=6))
def test_path_of_a_node_counts_like_committed_tokens(parent, params, seed, tokens):
    tokens = tokens[: len(parent)]
    logits = random_logits(seed, 1, 1 + len(parent))
    probs = probs_of([make_seq(**params)], logits, draft_of(parent, tokens))
    for node in range(-1, len(parent)):
        committed = make_seq(**params, output=OUTPUT + tokens_to(parent, tokens, node))
        assert torch.equal(probs[0, node + 1], probs_of([committed], logits[:, [node + 1]])[0, 0])


@pytest.mark.parametrize("parent", [*SHAPES, []], ids=str)
@PROPERTY
@given(every_param, seeds)
def test_option_last_returns_the_last_node(parent, params, seed):
    draft = draft_of(parent, [3, 0, 9, 2, 3, 5][: len(parent)]) if parent else tree.empty(1, CPU)
    logits = random_logits(seed, 1, 1 + len(parent))
    probs = probs_of([make_seq(**params)], logits, draft)
    assert torch.equal(probs_of([make_seq(**params)], logits[:, -1:], draft, last=True), probs[:, -1:])


def test_min_tokens_counts_the_ancestors_of_a_node():
    seq = make_seq(min_tokens=6)  # with the 4 tokens of OUTPUT
    probs = probs_of([seq], random_logits(0, 1, 4), draft_of([-1, 0, 1], [4, 4, 4]))
    assert (probs[0, :, [0, 9]] > 0).tolist() == [[False, False], [False, False], [True, True], [True, True]]


# Batches.


@PROPERTY
@given(st.lists(every_param, min_size=2, max_size=4), seeds, st.booleans())
def test_probabilities_of_a_sequence_are_equal_in_every_batch(batch_params, seed, greedy):
    seqs = [make_seq(**params, output=OUTPUT[:b]) for b, params in enumerate(batch_params)]
    if greedy:
        seqs[0] = make_seq(temperature=0.0)
    parents = torch.tensor([[-1, -1, 1], [-1, 0, 1]])[torch.arange(len(seqs)) % 2]
    tokens = torch.tensor([[1, 2, 3]]).expand(len(seqs), -1)
    draft = replace(draft_of([-1, -1, 1], [1, 2, 3]), parent=parents, tokens=tokens)
    draft = replace(draft, count=torch.full((len(seqs),), 3))
    logits = random_logits(seed, len(seqs), 4)
    probs = probs_of(seqs, logits, draft)
    assert torch.allclose(probs.sum(-1), torch.ones(()))
    for b, seq in enumerate(seqs):
        alone = draft_of(parents[b].tolist(), [1, 2, 3])
        assert torch.equal(probs_of([seq], logits[b : b + 1], alone)[0], probs[b])


@pytest.mark.parametrize("repetition", [1e-6, 1e4])
@pytest.mark.parametrize("temperature", [1e-6, 1e4])
def test_extreme_parameters_give_normalized_probabilities(temperature, repetition):
    others = {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: 100, 1: -100}}
    seq = make_seq(temperature=temperature, repetition_penalty=repetition, **others)
    probs = probs_of([seq], torch.linspace(-1e4, 1e4, VOCAB).view(1, 1, VOCAB))
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 1))


def test_apply_sampling_does_not_modify_logits():
    logits = random_logits(0, 1, 1)
    before = logits.clone()
    probs_of(
        [make_seq(top_k=3, min_tokens=9, repetition_penalty=1.5, logit_bias={1: 2.0}, presence_penalty=1.0)], logits
    )
    assert torch.equal(logits, before)


def test_has_finite_max_detects_invalid_logits():
    logits = random_logits(0, 6, 3)
    logits[1, 2, 4] = math.nan
    logits[2, 0, 0] = math.inf
    logits[3, 1] = -math.inf
    logits[4, :, 1:] = -math.inf
    logits[5, 0, 3] = math.nan
    logits[5, 0, 2] = -math.inf
    assert has_finite_max(logits).all(-1).tolist() == [True, False, False, False, True, False]
    assert has_finite_max(logits)[1].tolist() == [True, True, False]
