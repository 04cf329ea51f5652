"""The law p against the logits processors of transformers, and along the paths of a tree."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from transformers.generation import logits_process as reference

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, Request, SequenceState
from outrider.verify.sampling import SamplingTensors, apply_sampling, has_finite_max

VOCAB = 12
CPU = torch.device("cpu")
FEW = settings(deadline=None, derandomize=True, max_examples=40)
PROMPT, OUTPUT = (1, 2, 2, 5), (3, 2, 7, 3)

temperatures = some.floats(0.1, 3.0)
top_ks = some.integers(1, VOCAB + 3)
top_ps = some.floats(0.01, 1.0)
min_ps = some.floats(0.0, 1.0)
repetitions = some.floats(0.5, 2.0)
penalties = some.floats(-2.0, 2.0)
biases = some.dictionaries(
    some.integers(0, VOCAB - 1), some.one_of(some.floats(-100, 100), some.just(-math.inf)), max_size=4
)
seeds = some.integers(0, 2**31)
every_param = some.fixed_dictionaries(
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
        "min_tokens": some.integers(0, 8),
    },
)


def row(*, prompt=PROMPT, output=OUTPUT, end_ids=(0, 9), **params):
    wants = SamplingParams(**{"temperature": 1.0, **params})
    request = Request(id=0, prompt_token_ids=prompt, params=wants, seed=0, end_ids=frozenset(end_ids), max_tokens=100)
    return SequenceState(request=request, slot=0, token_ids=[*prompt, *output])


def random_logits(seed, *shape):
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def law_of(rows, logits, draft=None, **options):
    return apply_sampling(
        logits, SamplingTensors.of(rows, VOCAB, CPU), tree.empty(len(rows), CPU) if draft is None else draft, **options
    )


def processors(params, prompt):
    """Those of transformers, in the documented order; penalties that it lacks stand in their place."""
    if params.logit_bias:
        yield reference.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in params.logit_bias.items()})
    yield reference.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    yield lambda text, logits: penalised(text[0, len(prompt) :], logits, params)
    yield reference.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, [0, 9])
    yield reference.TemperatureLogitsWarper(params.temperature)
    if params.top_k:
        yield reference.TopKLogitsWarper(params.top_k)
    if params.top_p < 1:
        yield reference.TopPLogitsWarper(params.top_p)
    yield reference.MinPLogitsWarper(params.min_p)


def penalised(output, logits, params):
    logits = logits.clone()
    for token in set(output.tolist()):
        times = output.tolist().count(token)
        logits[0, token] -= params.presence_penalty + params.frequency_penalty * times
    return logits


def expected_law(one, logits):
    """[V] for one row and logits [V], by the processors of transformers."""
    text, logits = torch.tensor([one.token_ids]), logits[None]
    for process in processors(one.request.params, one.request.prompt_token_ids):
        logits = process(text, logits)
    return logits.softmax(-1)[0]


def assert_as_transformers(one, seed):
    logits = random_logits(seed, 1, 1)
    law = law_of([one], logits)[0, 0]
    expected = expected_law(one, logits[0, 0])
    assert torch.allclose(law, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(law > 0, expected > 0)


@FEW
@given(temperatures, seeds)
def test_temperature(value, seed):
    assert_as_transformers(row(temperature=value), seed)


@FEW
@given(top_ks, seeds)
def test_top_k(value, seed):
    assert_as_transformers(row(top_k=value), seed)


@FEW
@given(top_ps, seeds)
def test_top_p(value, seed):
    assert_as_transformers(row(top_p=value), seed)


@FEW
@given(min_ps, seeds)
def test_min_p(value, seed):
    assert_as_transformers(row(min_p=value), seed)


@FEW
@given(repetitions, seeds)
def test_repetition_penalty(value, seed):
    assert_as_transformers(row(repetition_penalty=value), seed)


@FEW
@given(penalties, penalties, seeds)
def test_presence_and_frequency_penalty(presence, frequency, seed):
    assert_as_transformers(row(presence_penalty=presence, frequency_penalty=frequency), seed)


@FEW
@given(biases, seeds)
def test_logit_bias(value, seed):
    assert_as_transformers(row(logit_bias=value), seed)


@pytest.mark.parametrize("least", range(7))
def test_min_tokens(least):
    assert_as_transformers(row(min_tokens=least), 0)


@settings(FEW, max_examples=150)
@given(every_param, seeds)
def test_all_together_in_the_documented_order(params, seed):
    assert_as_transformers(row(**params), seed)


def test_equal_logits_survive_top_k_together():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0] + [-1.0] * 8]])
    law = law_of([row(top_k=2)], logits)[0, 0]
    assert (law > 0).tolist() == [True, True, True] + [False] * 9


def test_top_p_reached_exactly_is_enough():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * 8).log()[None, None]
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.75, 2), (1e-9, 1)):
        assert int((law_of([row(top_p=top_p)], logits) > 0).sum()) == kept


# Greedy.


@FEW
@given(every_param, seeds)
def test_greedy_is_one_hot_at_the_likeliest_token(params, seed):
    one = row(**{**params, "temperature": 0.0})
    warm = replace(one, request=replace(one.request, params=replace(one.request.params, temperature=1.0)))
    logits = random_logits(seed, 1, 1)
    law, expected = law_of([one], logits)[0, 0], expected_law(warm, logits[0, 0])
    assert sorted(law.tolist()) == [0.0] * (VOCAB - 1) + [1.0]
    assert expected[law.argmax()] == expected.max()


# Paths.


def draft_of(parent, tokens):
    parents, guesses = torch.tensor([parent]), torch.tensor([tokens])
    size = len(tokens)
    return Draft(
        tokens=guesses,
        parent=parents,
        count=torch.tensor([size]),
        kind=torch.zeros_like(guesses),
        q=None,
        width=(size,),
        depth=(size,),
        chain=parent == list(range(-1, size - 1)),
    )


def along(parent, tokens, node):
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parent[node]
    return tuple(reversed(path))


SHAPES = [[-1, 0, 1, 2], [-1, -1, 0, 1, 1, 2], [-1, 0, -1, 2, 0]]


@pytest.mark.parametrize("parent", SHAPES, ids=str)
@FEW
@given(every_param, seeds, some.lists(some.integers(0, VOCAB - 1), min_size=6, max_size=6))
def test_a_guess_sees_its_own_path_as_if_it_were_committed(parent, params, seed, tokens):
    tokens = tokens[: len(parent)]
    logits = random_logits(seed, 1, 1 + len(parent))
    law = law_of([row(**params)], logits, draft_of(parent, tokens))
    for node in range(-1, len(parent)):
        committed = row(**params, output=OUTPUT + along(parent, tokens, node))
        assert torch.equal(law[0, node + 1], law_of([committed], logits[:, [node + 1]])[0, 0])


@pytest.mark.parametrize("parent", [*SHAPES, []], ids=str)
@FEW
@given(every_param, seeds)
def test_the_last_guess_alone(parent, params, seed):
    draft = draft_of(parent, [3, 0, 9, 2, 3, 5][: len(parent)]) if parent else tree.empty(1, CPU)
    logits = random_logits(seed, 1, 1 + len(parent))
    law = law_of([row(**params)], logits, draft)
    assert torch.equal(law_of([row(**params)], logits[:, -1:], draft, last=True), law[:, -1:])


def test_min_tokens_counts_the_guesses_above():
    one, draft = row(min_tokens=6), draft_of([-1, 0, 1], [4, 4, 4])  # after the 4 tokens of OUTPUT
    law = law_of([one], random_logits(0, 1, 4), draft)
    assert (law[0, :, [0, 9]] > 0).tolist() == [[False, False], [False, False], [True, True], [True, True]]


# Batches.


@FEW
@given(some.lists(every_param, min_size=2, max_size=4), seeds, some.booleans())
def test_a_row_has_the_same_law_in_every_batch(wants, seed, greedy):
    rows = [row(**params, output=OUTPUT[:b]) for b, params in enumerate(wants)]
    if greedy:
        rows[0] = row(temperature=0.0)
    parents = torch.tensor([[-1, -1, 1], [-1, 0, 1]])[torch.arange(len(rows)) % 2]
    tokens = torch.tensor([[1, 2, 3]]).expand(len(rows), -1)
    together = replace(draft_of([-1, -1, 1], [1, 2, 3]), parent=parents, tokens=tokens)
    together = replace(together, count=torch.full((len(rows),), 3))
    logits = random_logits(seed, len(rows), 4)
    laws = law_of(rows, logits, together)
    assert torch.allclose(laws.sum(-1), torch.ones(()))
    for b, one in enumerate(rows):
        alone = draft_of(parents[b].tolist(), [1, 2, 3])
        assert torch.equal(law_of([one], logits[b : b + 1], alone)[0], laws[b])


@pytest.mark.parametrize("repetition", [1e-6, 1e4])
@pytest.mark.parametrize("temperature", [1e-6, 1e4])
def test_the_ends_of_what_may_be_asked_for_are_laws(temperature, repetition):
    rest = {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: 100, 1: -100}}
    one = row(temperature=temperature, repetition_penalty=repetition, **rest)
    law = law_of([one], torch.linspace(-1e4, 1e4, VOCAB).view(1, 1, VOCAB))
    torch.testing.assert_close(law.sum(-1), torch.ones(1, 1))


def test_warping_changes_no_logits():
    logits = random_logits(0, 1, 1)
    before = logits.clone()
    law_of([row(top_k=3, min_tokens=9, repetition_penalty=1.5, logit_bias={1: 2.0}, presence_penalty=1.0)], logits)
    assert torch.equal(logits, before)


def test_broken_logits_are_found():
    logits = random_logits(0, 6, 3)
    logits[1, 2, 4] = math.nan
    logits[2, 0, 0] = math.inf
    logits[3, 1] = -math.inf
    logits[4, :, 1:] = -math.inf
    logits[5, 0, 3] = math.nan
    logits[5, 0, 2] = -math.inf
    assert has_finite_max(logits).all(-1).tolist() == [True, False, False, False, True, False]
    assert has_finite_max(logits)[1].tolist() == [True, True, False]
