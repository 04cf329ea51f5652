"""Target distributions of the Triton kernel equal those of torch, whose filters sort the vocabulary."""

import math

import numpy as np
import pytest
import torch

from outrider.core.noise import inverse_cdf
from outrider.verify.sampling import target_probs
from tests.helpers import triton as helper
from tests.models.native.test_native_sampling import PARAMS, sampling_tensors

from outrider.models.triton import barrier, noise, residuals, sampling  # isort: skip  # after the check for Triton


@pytest.fixture
def interpreted():
    with helper.interpreted(sampling, barrier, noise, residuals), np.errstate(all="ignore"):  # as on a GPU
        yield


def assert_equals_torch(logits, params, of=slice(None)):
    tensors = sampling_tensors(params, logits.shape[-1])
    probs = sampling.target_probs(logits, tensors, of)
    expected = target_probs(logits, tensors, of)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-4)
    return probs


@pytest.mark.fast_cases("333-512-0.3", "5-8-3.0")
@pytest.mark.parametrize(("vocab", "block", "spread"), [(5, 8, 3.0), (333, 512, 0.3), (100, 32, 3.0)])
def test_probs_equal_torch(vocab, block, spread, interpreted, monkeypatch):
    monkeypatch.setattr(sampling, "IDS_AT_ONCE", block)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(PARAMS), 1, vocab, generator=generator) * spread
    logits_before = logits.clone()
    assert_equals_torch(logits, PARAMS)
    assert torch.equal(logits, logits_before)


def test_ties(interpreted, monkeypatch):
    """Top-k keeps all ties of the last kept token. Top-p keeps as many as it needs, the first ids."""
    monkeypatch.setattr(sampling, "IDS_AT_ONCE", 2)  # the ties are in all blocks
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0, 1.0]]])
    assert (assert_equals_torch(logits, [{"top_k": 2}]) > 0).tolist() == [[[True, True, True, False, True]]]
    for top_p, kept in ((1e-9, 1), (0.5, 2), (0.7, 3), (0.9, 4), (0.99, 5)):
        assert int((assert_equals_torch(logits, [{"top_p": top_p}]) > 0).sum()) == kept
    assert int((assert_equals_torch(torch.zeros(1, 1, 7), [{"top_p": 0.5}]) > 0).sum()) == 4


def test_top_p_stops_when_the_mass_is_reached_exactly(interpreted):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * 8).log()[None, None]
    for top_p, kept in ((0.5, 1), (0.51, 2), (0.75, 2)):
        assert (
            int((sampling.target_probs(logits, sampling_tensors([{"top_p": top_p}], 12), slice(None)) > 0).sum())
            == kept
        )


def test_masked_logits_extreme_temperatures_and_packed_rows(interpreted):
    logits = torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0)) * 3e3
    logits[..., ::3] = -math.inf
    for filters in ({"top_k": 7}, {"top_k": 39, "top_p": 0.9}, {"min_p": 0.05}):
        params = [{"temperature": 1e-6} | filters, {"temperature": 1e4} | filters]
        assert_equals_torch(logits, params, torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_logits_affect_only_their_sequence(value, interpreted):
    logits = torch.randn(2, 1, 64)
    logits[0] = value
    for params in ({"top_k": 9}, {"top_p": 0.9}, {"temperature": 0.0}):
        probs = sampling.target_probs(logits, sampling_tensors([params, params], 64), slice(None))
        expected = target_probs(logits[1:], sampling_tensors([params], 64), slice(None))
        torch.testing.assert_close(probs[1:], expected, atol=1e-6, rtol=1e-4)


def test_inverse_cdf_equals_torch(interpreted, monkeypatch):
    monkeypatch.setattr(sampling, "IDS_AT_ONCE", 16)
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(6, 40, generator=generator) * (torch.rand(6, 40, generator=generator) < 0.3)
    mass[0, :30] = 0.0
    uniform = torch.tensor([0.0, 0.5, 1 - 2**-48, 0.25, 0.75, 0.9], dtype=torch.float64)
    tokens = sampling.inverse_cdf(mass, uniform)
    assert tokens.tolist() == inverse_cdf(mass, uniform).tolist()


@pytest.mark.fast_cases("80-1")
@pytest.mark.parametrize(("capability", "split"), [(80, 1), (90, 8), (100, 8)])
def test_kernel_builds_without_spills(capability, split, tmp_path):
    types = {"logits": "*fp32", "settings": "*fp32", "probs": "*fp32", "scratch": "*fp64", "arrived": "*i32"}
    types |= {"vocab": "i32", "nodes": "i32"}
    constants = {"BLOCK": 8192, "BLOCKS": 16, "STEPS": 16 // split, "SPLIT": split}
    built = helper.build(sampling.filter_rows, types, constants, capability=capability, cache=tmp_path, num_warps=16)
    assert built.stack == 0
    assert built.registers <= 128
    assert built.shared <= 4096
