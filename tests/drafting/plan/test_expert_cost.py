"""The cost of a pass of a mixture of experts includes the experts that its tokens read."""

from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from outrider.drafting.plan.calibrate import PassTimes, Shape, measure_pass, run_pass
from outrider.drafting.plan.expert_use import ExpertUse
from outrider.drafting.plan.pass_cost import Clock, CostModel, PassCost, Sample
from outrider.drafting.plan.proposer_stats import ProposerStats
from outrider.lab.bench.calibration import show_calibration
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.scale.estimate.equations import loaded_experts
from tests.helpers import tiny

EXPERTS, TOP = 16, 2
CONFIGS = {
    "mixtral": tiny.make_config("MixtralConfig", num_local_experts=EXPERTS, num_experts_per_tok=TOP),
    "qwen3_moe": tiny.make_config(
        "Qwen3MoeConfig", num_experts=EXPERTS, num_experts_per_tok=TOP, moe_intermediate_size=24
    ),
    "olmoe": tiny.make_config("OlmoeConfig", num_experts=EXPERTS, num_experts_per_tok=TOP),
}
FAST = pytest.mark.fast_cases("mixtral")


@pytest.fixture(scope="module", params=CONFIGS)
def routed(request, tmp_path_factory):
    """A target, and the list that its routers append the experts of a pass to."""
    folder = tiny.save(tmp_path_factory.mktemp("experts") / request.param, CONFIGS[request.param])
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    touched = []
    for layer in checkpoint.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: touched.append(outputs[2]))
    return make_target(checkpoint, slots=4, context=64, kernels="torch"), touched


def count_experts(touched):
    """Return the distinct experts of each layer, averaged, and forget them."""
    counts = [len(indices.unique()) for indices in touched]
    touched.clear()
    assert len(counts) == tiny.LAYERS
    return sum(counts) / len(counts)


@FAST
@torch.inference_mode()
def test_experts_of_a_measured_pass_grow_with_its_tokens(routed):
    target, touched = routed
    touched.clear()
    counts = []
    for tokens in (1, 2, 4, 8, 16):
        run_pass(target, Shape(tokens, 1))
        counts.append(count_experts(touched))
        assert target.touched_experts() == counts[-1]
    assert counts[0] == TOP
    assert counts == sorted(set(counts)), counts
    assert counts[-1] > 4 * TOP


@FAST
@torch.inference_mode()
def test_measured_passes_of_one_shape_read_the_same_experts(routed):
    """The minimum of repeated measurements must not be the luckiest choice of experts."""
    target, touched = routed
    touched.clear()
    choices = []
    for _ in range(2):
        run_pass(target, Shape(8, 2))
        choices.append(torch.cat(touched))
        touched.clear()
    assert torch.equal(*choices)


@FAST
@torch.inference_mode()
def test_experts_of_a_measured_prefill(routed):
    target, touched = routed
    touched.clear()
    run_pass(target, Shape(16, 1, scored=False))
    assert count_experts(touched) > 4 * TOP


@FAST
@torch.inference_mode()
def test_equal_tokens_of_a_measured_pass_read_the_experts_of_one(routed):
    target, touched = routed
    touched.clear()
    run_pass(target, Shape(12, 1, equal=True))
    assert count_experts(touched) == TOP


@FAST
def test_measured_costs_have_the_experts_of_their_passes(routed):
    target, touched = routed
    cost = measure_pass(target)
    touched.clear()
    assert len(cost.experts) == len(cost.tokens)
    assert cost.experts[0] == TOP
    assert cost.experts[-1] > 4 * TOP
    assert 0 <= cost.expert <= cost.seconds[0] / TOP
    model = CostModel(target=cost, draft=None)
    assert CostModel.loads(model.dumps()) == model


def make_cost(*, expert=0.5, per_token=0.05, count=16, top=2, widest=64):
    """Return the cost of a pass that reads `expert` seconds for each expert of random tokens."""
    samples = []
    for tokens in range(1, widest + 1):
        experts = loaded_experts(count, top, tokens)
        for equal, used in ((False, experts), (True, top)):
            seconds = 1.0 + expert * used + per_token * tokens
            samples.append(Sample(tokens=tokens, seqs=1, cached=0, seconds=seconds, experts=used, equal=equal))
    return PassCost.fit(samples)


def test_fit_finds_the_time_of_an_expert():
    cost = make_cost()
    assert cost.expert == pytest.approx(0.5)
    assert cost.base(8) == pytest.approx(1.0 + 0.5 * loaded_experts(16, 2, 8) + 0.4)
    assert make_cost(expert=0.0).expert == 0
    uncounted = PassCost.fit([Sample(tokens=t, seqs=1, cached=0, seconds=1.0 + t) for t in (1, 2, 4)])
    assert uncounted.experts == ()
    assert uncounted.expert == 0


@pytest.mark.parametrize("power", [0.5, 0.8, 1.0, 1.4])
def test_use_of_experts_is_learned_from_counts(power):
    tokens = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    use = ExpertUse(tokens, [loaded_experts(64, 2, count) for count in tokens])
    assert use.of_text(8) == use.of_random(8)
    for _ in range(40):
        for count in (3, 6, 9):
            use.learn(count, loaded_experts(64, 2, count**power))
    assert use.power == pytest.approx(power, abs=0.05)
    assert use.of_text(8) == pytest.approx(loaded_experts(64, 2, 8**power), rel=0.03)
    assert use.of_text(1) == 2


def test_counts_that_say_nothing_are_ignored():
    use = ExpertUse((1, 2, 4), (2.0, 3.0, 4.0))
    use.learn(1, 2.0)  # one token uses the experts of one token in any text
    use.learn(4, 4.0)  # all experts that were ever used
    assert use.power == 1
    assert ExpertUse((1, 2), ()).of_text(2) == 0
    assert ExpertUse((1,), (2.0,)).of_text(5) == 2
    without = ExpertUse((1, 2), ())
    without.learn(2, 3.0)
    assert without.of_text(2) == 0


def best_length(cost, power):
    """Return the best draft length for a lookup proposer, after rounds that used the experts of tokens ** power."""
    clock = Clock(CostModel(target=cost, draft=None, host=0.0))
    for _ in range(50):
        clock.learn(6, 1, 0, clock.at(6, seqs=1, cached=0), drafted=True, experts=loaded_experts(16, 2, 6**power))
    stats = ProposerStats(CostModel(target=cost, draft=None, host=0.0), max_draft_tokens=16)
    return stats.best_length(1, 0, clock)


def test_drafts_are_shorter_where_they_load_more_experts():
    lengths = [best_length(make_cost(expert=0.3), power) for power in (0.0, 0.5, 1.0, 1.5)]
    ks, gains = zip(*lengths, strict=True)
    assert ks[0] > ks[-1] > 0
    assert list(ks) == sorted(ks, reverse=True)
    assert list(gains) == sorted(gains, reverse=True)
    dense = make_cost(expert=0.0)
    assert best_length(dense, 0.5) == best_length(dense, 1.5)
    assert best_length(dense, 1.0)[0] > ks[2]


def test_calibration_table_shows_the_experts():
    console = Console(record=True, width=120)
    costs = CostModel(target=make_cost(widest=4), draft=None)
    show_calibration({"costs": asdict(costs), "kernels": "native"}, console)
    text = " ".join(console.export_text().split())
    assert "tokens target per token experts" in text
    assert "4 4510.55 1127.64 6.6" in text
    assert "One more adds 500.000 ms" in text


def test_known_times_are_checked_outside_inference_mode(tmp_path):
    """A cache that a pass in inference mode has allocated cannot be changed outside of it."""
    folder = tiny.save(tmp_path / "model", tiny.make_config("LlamaConfig"))
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    times = PassTimes(make_target(checkpoint, slots=1, context=64, kernels="torch"))
    times.measure(0.0)
    tokens = max(shape.tokens for shape in times.known)
    assert times.check(min(shape.tokens for shape in times.known)) > 0
    assert times.check(tokens) > 0
