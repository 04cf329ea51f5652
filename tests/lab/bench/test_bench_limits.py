"""Tests of the limits of the machine and of the memory use."""

import mmap

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams, Stats
from outrider.drafting.plan.speedup import roof, sequences_instead
from outrider.lab.bench import rates
from outrider.lab.bench.figures import Comparison, Decoding, Spread
from outrider.lab.bench.limits import Limit, Roofline, limits
from outrider.lab.bench.pass_work import cache_bytes_per_token
from outrider.lab.bench.rates import Rates, best_rates, gemm_rate, read_bandwidth
from outrider.lab.common.jobs import Job
from outrider.lab.common.memory import MemoryUse, measure_memory
from tests.helpers.tiny import Shelf

CPU = torch.device("cpu")


def test_roof_is_the_lower_of_bandwidth_and_arithmetic():
    assert roof(bytes_per_pass=10, flops_per_pass=1, bandwidth=1000, gemm=1e6) == 100
    assert roof(bytes_per_pass=10, flops_per_pass=1e5, bandwidth=1000, gemm=1e6) == 10


def test_sequences_in_place_of_a_draft():
    """A draft of 30 bytes with 4 sequences of 5 bytes takes the memory of 25 sequences of 2 bytes."""
    assert sequences_instead(draft_weights=30, draft_cache=4 * 5, row_cache=2) == 25
    assert sequences_instead(draft_weights=0, draft_cache=0, row_cache=2) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: roof(bytes_per_pass=1, flops_per_pass=0, bandwidth=1, gemm=1),
        lambda: roof(bytes_per_pass=1, flops_per_pass=1, bandwidth=1, gemm=0),
        lambda: sequences_instead(draft_weights=1, draft_cache=1, row_cache=0),
        lambda: sequences_instead(draft_weights=-1, draft_cache=1, row_cache=1),
    ],
)
def test_invalid_quantities(call):
    with pytest.raises(OutriderError):
        call()


def test_read_bandwidth_of_both_kinds_of_pages():
    kinds = {"normal_pages", "huge_pages"} if hasattr(mmap, "MADV_HUGEPAGE") else {"normal_pages"}
    rates = read_bandwidth(CPU, size=1 << 22)
    assert set(rates) <= kinds  # a Linux kernel may lack huge pages
    assert rates["normal_pages"] > 0


def test_read_bandwidth_without_madvise(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE", raising=False)
    assert list(read_bandwidth(CPU, size=1 << 20)) == ["normal_pages"]


def test_gemm_rate_is_positive():
    assert gemm_rate(CPU, torch.float32, sizes=(32, 64)) > 0
    assert gemm_rate(CPU, torch.bfloat16, sizes=(32, 64)) > 0


def test_best_rates_are_the_highest():
    measurements = [
        Rates(read={"normal_pages": 3.0, "huge_pages": 5.0}, gemm=7.0),
        Rates(read={"normal_pages": 6.0, "huge_pages": 4.0}, gemm=2.0),
    ]
    assert best_rates(measurements) == (6.0, 7.0)


def decoding(tau, drafted, *, rate=None, experts=0.0):
    """Return the figures of 8 passes."""
    stats = Stats(rounds=8, passes=8, output_tokens=int(8 * tau), draft_tokens=drafted, experts=8 * experts)
    return Decoding(tokens_per_s=Spread.of([rate]), speedup=None, latency_ms=None, stats=stats)


def test_limits_of_plain_and_speculative_decoding():
    """A pass reads 100 bytes of weights and 2 sequences of 10 tokens of 5 bytes. Arithmetic allows 40 tokens/s."""
    roofline = Roofline(
        weight_bytes_per_pass=100,
        cache_bytes_per_token=5.0,
        flops_per_token=3.0,
        read_bytes_per_s=1000.0,
        gemm_flops_per_s=120.0,
    )
    figures = Comparison(plain=decoding(1, 0, rate=5.0), speculative=decoding(3, 32))
    result = limits(roofline, figures, seqs=2, cached=10.0)
    assert (result.bytes_per_pass, result.bytes_per_token) == (200.0, 100.0)
    assert result.plain == Limit(limit_passes_per_s=5.0, limit_tokens_per_s=10.0, share_of_limit=0.5)
    # With 5 tokens per sequence and pass, arithmetic is the limit.
    assert result.speculative == Limit(limit_passes_per_s=4.0, limit_tokens_per_s=24.0, share_of_limit=None)


def test_limits_count_the_experts_of_a_pass():
    """A pass reads 100 bytes and 10 for each distinct expert: 2 in plain decoding, 6 with draft tokens."""
    roofline = Roofline(
        weight_bytes_per_pass=100,
        expert_bytes=10.0,
        cache_bytes_per_token=0.0,
        flops_per_token=1.0,
        read_bytes_per_s=1200.0,
        gemm_flops_per_s=1e9,
    )
    figures = Comparison(plain=decoding(1, 0, experts=2), speculative=decoding(3, 32, experts=6))
    result = limits(roofline, figures, seqs=1, cached=10.0)
    assert result.weight_bytes_per_pass == result.bytes_per_pass == 120
    assert result.plain.limit_passes_per_s == 10
    assert result.speculative.limit_passes_per_s == 7.5


def test_draft_in_sequences():
    use = MemoryUse(
        sequences=4,
        context=64,
        target_weight_bytes=1000,
        target_cache_bytes=80,
        draft_weight_bytes=30,
        draft_cache_bytes=10,
    )
    assert use.draft_in_sequences == 2.0
    assert use.as_dict()["draft_in_sequences"] == 2.0


@pytest.mark.parametrize("proposer", [None, "ngram"])
def test_memory_of_an_attention_target(proposer):
    # With kernels torch, each slot has cache memory for a full context.
    llm = LLM(dtype="float32", kernels="torch", proposer=proposer, max_num_seqs=2, max_model_len=64)
    jobs = [Job(prompt=llm.encode("import os\n"), params=SamplingParams(max_tokens=4))] * 2
    use = measure_memory(llm, jobs)
    assert not llm.engine.busy()
    assert (use.sequences, use.context, use.other_bytes) == (2, 64, None)
    target = llm.parts.target
    assert use.target_weight_bytes == target.bytes() > use.target_cache_bytes == target.cache.bytes() > 0
    assert cache_bytes_per_token(llm) == use.target_cache_bytes / 2 / 64
    if proposer is None:
        assert use.draft_weight_bytes + use.draft_cache_bytes == llm.parts.proposer.bytes()
        assert use.draft_weight_bytes > use.draft_cache_bytes > 0
    else:
        assert use.draft_in_sequences == 0


def test_memory_of_a_recurrent_target(tmp_path):
    """Its states are kept for all slots. They do not count as bytes that a pass reads per token."""
    llm = LLM(Shelf(tmp_path).folder("mamba2"), proposer="ngram", dtype="float32", max_num_seqs=2, max_model_len=64)
    jobs = [Job(prompt=(3, 4, 5), params=SamplingParams(max_tokens=2))] * 2
    use = measure_memory(llm, jobs)
    assert use.target_cache_bytes == llm.parts.target.cache.bytes() > 0
    assert cache_bytes_per_token(llm) == 0
    assert use.draft_in_sequences == 0


def test_the_rate_is_that_of_float32_if_the_precision_is_emulated(monkeypatch):
    monkeypatch.setattr(rates, "gemm_rate", lambda device, dtype: {torch.bfloat16: 1e9, torch.float32: 2e11}[dtype])
    monkeypatch.setattr(rates, "read_bandwidth", lambda device: {"normal_pages": 1e10})
    assert rates.measure_rates(CPU, torch.bfloat16).gemm == 2e11
