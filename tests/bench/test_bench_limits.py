"""What a machine can do at most, and what lies in its memory."""

from __future__ import annotations

import mmap

import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.bench.contestants import Job
from outrider.bench.limits import Roofline, limits
from outrider.bench.memory import MemoryUse, cache_bytes_per_token, measure_memory
from outrider.bench.rates import Rates, best_rates, gemm_rate, read_bandwidth
from outrider.plan.speedup import roof, sequences_instead
from tests.helpers.tiny import Shelf

CPU = torch.device("cpu")


def test_roof_is_the_lower_of_two():
    assert roof(bytes_per_pass=10, flops_per_pass=1, bandwidth=1000, gemm=1e6) == 100
    assert roof(bytes_per_pass=10, flops_per_pass=1e5, bandwidth=1000, gemm=1e6) == 10


def test_rows_instead():
    """A draft of 30 bytes and 4 rows of 5 stands where 25 rows of 2 could."""
    assert sequences_instead(draft_weights=30, draft_cache=4 * 5, row_cache=2) == 25
    assert sequences_instead(draft_weights=0, draft_cache=0, row_cache=2) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: roof(bytes_per_pass=1, flops_per_pass=0, bandwidth=1, gemm=1),
        lambda: roof(bytes_per_pass=1, flops_per_pass=1, bandwidth=1, gemm=0),
        lambda: sequences_instead(draft_weights=1, draft_cache=1, row_cache=0),
        lambda: sequences_instead(draft_weights=-1, draft_cache=1, row_cache=1),
    ],
)
def test_mistakes(wrong):
    with pytest.raises(OutriderError):
        wrong()


def test_read_bandwidth_of_both_kinds_of_pages():
    kinds = {"normal_pages", "huge_pages"} if hasattr(mmap, "MADV_HUGEPAGE") else {"normal_pages"}
    rates = read_bandwidth(CPU, size=1 << 22)
    assert set(rates) <= kinds  # a kernel may have been built without huge ones
    assert rates["normal_pages"] > 0


def test_read_bandwidth_without_advice(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(mmap, "MADV_NOHUGEPAGE", raising=False)
    assert list(read_bandwidth(CPU, size=1 << 20)) == ["normal_pages"]


def test_gemm_rate(monkeypatch):
    monkeypatch.setattr("outrider.bench.rates._MATRIX", (32, 64))
    assert gemm_rate(CPU, torch.float32) > 0
    assert gemm_rate(CPU, torch.bfloat16) > 0


def test_the_limit_is_the_best_that_was_seen():
    moments = [
        Rates(read={"normal_pages": 3.0, "huge_pages": 5.0}, gemm=7.0),
        Rates(read={"normal_pages": 6.0, "huge_pages": 4.0}, gemm=2.0),
    ]
    assert best_rates(moments) == (6.0, 7.0)


def test_limits():
    """100 bytes a pass, and 2 rows of 10 tokens of 5 bytes; arithmetic allows 40 columns a second."""
    roofline = Roofline(
        weight_bytes_per_pass=100,
        cache_bytes_per_token=5.0,
        flops_per_token=3.0,
        read_bytes_per_s=1000.0,
        gemm_flops_per_s=120.0,
    )
    plain = {"tau": 1.0, "draft_tokens": 0, "passes": 8, "tokens_per_s": {"median": 5.0}}
    guessing = {"tau": 3.0, "draft_tokens": 32, "passes": 8, "tokens_per_s": None}
    found = limits(roofline, {"plain": plain, "speculative": guessing}, rows=2, cached=10.0)
    assert (found["bytes_per_pass"], found["bytes_per_token"]) == (200.0, 100.0)
    assert found["plain"] == {"limit_passes_per_s": 5.0, "limit_tokens_per_s": 10.0, "share_of_limit": 0.5}
    # 5 columns a row and pass: arithmetic is what binds
    assert found["speculative"] == {"limit_passes_per_s": 4.0, "limit_tokens_per_s": 24.0, "share_of_limit": None}


def test_footprint_of_a_draft():
    held = MemoryUse(sequences=4, context=64, target_weights=1000, target_cache=80, draft_weights=30, draft_cache=10)
    assert held.draft_in_sequences == 2.0
    assert held.as_dict()["draft_in_sequences"] == 2.0


@pytest.mark.parametrize("proposer", [None, "ngram"])
def test_footprint(proposer):
    llm = LLM(
        dtype="float32", kernels="torch", proposer=proposer, max_num_seqs=2, max_model_len=64
    )  # where a row has a stripe
    jobs = [Job(prompt=llm.encode("import os\n"), params=SamplingParams(max_tokens=4))] * 2
    held = measure_memory(llm, jobs)
    assert not llm.engine.busy()
    assert (held.sequences, held.context, held.other) == (2, 64, None)
    assert held.target_weights == llm.parts.target.bytes() > held.target_cache == llm.parts.target.cache.bytes() > 0
    assert cache_bytes_per_token(llm) == held.target_cache / 2 / 64
    if proposer is None:
        assert held.draft_weights + held.draft_cache == llm.parts.proposer.bytes()
        assert held.draft_weights > held.draft_cache > 0
    else:
        assert held.draft_in_sequences == 0


def test_footprint_of_a_recurrent_target(tmp_path):
    """Its states are weighed while all rows run, and count as nothing that a pass reads."""
    llm = LLM(Shelf(tmp_path).folder("mamba2"), proposer="ngram", dtype="float32", max_num_seqs=2, max_model_len=64)
    jobs = [Job(prompt=(3, 4, 5), params=SamplingParams(max_tokens=2))] * 2
    held = measure_memory(llm, jobs)
    assert held.target_cache > 0 == llm.parts.target.cache.bytes()
    assert cache_bytes_per_token(llm) == 0
    assert held.draft_in_sequences == 0
