"""Tests of `outrider project` for several devices: equations, published figures, and impossible inputs."""

from dataclasses import replace

import pytest

from outrider import OutriderError
from outrider.scale.estimate.equations import Efficiency, one_pass
from outrider.scale.estimate.layout import Layout, Link, Work, all_to_all_seconds, allreduce_seconds, layout_pass
from outrider.scale.estimate.machines import MachineOverrides, find_machine
from outrider.scale.estimate.models import Bits, find_model, read_model
from outrider.scale.estimate.overlap import continued_round, guessed_round, parse_overlap, serial_round
from outrider.scale.estimate.pair import Acceptance, DraftDevice, Drafting, Pair
from outrider.scale.estimate.pipeline import filled_steps, heaviest_stage, pipeline_round
from outrider.scale.estimate.separate import decode_devices, mean_ttft, prefill_devices, transfer_bandwidth
from tests.scale.estimate.projected import project, projected

IDEAL = Efficiency(name="ideal", bandwidth=1.0, arithmetic=1.0, exposed=0.0, round_seconds=0.0, layer_seconds=0.0)
FAST_LINK = Link(bandwidth=1e18)
H100, _ = find_machine("H100", MachineOverrides())
TARGET, DRAFT = find_model("70B", Bits()), find_model("1B", Bits())
FIXED = Acceptance(rates=(0.8,), repeat_last=True)


def pair(**changed):
    fields = {
        "target": TARGET,
        "drafting": Drafting(model=DRAFT),
        "acceptance": FIXED,
        "machine": H100,
        "efficiency": IDEAL,
    }
    return Pair(**(fields | changed))


# Messages


def test_expert_messages_of_deepseek_v3():
    """Insights into DeepSeek-V3, section 2.3.2: 32 tokens, 9 experts, hidden size 7K; 67 and about 1200 tokens/s."""
    infiniband = all_to_all_seconds(32, 9, 7000, Link(bandwidth=50e9))
    assert infiniband == pytest.approx(120.96e-6)
    assert 2 * infiniband * 61 == pytest.approx(14.76e-3, rel=1e-3)
    assert 1 / (2 * infiniband * 61) == pytest.approx(67, abs=1)
    nvlink = all_to_all_seconds(32, 9, 7000, Link(bandwidth=900e9))
    assert nvlink == pytest.approx(6.72e-6)
    assert 1 / (2 * nvlink * 61) == pytest.approx(1200, rel=0.02)


def test_all_reduce_moves_the_bytes_of_nccl():
    """NCCL's bus bandwidth: 2 (n - 1) / n times the size, so 1.75 S with 8 devices."""
    assert allreduce_seconds(8e9, 8, Link(bandwidth=1e9)) == pytest.approx(1.75 * 8)
    assert allreduce_seconds(0, 8, Link(bandwidth=1e9, latency=1.0)) == 14
    assert allreduce_seconds(8e9, 1, Link(bandwidth=1e9, latency=1.0)) == 0


def test_experts_on_several_devices():
    """With all tokens on one device and a fast link, only the reading of experts is shared."""
    moe = find_model("671B-A37B", Bits())
    work = Work(tokens=4096, seqs=4096, context=0)
    alone = one_pass(moe, H100, IDEAL, **work).seconds
    shared = {
        n: layout_pass(
            moe, H100, IDEAL, Layout(expert=n, link=FAST_LINK), Work(tokens=4096, seqs=4096, context=0)
        ).seconds
        for n in (2, 64)
    }
    assert alone > shared[2] > shared[64]
    slow = Layout(expert=64, link=Link(bandwidth=50e9))
    messages = layout_pass(moe, H100, IDEAL, slow, work).seconds - shared[64]
    assert messages == pytest.approx(61 * all_to_all_seconds(64, 8, 7168, slow.link, remote=63 / 64), rel=1e-6)


def test_tensor_parallel_link_replaces_the_overhead_per_layer():
    hardware, _ = find_machine("A100", MachineOverrides(devices=8))
    overhead = replace(IDEAL, allreduce_seconds=40e-6)
    shape = {"tokens": 1, "seqs": 1, "context": 0}
    bare = one_pass(TARGET, hardware, IDEAL, **shape).seconds
    nvlink = Layout(link=Link(bandwidth=300e9, latency=1e-6))
    linked = layout_pass(TARGET, hardware, overhead, nvlink, Work(**shape)).seconds
    assert linked - bare == pytest.approx(2 * 80 * allreduce_seconds(2 * 8192, 8, nvlink.link))
    assert layout_pass(TARGET, hardware, overhead, Layout(), Work(**shape)).seconds - bare == pytest.approx(80 * 40e-6)


# Pipelines


@pytest.mark.parametrize("seqs", [1, 2, 4, 64])
def test_pipeline_of_equal_stages_reads_like_one_device(seqs):
    """A group of sequences passes all layers. With a fast link this takes as long as on one device, for each group."""
    equal = replace(TARGET, output=0.0)
    layout = Layout(pipeline=4, link=FAST_LINK)
    groups = min(4, seqs)
    alone = one_pass(equal, H100, IDEAL, tokens=seqs / groups, seqs=seqs / groups, context=100).seconds
    spread = layout_pass(equal, H100, IDEAL, layout, Work(tokens=seqs, seqs=seqs, context=100)).seconds
    assert spread == pytest.approx(alone)


def test_heaviest_stage_of_a_small_model_with_a_large_vocabulary():
    """RoundPipe gains 1.48 to 2.16 from free stages in training. Imbalance alone is 1.45 for Qwen3 1.7B in 8 stages."""
    settings = {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
        "vocab_size": 151936,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    small = read_model(settings, Bits(), name="Qwen3 1.7B")
    assert 1.4 < 8 * heaviest_stage(small, 8) < 2.16
    assert heaviest_stage(find_model("32B", Bits()), 8) * 8 < 1.15
    assert heaviest_stage(small, 1) == 1
    assert pipeline_round(1.0, stages=8, groups=8, imbalance=1.5) == 12
    assert pipeline_round(1.0, stages=8, groups=1, imbalance=1.5) == 8


def test_draft_tokens_fill_a_pipeline():
    """SpecPipe, 8 stages: 4.19 to 5.53 times the speed of the plain pipeline, which needs 87% to 94% right tokens."""
    assert filled_steps(0.0, stages=8, ahead=7) == filled_steps(0.9, stages=8, ahead=0) == 8
    assert filled_steps(1.0, stages=8, ahead=7) == 1
    low, high = (8 / filled_steps(rate, stages=8, ahead=7) for rate in (0.87, 0.936))
    assert low == pytest.approx(4.19, rel=0.01)
    assert high == pytest.approx(5.53, rel=0.01)
    with pytest.raises(OutriderError, match=r"use --k 0\.\.7"):
        filled_steps(0.5, stages=8, ahead=8)


def test_filled_pipeline_against_a_simulation_of_stages():
    """Play the stages step by step: a right draft token follows one step behind, a wrong one restarts the pipeline."""
    import random

    rng = random.Random(1)
    stages, rate, steps, tokens = 6, 0.8, 0, 20000
    for _ in range(tokens):
        steps += 1 if rng.random() < rate else stages
    assert steps / tokens == pytest.approx(filled_steps(rate, stages=stages, ahead=stages - 1), rel=0.02)


def test_filling_helps_one_sequence_and_not_a_full_pipeline():
    layout = Layout(pipeline=8, link=FAST_LINK, filled=True)
    filled = pair(target=replace(TARGET, output=0.0), layout=layout, drafting=Drafting())
    one = filled.point(1, 0, 7)
    assert one.speedup == pytest.approx(8 / filled_steps(0.8, stages=8, ahead=7), rel=0.01)
    assert filled.point(8, 0, 7).speedup == pytest.approx(1, rel=0.01)
    assert filled.point(1, 0, 0).speedup == pytest.approx(1)


def test_streamed_stages_gain_more_from_speculation():
    """A round reads all weights over a slow link, so that draft tokens are almost free."""
    link = Link(bandwidth=25e9)
    bound, streamed = (
        pair(layout=Layout(pipeline=8, link=link, streamed=streamed)).best(8, 1000, range(1, 13))
        for streamed in (False, True)
    )
    assert streamed.speedup > bound.speedup
    assert streamed.plain_tokens_per_s < bound.plain_tokens_per_s
    assert streamed.plain_tokens_per_s == pytest.approx(8 / (TARGET.read_bytes(1) / 25e9), rel=0.01)


# A device for the draft, and overlap


def test_serial_and_guessed_rounds():
    """SSD: at most 1 + D / V over a serial round, and 2 at most."""
    serial = serial_round((0.8, 0.8), draft=1.0, verify=2.0)
    assert serial == (pytest.approx(2.44), 3.0)
    assert guessed_round((0.8, 0.8), draft=1.0, verify=2.0, hit=0.0) == (pytest.approx(2.44), 3.0)
    ready = guessed_round((0.8, 0.8), draft=1.0, verify=2.0, hit=1.0)
    assert serial.seconds / ready.seconds == pytest.approx(1 + 1 / 2)


def test_continued_rounds_against_a_simulation():
    """Play the rounds of a draft that goes on: a full acceptance emits k tokens and needs no new draft."""
    import random

    rng = random.Random(2)
    rates, draft, verify = (0.9, 0.8, 0.7), 1.5, 2.0
    tokens = seconds = 0.0
    for _ in range(40000):
        accepted = next((i for i, rate in enumerate(rates) if rng.random() >= rate), len(rates))
        complete = accepted == len(rates)
        tokens += accepted if complete else accepted + 1
        seconds += max(draft, verify) + (0.0 if complete else draft)
    expected = continued_round(rates, draft=draft, verify=verify)
    assert tokens / seconds == pytest.approx(expected.tokens / expected.seconds, rel=0.02)


def test_continued_rounds_against_pearl():
    """PEARL: up to 4.43 over plain decoding and 1.50 over serial drafting. Both need a = 0.98 with a fast draft.

    The draft makes 5 tokens while the target verifies 5, as PEARL chooses its draft length.
    """
    rates = (0.98,) * 5
    serial = serial_round(rates, draft=1.0, verify=1.0)
    continued = continued_round(rates, draft=1.0, verify=1.0)
    over_plain = continued.tokens / continued.seconds
    over_serial = over_plain / (serial.tokens / serial.seconds)
    assert over_plain == pytest.approx(4.43, rel=0.03)
    assert over_serial == pytest.approx(1.50, rel=0.03)


def test_continued_rounds_against_amusd():
    """AMUSD: 1.29 over serial drafting on average. The equation gives this for a = 0.92 if D = V; the limit is 2."""

    def gain(rate):
        serial = serial_round((rate,) * 5, draft=1.0, verify=1.0)
        continued = continued_round((rate,) * 5, draft=1.0, verify=1.0)
        return continued.tokens / continued.seconds / (serial.tokens / serial.seconds)

    assert gain(0.6) < gain(0.92) < gain(1.0) < 2
    assert gain(0.92) == pytest.approx(1.29, rel=0.01)


def test_own_device_changes_the_draft_only():
    l4, _ = find_machine("L4", MachineOverrides())
    shared = pair().point(1, 100, 4)
    own = pair(draft_device=DraftDevice(machine=l4, efficiency=IDEAL)).point(1, 100, 4)
    assert own.verify_seconds == shared.verify_seconds
    assert own.draft_seconds == pytest.approx(shared.draft_seconds * 3350 / 300, rel=0.01)
    assert parse_overlap("guess:0.9")[1] == 0.9
    assert shared.ahead > 1


# Separate prefill


def test_transfer_of_distserve():
    """DistServe, section 3.3: 512 tokens of OPT-66B have 1.13 GiB of KV cache; 10 requests/s need 90 Gbit/s."""
    opt_66b = read_model(
        {
            "model_type": "llama",
            "hidden_size": 9216,
            "num_hidden_layers": 64,
            "num_attention_heads": 72,
            "intermediate_size": 36864,
            "vocab_size": 50272,
        },
        Bits(),
        name="OPT-66B",
    )
    cache = opt_66b.cache_bytes(512)
    assert cache / 2**30 == pytest.approx(1.13, abs=0.01)
    assert 8 * transfer_bandwidth(cache, 10) / 2**30 == pytest.approx(90, abs=0.5)


def test_mean_ttft_against_a_simulation_of_the_queue():
    import random

    rng = random.Random(3)
    prefill, rate = 0.5, 1.4
    arrival = free = total = 0.0
    count = 60000
    for _ in range(count):
        arrival += rng.expovariate(rate)
        free = max(free, arrival) + prefill
        total += free - arrival
    assert total / count == pytest.approx(mean_ttft(prefill, rate), rel=0.05)


def test_impossible_prefill_rate():
    with pytest.raises(OutriderError, match="are more than one prefill device can do"):
        mean_ttft(0.5, 2.0)


def test_devices_for_a_rate():
    assert prefill_devices(10, 0.2, load=0.5) == 4
    assert decode_devices(10, 256, 1280) == 2


# The command


BASE = ("--target", "70B", "--machine", "RTX-4090", "--alpha", "0.8", "--proposer", "draft:1B", "--batch", "1,8")


def test_document_and_text_of_several_devices():
    words = "--pipeline 8 --link 25 --stages streamed --rate 2 --draft-machine L4 --overlap guess:0.9 --k 4"
    document, output = projected(*BASE, *words.split())
    text = " ".join(output.split())
    assert document["layout"]["groups"] == 8
    assert document["layout"]["link"] == {"bandwidth": 25e9, "latency": 5e-6}
    assert document["draft_machine"]["machine"]["name"] == "L4"
    assert document["separate"]["cases"]["middle"]["prefill_groups"] >= 1
    assert document["memory"][0]["draft_weight_bytes"] == 0
    assert "Pipeline of 8 stages, streamed over the link" in text
    assert "The draft runs on its own L4 and has 90% of the next drafts ready." in text
    assert "Separate prefill, 2 requests/s" in text
    filled, _ = projected(*BASE, "--pipeline", "8", "--link", "25", "--fill")
    assert filled["results"][0]["cases"]["middle"]["k"] == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--pipeline 0 --link 9", "--pipeline is 0"),
        ("--pipeline 81 --link 9", "use at most 80"),
        ("--pipeline 4", "give --link"),
        ("--link 25", "--link connects several devices"),
        ("--link-us 3", "give --link"),
        ("--pipeline 4 --link 0", "--link is 0"),
        ("--pipeline 4 --link 9 --stages loose", "use bound or streamed"),
        ("--devices 2 --link 9 --stages streamed", "--stages and --fill are for a pipeline"),
        ("--devices 2 --link 9 --allreduce-us 4", "give one of them"),
        ("--expert-parallel 4 --link 9", "has no experts"),
        ("--pipeline 4 --link 9 --fill --k 4", "use --k 0..3"),
        ("--pipeline 4 --link 9 --fill --nodes 2", "leave --nodes out"),
        ("--pipeline 4 --link 9 --fill --rate 1", "give one of them"),
        ("--pipeline 4 --link 9 --fill --overlap continue", "leave --overlap out"),
        ("--overlap continue", "give --draft-machine"),
        ("--draft-machine L4 --overlap sometimes", "use none, continue, or guess:SHARE"),
        ("--draft-machine L4 --overlap guess:2", "such as guess:0.9"),
        ("--draft-machine L4 --proposer ngram", "--draft-machine is for a draft model"),
        ("--draft-machine nothing", "is unknown"),
        ("--rate 0", "--rate is 0"),
        ("--rate 1 --prompt-tokens 0", "--prompt-tokens is 0"),
        ("--target 30B-A3B --expert-parallel 129 --link 9", "use at most 128"),
        ("--target 30B-A3B --expert-parallel 4 --pipeline 2 --link 9", "not estimated together"),
        ("--target 30B-A3B --expert-parallel 4 --devices 2 --link 9", "not estimated together"),
    ],
)
def test_impossible_inputs_get_one_line(words, message):
    result = project(*BASE, *words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
