"""Laws that the kernels make of logits: those of the plain way, whatever is asked for."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.native.sampling import fastest_sampling
from outrider.testing.drive import make_row
from outrider.verify.sampling import SamplingTensors, target_probs
from tests.helpers import tiny

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
CPU = torch.device("cpu")
WANTS = (
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


def knobs_of(wants, vocab):
    rows = [make_row([1], slot, SamplingParams(**({"temperature": 1.0} | want))) for slot, want in enumerate(wants)]
    return SamplingTensors.of(rows, vocab, CPU)


@pytest.mark.parametrize("vocab", [5, 16, 333, 12288])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_laws_of_the_plain_way(vocab, spread):
    logits = torch.randn(len(WANTS), 4, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    knobs, before = knobs_of(WANTS, vocab), logits.clone()
    got, wanted = fastest_sampling(CPU)(logits, knobs, slice(None)), target_probs(logits, knobs, slice(None))
    assert torch.equal(logits, before)
    assert torch.equal(got > 0, wanted > 0)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1e-6, 1e4])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.9}, {"min_p": 0.05}])
def test_the_ends_of_what_may_be_asked_for_are_laws(temperature, filters):
    """Of logits far larger than a model's; what lies outside of them is refused at the door."""
    logits = torch.randn(6, 1, 333, generator=torch.Generator().manual_seed(0)) * 1e4 / 3
    logits[0, 0, :2] = torch.tensor([1e4, -1e4])
    knobs = knobs_of([{"temperature": temperature} | filters] * 6, 333)
    got, wanted = fastest_sampling(CPU)(logits, knobs, slice(None)), target_probs(logits, knobs, slice(None))
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(got.sum(-1), torch.ones(6, 1))
    assert torch.equal(got.argmax(-1), logits.argmax(-1))


def test_what_belongs_to_which_row():
    """Nodes that lie packed, in any order."""
    logits, of = torch.randn(9, 1, 50), torch.tensor([2, 0, 5, 5, 1, 9, 10, 8, 3])
    knobs = knobs_of(WANTS, 50)
    torch.testing.assert_close(
        fastest_sampling(CPU)(logits, knobs, of), target_probs(logits, knobs, of), atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("want", WANTS, ids=str)
def test_what_is_forbidden_stays_so(want):
    logits = torch.randn(1, 1, 200)
    logits[..., ::3] = -math.inf
    law = fastest_sampling(CPU)(logits, knobs_of([want], 200), slice(None))
    assert (law[..., ::3] == 0).all()
    torch.testing.assert_close(law, target_probs(logits, knobs_of([want], 200), slice(None)), atol=1e-6, rtol=1e-4)


def test_equals_of_the_last_one_kept_stay():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0, 1.0]]])
    law = fastest_sampling(CPU)(logits, knobs_of([{"top_k": 2}], 5), slice(None))
    assert (law > 0).tolist() == [[[True, True, True, False, True]]]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("want", WANTS, ids=str)
def test_logits_that_are_no_numbers_end_in_some_law(want, odd):
    """The row fails, and is told so; its neighbours must not notice."""
    logits = torch.randn(2, 1, 64)
    logits[0] = odd
    knobs = knobs_of([want, want], 64)
    law = fastest_sampling(CPU)(logits, knobs, slice(None))
    assert law[0].sum() == 1
    torch.testing.assert_close(
        law[1:], target_probs(logits[1:], knobs_of([want], 64), slice(None)), atol=1e-6, rtol=1e-4
    )
