"""The equations of `outrider project`."""

from dataclasses import replace

import pytest

from outrider.drafting.plan.speedup import roof
from outrider.scale.estimate.equations import (
    Attention,
    Bound,
    Experts,
    ahead_bound,
    free_tokens,
    loaded_experts,
    one_pass,
)
from outrider.scale.estimate.machines import MachineOverrides, find_machine
from outrider.scale.estimate.memory import MemoryBudget
from outrider.scale.estimate.pair import Acceptance, Drafting, Pair, head
from tests.scale.estimate.models import IDEAL, MACHINE, SMALL


def test_loaded_experts():
    """The formula of MoESD, for 128 experts of which each token uses 8."""
    experts = [loaded_experts(128, 8, tokens) for tokens in (1, 8, 16)]
    assert experts == pytest.approx([8, 51.6, 82.4], abs=0.05)
    assert loaded_experts(128, 8, 1e6) == pytest.approx(128)


@pytest.mark.parametrize(("bits", "tokens"), [(16, 295), (4, 74)])
def test_free_tokens_of_an_h100(bits, tokens):
    hardware, _ = find_machine("H100", MachineOverrides())
    assert free_tokens(bandwidth=hardware.bandwidth, arithmetic=hardware.bf16, bits=bits) == pytest.approx(
        tokens, abs=0.6
    )


@pytest.mark.parametrize("k", [0, 1, 4, 9])
def test_tau_equals_the_closed_form(k):
    assert Acceptance(rates=(0.7,), repeat_last=True).tau(k) == pytest.approx((1 - 0.7 ** (k + 1)) / (1 - 0.7))
    assert Acceptance(rates=(0.9, 0.5)).tau(min(k, 2)) == pytest.approx([1, 1.9, 2.35][min(k, 2)])


def test_ideal_pass_equals_the_roofline():
    estimate = one_pass(SMALL, MACHINE, IDEAL, tokens=6, seqs=2, context=5)
    size = 50 * 2 + 2 * 5 * 2
    operations = 6 * 2 * (50 + 5)
    assert 1 / estimate.seconds == pytest.approx(
        roof(bytes_per_pass=size, flops_per_pass=operations, bandwidth=100, gemm=1000)
    )
    assert estimate.bound is Bound.BANDWIDTH
    assert one_pass(SMALL, MACHINE, IDEAL, tokens=60, seqs=2, context=5).bound is Bound.ARITHMETIC


def test_efficiency_and_overheads_of_a_pass():
    worse = replace(IDEAL, bandwidth=0.5, arithmetic=0.25, exposed=1.0, layer_seconds=0.1, allreduce_seconds=0.3)
    one_device = one_pass(SMALL, MACHINE, worse, tokens=6, seqs=2, context=5)
    assert one_device.seconds == pytest.approx(120 / 50 + 660 / 250 + 2 * 0.1)
    two_devices = one_pass(SMALL, replace(MACHINE, devices=2), worse, tokens=6, seqs=2, context=5)
    assert two_devices.seconds == pytest.approx(one_device.seconds + 2 * 0.3)


def test_weight_bits_change_bytes_and_arithmetic_rate():
    eight = replace(SMALL, bits=8.0, int8=True)
    assert eight.read_bytes(1) == 50
    assert one_pass(eight, MACHINE, IDEAL, tokens=600, seqs=1, context=0).seconds == pytest.approx(600 * 100 / 2000)


def test_sliding_window_limits_cache_bytes_and_operations():
    window = replace(SMALL, attention=(Attention(numbers=1.0, products=1.0, window=4), SMALL.attention[0]))
    assert window.cache_bytes(3) == 2 * 3 * 2
    assert window.cache_bytes(10) == 2 * (4 + 10)
    assert window.operations(10) == 2 * (50 + 4 + 10)


def test_pass_reads_only_active_experts():
    moe = replace(SMALL, experts=Experts(count=4, active=1, weights=10.0))
    assert moe.read_bytes(1) == 2 * (50 + 10)
    assert moe.read_bytes(1000) == pytest.approx(2 * (50 + 40))
    assert moe.held_bytes() == 2 * (50 + 40)
    assert moe.active() == 60


def small_pair(**changed):
    fields = {
        "target": SMALL,
        "drafting": Drafting(model=replace(SMALL, layers=1, weights=5.0)),
        "acceptance": Acceptance(rates=(0.8,), repeat_last=True),
        "machine": MACHINE,
        "efficiency": IDEAL,
    }
    return Pair(**(fields | changed))


def test_point_computed_by_hand():
    """Reading 100 bytes takes 1 s and a pass of the draft 0.1 s. The arithmetic of 3 tokens takes less."""
    point = small_pair().point(1, 0, 2)
    assert (point.draft_seconds, point.verify_seconds) == (pytest.approx(0.2), pytest.approx(1.0))
    assert point.tau == pytest.approx(1 + 0.8 + 0.64)
    assert point.tokens_per_s == pytest.approx(2.44 / 1.2)
    assert point.speedup == pytest.approx(2.44 / 1.2)
    assert point.plain_tokens_per_s == pytest.approx(1.0)
    assert point.ahead == pytest.approx(1.2) == ahead_bound(draft=0.2, verify=1.0)


def test_parallel_drafting_and_host_drafting():
    parallel = small_pair(drafting=Drafting(model=replace(SMALL, weights=5.0), parallel=True))
    assert parallel.point(1, 0, 2).draft_seconds == pytest.approx(0.1)
    host = small_pair(drafting=Drafting(host_seconds=0.01))
    assert host.point(3, 0, 2).draft_seconds == pytest.approx(0.03)
    assert host.point(3, 0, 0).draft_seconds == 0


def test_verification_time_grows_with_nodes_of_a_tree():
    tree = small_pair(acceptance=Acceptance(rates=(0.8,), repeat_last=True, nodes=10.0))
    assert tree.point(1, 0, 2).verify_seconds == pytest.approx(21 * 100 / 1000)


def test_k_0_equals_plain_decoding():
    point = small_pair(efficiency=replace(IDEAL, round_seconds=0.5)).point(4, 3, 0)
    assert point.speedup == pytest.approx(1)
    assert point.tokens_per_s == pytest.approx(point.plain_tokens_per_s)


@pytest.mark.parametrize("seqs", [1, 3, 8, 40])
def test_best_returns_the_largest_speedup(seqs):
    pair = small_pair()
    ks = range(1, 9)
    best = pair.best(seqs, 2, ks)
    assert best.speedup == max(pair.point(seqs, 2, k).speedup for k in (0, *ks))


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_stops_paying_equals_exhaustive_search(alpha):
    pair = small_pair(acceptance=Acceptance(rates=(alpha,), repeat_last=True))
    ks = range(1, 5)
    paying = [seqs for seqs in range(1, 65) if pair.best(seqs, 0, ks).k]
    assert pair.stops_paying(0, ks) == max(paying, default=0) + 1


def test_stops_paying_if_speculation_never_or_always_pays():
    expensive_draft = small_pair(drafting=Drafting(model=SMALL))
    assert expensive_draft.stops_paying(0, [1, 2]) == 1
    long_context = small_pair(
        target=replace(SMALL, attention=(Attention(numbers=1.0, products=0.01),)), drafting=Drafting()
    )
    assert long_context.stops_paying(10**6, [1, 2]) is None


def test_head_has_a_share_of_the_target():
    moe = replace(SMALL, experts=Experts(count=4, active=1, weights=10.0))
    assert head(moe, 0.1).read_bytes(5) == pytest.approx(2 * 6)
    assert head(moe, 0.1).cache_bytes(1) == moe.cache_bytes(1) / 2


def test_memory_budget():
    budget = MemoryBudget.of(SMALL, replace(SMALL, weights=5.0), memory=200.0, context=5)
    assert budget.held(3) == 100 + 10 + 3 * (10 + 10)
    assert (budget.max_sequences(), budget.max_sequences(draft=False)) == (4, 10)
    assert budget.draft_in_sequences(3) == pytest.approx((10 + 30) / 10)
    assert MemoryBudget.of(SMALL, None, memory=50.0, context=5).max_sequences() == 0
    assert MemoryBudget.of(SMALL, None, memory=None, context=5).max_sequences() is None
