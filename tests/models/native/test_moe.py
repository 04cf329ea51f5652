"""Routed experts on the native kernels: equal to transformers, and in every bit whatever else is in the pass."""

import pytest
import torch

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.native.arena import Arena
from outrider.models.native.experts import pack_experts
from tests.helpers import tiny
from tests.helpers.threads import torch_threads
from tests.models.native.test_native import (
    FLOAT_BITS,
    chain,
    check_tree_nodes_in_batches,
    feed,
    load_target,
    random_ids,
    relative_error,
    split,
)

pytestmark = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
MODELS = {
    "mixtral": tiny.make_config(
        "MixtralConfig",
        head_dim=16,
        hidden_size=48,  # not a multiple of a panel
        intermediate_size=80,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=tiny.WINDOW,
    ),
    "qwen3_moe": tiny.make_config(
        "Qwen3MoeConfig",
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=3,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        intermediate_size=112,
    ),
    "qwen3_moe not normalized": tiny.make_config(
        "Qwen3MoeConfig",
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=6,  # all of them
        moe_intermediate_size=16,
        norm_topk_prob=False,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "olmoe": tiny.make_config("OlmoeConfig", hidden_size=64, num_experts=8, num_experts_per_tok=1),
    "olmoe normalized": tiny.make_config(
        "OlmoeConfig", hidden_size=128, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    ),
}
ROUTED = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    return {name: tiny.save(root / name.replace(" ", "-"), config) for name, config in MODELS.items()}


def logits_of(target, tokens):
    """Return [T, V], the logits of one pass."""
    return feed(target, [tokens[:1]], draft=chain(tokens[1:]))[0].logits[0]


@ROUTED
@torch.inference_mode()
def test_float32_equals_transformers(name, folders):
    target, model = load_target(folders[name], bits=32)
    tokens = random_ids(100)
    logits = feed(target, [tokens[:60], tokens[60:61]], draft=chain(tokens[61:]))[1].logits[0]
    expected = model(torch.tensor([tokens])).logits[0, 60:]
    assert relative_error(logits, expected) < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@ROUTED
@torch.inference_mode()
def test_bfloat16_is_closer_to_float32_than_transformers(name, folders):
    """The median over tokens, as rounding routes some tokens to other experts."""
    target, model = load_target(folders[name])
    tokens = random_ids(100)
    logits = logits_of(target, tokens)
    rounded = model(torch.tensor([tokens])).logits[0].float()
    exact = model.float()(torch.tensor([tokens])).logits[0]

    def error(actual):
        return float(((actual - exact).norm(dim=-1) / exact.norm(dim=-1)).median())

    assert error(logits) < min(0.8 * error(rounded), 0.06)


@pytest.mark.fast_cases("mixtral", "qwen3_moe not normalized", "olmoe normalized")
@ROUTED
@torch.inference_mode()
def test_greedy_text_equals_transformers(name, folders):
    llm = LLM(folders[name], proposer="ngram", k=4, dtype="float32", kernels="native", max_num_seqs=2, max_model_len=96)
    assert llm.parts.target.kernels == "native"
    model = load_target(folders[name], bits=32)[1]
    params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
    prompts = [random_ids(count, seed) for seed, count in enumerate((5, 19))]
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        assert list(completion.token_ids) == tiny.greedy(model, prompt, 32)


@pytest.mark.fast_cases("32-mixtral", "32-olmoe normalized", "16-olmoe", "8-qwen3_moe not normalized", "4-qwen3_moe")
@ROUTED
@pytest.mark.parametrize("bits", [32, 16, 8, 4])
@torch.inference_mode()
def test_bits_do_not_depend_on_pass_width(name, bits, folders):
    target, _ = load_target(folders[name], bits=bits)
    tokens = random_ids(52)
    reference = logits_of(target, tokens)
    for sizes in ([1] * 52, [2] * 26, [5, 7, 11, 13, 16], [51, 1], [3] * 17 + [1]):
        pieces, ends = split(tokens, sizes)
        logits = torch.cat([scores.logits[0, -1:] for scores in feed(target, pieces, slot=2)])
        assert torch.equal(logits, reference[ends])


@FLOAT_BITS
@torch.inference_mode()
def test_bits_do_not_depend_on_thread_count(bits, folders):
    tokens = random_ids(40)
    logits = []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            target, _ = load_target(folders["qwen3_moe"], bits=bits)
            logits.append(logits_of(target, tokens))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@ROUTED
@FLOAT_BITS
def test_bits_of_tree_nodes_do_not_depend_on_the_batch(name, bits, folders):
    check_tree_nodes_in_batches(load_target(folders[name], bits=bits)[0])


@FLOAT_BITS
@pytest.mark.parametrize(
    ("name", "tokens", "count"),
    [("olmoe", [7] * 40, 1), ("qwen3_moe not normalized", random_ids(40), 6)],
    ids=["one expert", "all experts"],
)
@torch.inference_mode()
def test_all_tokens_use_the_same_experts(name, tokens, count, bits, folders):
    """Equal tokens have equal states, so that each of them uses the one expert of the first."""
    target, model = load_target(folders[name], bits=bits)
    touched = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: touched.append(outputs[2]))
    expected = model.float()(torch.tensor([tokens])).logits[0]
    assert {len(indices.unique()) for indices in touched} == {count}
    assert relative_error(logits_of(target, tokens), expected) < (1e-4 if bits == 32 else 0.06)


@ROUTED
@torch.inference_mode()
def test_experts_of_a_pass_are_those_of_transformers(name, folders):
    target, model = load_target(folders[name], bits=32)
    chosen = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, outputs: chosen.append(outputs[2]))
    for tokens in (random_ids(12), random_ids(3, 5)):
        logits_of(target, tokens)
        chosen.clear()
        model(torch.tensor([tokens]))
        assert len(target.chosen_experts()) == len(chosen)
        for ours, theirs in zip(target.chosen_experts(), chosen, strict=True):
            assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
        counts = [len(experts.unique()) for experts in chosen]
        assert target.touched_experts() == sum(counts) / len(counts)
    first = target.make_submodel(range(2))
    logits_of(first, tokens)
    assert first.touched_experts() is not None
    assert len(first.chosen_experts()) == sum(hasattr(layer.mlp, "experts") for layer in model.model.layers[:2])


@torch.inference_mode()
def test_weights_of_experts_that_are_not_chosen_have_no_effect(folders):
    target, model = load_target(folders["olmoe"], bits=32)
    routers = {key: 0 * value for key, value in model.state_dict().items() if key.endswith("mlp.gate.weight")}
    target.update_weights(routers, 1)  # each token chooses expert 0
    tokens = random_ids(20)
    expected = logits_of(target, tokens)
    experts = {key: value.clone() for key, value in model.state_dict().items() if ".experts." in key}
    for value in experts.values():
        value[1:] = torch.nan
    target.update_weights(experts, 2)
    assert torch.equal(logits_of(target, tokens), expected)
    for value in experts.values():
        value[0] = torch.nan
    target.update_weights(experts, 3)
    assert not logits_of(target, tokens).isfinite().any()


@torch.inference_mode()
def test_router_logits_that_are_not_finite_do_not_crash(folders):
    target, model = load_target(folders["qwen3_moe"], bits=32)
    tokens = random_ids(20)
    for bad in (torch.nan, torch.inf, -torch.inf):
        routers = {key: value + bad for key, value in model.state_dict().items() if key.endswith("mlp.gate.weight")}
        target.update_weights(routers, 1)
        assert not logits_of(target, tokens).isfinite().any()


@pytest.mark.fast_cases("32-mixtral", "32-olmoe", "16-qwen3_moe not normalized")
@ROUTED
@FLOAT_BITS
@torch.inference_mode()
def test_weight_update_equals_loading_the_other_checkpoint(name, bits, folders, tmp_path):
    target, _ = load_target(folders[name], bits=bits)
    new_target, new_model = load_target(tiny.save(tmp_path, MODELS[name], seed=1), bits=bits)
    tokens = random_ids(20)
    expected = logits_of(new_target, tokens)
    experts = {key: value for key, value in new_model.state_dict().items() if ".experts." in key}
    rest = {key: value for key, value in new_model.state_dict().items() if ".experts." not in key}
    target.update_weights(rest, 1)
    assert not torch.equal(logits_of(target, tokens), expected)
    target.update_weights(experts, 2)
    assert torch.equal(logits_of(target, tokens), expected)
    key, value = next(iter(experts.items()))
    with pytest.raises(OutriderError, match=f"{key} has shape"):
        target.update_weights({key: value[1:]}, 3)


@pytest.mark.fast_cases("8-mixtral", "8-olmoe", "4-qwen3_moe not normalized")
@ROUTED
@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_quantized_target_equals_its_quantized_weights(name, bits, folders):
    """The router is not quantized. The median over texts of one token, as rounding routes some to other experts."""
    unquantized_target, unquantized = load_target(folders[name])
    target, model = load_target(folders[name], bits=bits)
    tokens = random_ids(30)
    logits = torch.cat([feed(target, [[token]])[0].logits[0] for token in tokens])
    expected = model.float()(torch.tensor(tokens)[:, None]).logits[:, 0]
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(errors.median()) < 0.08
    assert target.bytes() < unquantized_target.bytes()
    before, after = unquantized.state_dict(), model.state_dict()
    for key in before:
        if ".experts." in key:
            assert not torch.equal(before[key].float(), after[key])
        elif key.endswith("mlp.gate.weight"):
            assert torch.equal(before[key].float(), after[key])


@torch.inference_mode()
def test_layers_and_quantized_copies_of_a_target(folders):
    target, _ = load_target(folders["qwen3_moe"])
    tokens = random_ids(20)
    whole = target.make_submodel(range(tiny.LAYERS))
    assert torch.equal(logits_of(whole, tokens), logits_of(target, tokens))
    copy = target.make_requantized(8)
    quantized, _ = load_target(folders["qwen3_moe"], bits=8)
    assert torch.equal(logits_of(copy, tokens), logits_of(quantized, tokens))


def test_bytes_that_a_token_reads(folders):
    target, model = load_target(folders["qwen3_moe"], bits=32)
    layers, _ = target.read_bytes()
    experts = sum(value.numel() for key, value in model.state_dict().items() if "layers.0.mlp.experts" in key)
    padded = {64: 64, 48: 64, 32: 64}  # inputs are padded to multiples of 64
    stored = 16 * 4 * (2 * 48 * padded[32] + 32 * padded[48])
    assert stored >= 4 * experts
    without_mlp = layers[1] - 4 * (2 * 112 * padded[32] + 32 * 128)  # layer 1 has one MLP
    assert layers[0] == without_mlp + stored * 3 // 16 + 4 * 32 * padded[32]  # three experts, and a panel of the router


@pytest.mark.parametrize("bits", [32, 16])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(96, 40, True), (48, 80, False), (64, 64, False)])
def test_pack_and_unpack_experts(outputs, inputs, gated, bits):
    weight = torch.randn(3, outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    unpacked = pack_experts(weight, gated=gated, bits=bits, arena=Arena()).unpack()
    assert torch.equal(unpacked.bfloat16(), weight)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            tiny.make_config("OlmoeConfig", hidden_size=64, num_experts=4, num_experts_per_tok=2, clip_qkv=8.0),
            "clip_qkv",
        ),
        (tiny.make_config("OlmoeConfig", hidden_size=64, num_experts=4), "is 8, but a layer has 4 experts"),
        (
            tiny.make_config(
                "Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
            ),
            "multiples of 16",
        ),
        (tiny.make_config("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2), "the native kernels support"),
    ],
)
def test_unsupported_experts_run_on_torch(config, reason, tmp_path):
    checkpoint = load_checkpoint(tiny.save(tmp_path, config), dtype="float32", device="cpu")
    with pytest.raises(UnsupportedModel, match=reason):
        make_target(checkpoint, slots=1, context=32, kernels="native")
    assert make_target(checkpoint, slots=1, context=32).kernels == "torch"


@torch.inference_mode()
def test_sequences_without_draft_tokens(folders):
    """One token, so that most experts have no rows."""
    target, model = load_target(folders["qwen3_moe"], bits=32)
    logits = feed(target, [[7]], draft=tree.empty(1, torch.device("cpu")))[0].logits[0]
    assert relative_error(logits, model(torch.tensor([[7]])).logits[0]) < 1e-4
