"""Estimates beside measurements. docs/how-to/estimate.md states the tolerances."""

import pytest

from outrider.scale.estimate.equations import one_pass
from outrider.scale.estimate.machines import CPU, GPU
from outrider.scale.estimate.models import Bits, find_model
from outrider.scale.estimate.pair import Acceptance, Drafting, head
from tests.scale.estimate.models import BASE, DRAFT, LLAMA_7B, LLAMA_70B, llama, pairs


@pytest.mark.parametrize(
    ("tokens", "ms"),
    [(1, 4.4), (2, 4.4), (4, 4.5), (5, 4.6), (8, 5.6), (12, 7.2), (16, 8.5), (32, 16.0), (64, 33.0), (512, 246.0)],
)
def test_pass_time_measured_on_a_cpu(tokens, ms):
    """docs/explanation/results/passes.md, The limit: within 25% of the middle case, and between the other cases."""
    slow, middle, fast = (
        1e3 * one_pass(BASE, pair.machine, pair.efficiency, tokens=tokens, seqs=1, context=0).seconds
        for pair in pairs(BASE, "EPYC 2 cores", kind=CPU)
    )
    assert middle == pytest.approx(ms, rel=0.25)
    assert fast < ms < slow


def _rates(tau, k):
    """Return rates with this tau. Any do, because the cost depends on k only."""
    return ((tau - 1) / k, *[1.0] * (k - 1))


def _speedups(target, machine, draft, tau, k, *, context, kind=GPU, pass_seconds=None):
    """Return the three estimates of the speedup."""
    drafting = Drafting(model=draft, pass_seconds=pass_seconds)
    acceptance = Acceptance(rates=_rates(tau, k))
    cases = pairs(target, machine, kind=kind, drafting=drafting, acceptance=acceptance)
    return [pair.point(1, context, k).speedup for pair in cases]


def test_speedup_measured_on_a_gpu():
    """docs/explanation/results/gpu.md: 8B with 1B, k = 4. The cases contain it, and the draft's time decides.

    A round took 3.55 / 236.4 s: 7.3 ms of verification, 0.3 ms outside of the passes, and four passes of the draft.
    """
    target, draft = find_model("8B", Bits()), find_model("1B", Bits())
    measured = 236.4 / 139.6
    slow, middle, fast = _speedups(target, "H100", draft, 3.55, 4, context=256)
    assert slow < measured < fast
    assert middle == pytest.approx(measured, rel=0.1)
    pass_seconds = (3.55 / 236.4 - 7.32e-3 - 0.27e-3) / 4
    _, known, _ = _speedups(target, "H100", draft, 3.55, 4, context=256, pass_seconds=pass_seconds)
    assert known == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("tau", "speedup"), [(4.77, 2.74), (4.90, 3.31), (2.69, 2.04), (2.04, 1.38), (3.28, 2.16)])
def test_speedup_of_each_category_on_a_cpu(tau, speedup):
    """docs/explanation/results/speculation.md, Temperature 1: the cases contain each row."""
    slow, _, fast = _speedups(BASE, "EPYC 2 cores", DRAFT, tau, 4, context=200, kind=CPU)
    assert slow < speedup < fast


@pytest.mark.parametrize(
    ("target", "drafting", "rates", "speedup", "plain"),
    [
        (BASE, Drafting(model=DRAFT), (0.73, 0.82, 0.88, 0.90), 2.16, 161),
        (
            llama(384, 8, 6, 2, 1024, 12288, tied=True),
            Drafting(model=llama(128, 2, 2, 1, 384, 12288, tied=True)),
            (0.81, 0.87, 0.82, 0.88),
            1.89,
            1064,
        ),
    ],
)
def test_speedup_measured_on_a_cpu(target, drafting, rates, speedup, plain):
    """docs/explanation/results/speculation.md, Temperature 1 and The embedded pair: within 10% of the middle case."""
    points = [
        pair.point(1, 200, 4)
        for pair in pairs(target, "EPYC 2 cores", kind=CPU, drafting=drafting, acceptance=Acceptance(rates=rates))
    ]
    assert points[1].speedup == pytest.approx(speedup, rel=0.1)
    assert points[0].speedup < speedup < points[2].speedup
    assert points[0].plain_tokens_per_s < plain < points[2].plain_tokens_per_s


def test_batch_32_on_a_cpu():
    """docs/explanation/results/speculation.md, Per batch: no draft pays, and plain decoding has 1163 tokens/s."""
    cases = pairs(BASE, "EPYC 2 cores", kind=CPU, drafting=Drafting(model=DRAFT))
    assert [pair.best(32, 300, range(1, 9)).k for pair in cases] == [0, 0, 0]
    slow, _, fast = (pair.point(32, 300, 0).tokens_per_s for pair in cases)
    assert slow < 1163 < fast


@pytest.mark.parametrize(
    ("dims", "bits", "devices", "measured", "within"),
    [
        (LLAMA_7B, 16, 1, 104.9, 0.1),
        (LLAMA_7B, 16, 2, 168.84, 0.1),
        (LLAMA_7B, 16, 4, 254.02, 0.1),
        (LLAMA_7B, 16, 8, 328.43, 0.1),
        (LLAMA_70B, 16, 2, 21.32, 0.1),
        (LLAMA_70B, 16, 4, 38.01, 0.1),
        (LLAMA_70B, 16, 8, 62.50, 0.1),
        (LLAMA_70B, 8, 1, 19.13, 0.15),
        (LLAMA_7B, 8, 1, 155.58, 0.3),
        (LLAMA_70B, 5, 1, 25.25, 0.35),
        (LLAMA_7B, 5, 1, 196.80, 0.5),
    ],
)
def test_plain_decoding_of_gpt_fast(dims, bits, devices, measured, within):
    """The A100 table of its README. 4 bits in groups of 32 are 5 bits with scales. With few bits, it is too high."""
    slow, middle, _ = (pair.point(1, 100, 0) for pair in pairs(llama(*dims, bits=bits), "A100", devices=devices))
    assert middle.tokens_per_s == pytest.approx(measured, rel=within)
    assert bits < 16 or slow.tokens_per_s < measured


def test_plain_decoding_of_sglang_and_vllm():
    """SGLang: 158.3 tokens/s with Llama 3.1 8B on an H100. vLLM: 15.73 ms with Qwen2.5 7B on an RTX 4090."""
    _, sglang, _ = (pair.point(1, 1000, 0) for pair in pairs(find_model("8B", Bits()), "H100"))
    assert sglang.tokens_per_s == pytest.approx(158.3, rel=0.1)
    _, middle, fast = (1e3 / pair.point(1, 500, 0).tokens_per_s for pair in pairs(find_model("7B", Bits()), "RTX 4090"))
    assert fast == pytest.approx(15.73, rel=0.02)
    assert middle == pytest.approx(15.73, rel=0.3)


def test_pass_of_an_8b_model_on_an_h200():
    """15 GB at 4.8 TB/s take 3.13 ms. 3.6 ms are 87% of the datasheet, as in the optimistic case."""
    target = find_model("8B", Bits())
    _, middle, fast = (pair.point(1, 1, 0).verify_seconds * 1e3 for pair in pairs(target, "H200"))
    assert target.read_bytes(1) / 4.8e9 == pytest.approx(3.127, abs=1e-3)
    assert fast == pytest.approx(3.6, rel=0.05)
    assert middle == pytest.approx(3.6, rel=0.3)


@pytest.mark.parametrize(
    ("method", "tau", "k", "nodes", "share", "measured"),
    [
        ("prompt lookup", 1.73, 10, 1.0, None, 1.59),
        ("token recycling", 2.73, 5, 16.0, None, 2.22),
        ("Medusa", 2.32, 4, 16.0, 0.09, 1.78),
        ("EAGLE", 3.61, 5, 5.0, 0.05, 2.29),
        ("SAMD with EAGLE-2", 4.58, 6, 10.0, 0.07, 2.73),
    ],
)
def test_spec_bench(method, tau, k, nodes, share, measured):
    """The leaderboard of Spec-Bench with Vicuna 7B on an A100, at its tau: the cases contain each row.

    Tree sizes and the shares of the heads are those of the papers, rounded.
    """
    target = llama(*LLAMA_7B)
    drafting = Drafting(model=head(target, share) if share else None, parallel=method == "Medusa")
    cases = pairs(target, "A100", drafting=drafting, acceptance=Acceptance(rates=_rates(tau, k), nodes=nodes))
    slow, middle, fast = (pair.point(1, 400, k).speedup for pair in cases)
    assert cases[0].acceptance.tau(k) == pytest.approx(tau)
    assert middle == pytest.approx(measured, rel=0.1)
    assert slow < measured < fast <= tau


def test_drafting_ahead_of_a_70b_model():
    """SSD reports up to 2x over speculation and 5x over plain decoding: Llama 3.1 70B on 4 H100 with a 1B draft."""
    drafting = Drafting(model=find_model("1B", Bits()))
    for pair in pairs(find_model("70B", Bits()), "H100", devices=4, drafting=drafting):
        best = pair.best(1, 1024, range(1, 13))
        assert best.ahead <= 2
        assert 2.4 < best.speedup < best.speedup * best.ahead < 5
