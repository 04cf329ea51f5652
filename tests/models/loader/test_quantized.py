"""Quantized Hugging Face checkpoints as targets and drafts."""

import json
import logging
import random
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AttentionInterface, AutoModelForCausalLM

from outrider import LLM, OutriderError, SamplingParams
from outrider.core import tree
from outrider.drafting.propose.placement import place_draft_model
from outrider.engine.default_proposer import can_draft_for_itself
from outrider.errors import UnsupportedModel
from outrider.lab.bench.pass_work import flops_per_token
from outrider.models.loader.check import check_target
from outrider.models.loader.load import check_fits, load_checkpoint, read_weights
from outrider.models.native.blocks import can_pack_together, pack_blocks
from outrider.models.torch.attention import NAME
from outrider.models.torch.group_weight import Groups, GroupWeight, Layout
from outrider.train.model.draft_model import load_trainable
from outrider.train.run import Training
from outrider.train.settings import Settings
from tests.helpers import quantized_files as files
from tests.helpers import tiny
from tests.helpers.configured import with_engine

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BLOCKS = {"rows": 128, "columns": 128}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def _compressed(form, kind="int", bits=4, activations=False):
    scheme = {"weights": {"num_bits": bits, "type": kind}, "targets": ["Linear"]}
    if activations:
        scheme["input_activations"] = {"num_bits": 8, "type": kind, "dynamic": True}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}


PACKED = _compressed("pack-quantized")
W8A8 = _compressed("int-quantized", bits=8, activations=True)
FLOAT = _compressed("float-quantized", "float", 8, activations=True)
# Settings, how weights are stored, and the type that the native kernels keep.
CASES = {
    "gptq": (GPTQ, partial(files.gptq, group=128, symmetric=True), "int4"),
    "gptq asymmetric": (GPTQ, partial(files.gptq, group=64), "int4"),
    "gptq desc_act": (GPTQ, partial(files.gptq, group=32, shuffled=True), "int4"),
    "gptq without g_idx": (GPTQ, partial(files.gptq, group=64, g_idx=False), "int4"),
    "gptq int8": (GPTQ | {"bits": 8}, partial(files.gptq, bits=8, group=-1), "int8"),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, partial(files.gptq, version=2, group=32), "int4"),
    "awq": (AWQ, partial(files.awq, group=128), "int4"),
    "awq 32": (AWQ, partial(files.awq, group=32), "int4"),
    "packed": (PACKED, partial(files.pack_quantized, group=128, dtype=torch.bfloat16), "int4"),
    "packed asymmetric": (PACKED, partial(files.pack_quantized, group=32, symmetric=False), "int4"),
    "packed actorder": (PACKED, partial(files.pack_quantized, group=64, shuffled=True), "int4"),
    "packed int8": (PACKED, partial(files.pack_quantized, bits=8, group=-1), "int8"),
    "W8A8": (W8A8, files.int_quantized, "int8"),
    "W8A8 asymmetric": (W8A8, partial(files.int_quantized, symmetric=False), "int8"),
    "float tensor": (FLOAT, partial(files.fp8, rows=0, columns=0, name=".weight_scale"), ""),
    "float channel": (FLOAT, partial(files.fp8, rows=1, columns=0, name=".weight_scale"), ""),
    "float block": (FLOAT, partial(files.fp8, **BLOCKS, name=".weight_scale"), ""),
    "fp8": (FP8, partial(files.fp8, **BLOCKS), ""),
    "fp8 tensor": ({"quant_method": "fp8"}, partial(files.fp8, rows=0, columns=0, name=".weight_scale"), ""),
    "nf4": (NF4, files.nf4, ""),
    "nf4 plain": (NF4, partial(files.nf4, nested=False), ""),
    "bitsandbytes int8": (INT8, files.int8, "int8"),
}
BLOCK_CASES = [name for name, case in CASES.items() if case[2]]
PARAMS = {"max_tokens": 12, "ignore_eos": True}
needs_compiler = pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")


def _model(name="LlamaConfig", **settings):
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = tiny.make_config(name, **sizes | {"num_hidden_layers": 2, "initializer_range": 0.1} | settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape) if weight.dim() == 1 else 0
    return model


class _Shelf:
    """Checkpoints by the names of cases. Each is made once."""

    def __init__(self, root):
        self.root = root
        self.made = {}

    def __getitem__(self, case):
        if case not in self.made:
            settings, store, _ = CASES[case]
            model = _model("Qwen2Config" if "awq" in case else "LlamaConfig", tie_word_embeddings="32" in case)
            self.made[case] = files.write_quantized(self.root / case.replace(" ", "-"), model, store, settings)
        return self.made[case]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return _Shelf(tmp_path_factory.mktemp("quantized"))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_float32_is_the_dequantized_model(shelf, case):
    written = shelf[case]
    checkpoint = load_checkpoint(written.folder, dtype="float32", device="cpu")
    state = checkpoint.model.state_dict()
    expected = written.model.state_dict()
    assert not [name for name in expected if not torch.equal(state[name], expected[name])]
    assert len(written.values) == 14
    assert checkpoint.blocks.bits == 32
    assert any(each.startswith("float32 (from ") for each in checkpoint.blocks.types)


@needs_compiler
@pytest.mark.parametrize("case", BLOCK_CASES)
@torch.inference_mode()
def test_the_kernels_hold_integers_without_loss(shelf, case):
    """Activations of 8 bits leave errors of about a percent. Chain and plain pass agree in all bits."""
    written = shelf[case]
    kind = CASES[case][2]
    checkpoint = load_checkpoint(written.folder, device="cpu")
    assert checkpoint.dtype == torch.bfloat16
    assert any(each.startswith(f"{kind} (from ") for each in checkpoint.blocks.types)
    found = {name: each for name, each in checkpoint.weights.items() if isinstance(each, GroupWeight)}
    assert found.keys() == written.values.keys()
    for name, blocks in found.items():
        value = written.values[name]
        assert torch.equal(blocks.dequantize(), value)
        assert torch.equal(pack_blocks([blocks]).unpack(), value)
        assert torch.equal(blocks.reordered(torch.tensor([3, 1])).dequantize(), value[[3, 1]])
    target = tiny.make_target(checkpoint, slots=2, context=64, kernels="native")
    assert target.kernels == f"native {kind}"
    chance = random.Random(1)
    seq = tiny.admit(target, 0, tiny.text(chance, 12))
    draft = tree.chain(torch.tensor([tiny.text(chance, 3)]), (3,))
    scores = target.score(tiny.everything([seq]), draft).logits[0]
    expected = written.model(torch.tensor([list(seq.token_ids) + draft.tokens[0].tolist()])).logits[0, -4:]
    assert ((scores - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.08
    alone = target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits[0]
    assert torch.equal(alone[0], scores[0])
    with pytest.raises(OutriderError, match="takes no new ones"):
        target.update_weights({}, 1)


@pytest.mark.parametrize("case", ["gptq desc_act", "awq", "fp8", "nf4"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_tokens_do_not_depend_on_drafts(shelf, case, dtype):
    written = shelf[case]
    llm = LLM(written.folder, proposer="ngram", device="cpu", dtype=dtype, max_model_len=64, max_num_seqs=2)
    prompts = [[3, 4, 5, 3, 4], [7, 8, 9]]
    drafted = [each.token_ids for each in llm.generate(prompts, SamplingParams(k=4, **PARAMS))]
    plain = [each.token_ids for each in llm.generate(prompts, SamplingParams(k=0, **PARAMS))]
    assert drafted == plain
    if dtype == "float32":
        assert [list(each) for each in plain] == [tiny.greedy(written.model, prompt, 12) for prompt in prompts]


def test_a_draft_may_be_quantized(shelf):
    folder = shelf["awq"].folder
    llm = LLM(folder, proposer=f"draft:{folder}", k=3, device="cpu", max_model_len=64, max_num_seqs=1)
    completion = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16, ignore_eos=True))[0]
    assert completion.stats.tau > 3  # the draft is the target


@needs_compiler
def test_matrices_with_other_orders_of_inputs_are_expanded():
    orders = []
    for seed in (0, 1):
        index = torch.randperm(64, generator=torch.Generator().manual_seed(seed)) // 32
        groups = files.quantize(torch.randn(8, 64), group=32)
        orders.append(_group_weight(groups._replace(index=index)))
    assert can_pack_together(orders[:1])
    assert not can_pack_together(orders)
    uneven = files.quantize(torch.randn(8, 64), group=32)._replace(index=torch.tensor([0] * 20 + [1] * 44))
    assert not can_pack_together([_group_weight(uneven)])


def _group_weight(made):
    layout = Layout(outputs=len(made.q), inputs=made.q.shape[1], bits=4, group=32, index=made.index)
    groups = Groups(layout=layout, words=files.pack(made.q, 4), scale=made.scale, zero=made.zero.to(torch.int16))
    return GroupWeight(lambda: groups, layout, 0)


@pytest.mark.parametrize(("settings", "message"), [
    ({"quant_method": "hqq"}, "the quantization 'hqq'"),
    ({"bits": 4}, "a quantization_config without quant_method in config.json"),
    (GPTQ | {"bits": 3}, "GPTQ with 3 bits"),
    (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 2}}}, "GPTQ with 2 bits"),
    (GPTQ | {"is_marlin_format": True}, "layout marlin"),
    (GPTQ | {"checkpoint_format": "bitblas"}, "layout bitblas"),
    (AWQ | {"version": "GEMV"}, "layout gemv"),
    (AWQ | {"bits": 3}, "AWQ with 3 bits"),
    (_compressed("marlin-24"), "the format marlin-24"),
    (_compressed("nvfp4-pack-quantized", "float"), "the format nvfp4-pack-quantized"),
    (_compressed("pack-quantized", bits=3), "3-bit int weights"),
    (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity format sparse-24-bitmask"),
    (PACKED | {"transform_config": {"groups": {}}}, "transforms"),
    (FP8 | {"expert_dtype": "fp4"}, "experts in fp4"),
])  # fmt: skip
def test_what_is_not_read_has_a_way_out(shelf, tmp_path, settings, message):
    folder = _with(shelf["gptq"].folder, tmp_path, quantization_config=settings)
    with pytest.raises(UnsupportedModel, match=f"{message}.* is not supported; use a GGUF file or the unquantized"):
        load_checkpoint(folder)


def _with(source, folder, **settings):
    """A copy of a checkpoint with other settings."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_damaged_checkpoints(shelf, tmp_path):
    folder = _with(shelf["gptq asymmetric"].folder, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    short = tensors | {f"{name}.qzeros": tensors[f"{name}.qzeros"][:, :1].contiguous()}
    lacking = {key: value for key, value in tensors.items() if key != f"{name}.scales"}
    dense = {key: value for key, value in tensors.items() if "proj" not in key}
    for changed, message in (
        (short, f"{name}.weight in .* is no GPTQ weight .*; copy the checkpoint again"),
        (lacking, f"lack {name}.scales; copy the checkpoint again"),
        (dense, "says that the weights are quantized .GPTQ., and none of them is"),
    ):
        save_file(changed, folder / "model.safetensors")
        for dtype in ("auto", "float32"):
            with pytest.raises(OutriderError, match=message):
                tiny.make_target(load_checkpoint(folder, dtype=dtype, device="cpu"), slots=1, context=64)
    (folder / "model.safetensors").write_bytes(b"?")
    with pytest.raises(OutriderError, match="damaged or truncated"):
        load_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(OutriderError, match=r"holds no .safetensors"):
        load_checkpoint(folder)


def test_quantized_weights_are_not_split_over_ranks(shelf):
    with pytest.raises(OutriderError, match="quantized and cannot be split over ranks"):
        load_checkpoint(shelf["gptq"].folder, tp=2)


@needs_compiler
def test_expanded_weights_and_activations_are_reported(shelf, caplog):
    caplog.set_level(logging.INFO, "outrider")
    assert load_checkpoint(shelf["float block"].folder, device="cpu").blocks.types == (
        "bfloat16",
        "bfloat16 (from compressed-tensors)",
    )
    assert "14 compressed-tensors weights are dequantized to bfloat16, which takes" in caplog.text
    assert "quantizes activations (8-bit float) as well" in caplog.text


@needs_compiler
def test_a_model_without_kernels_has_dequantized_weights(tmp_path):
    """MLPs with biases run on torch."""
    settings, store, _ = CASES["awq"]
    written = files.write_quantized(tmp_path, _model(mlp_bias=True), store, settings)
    checkpoint = load_checkpoint(written.folder, device="cpu")
    target = tiny.make_target(checkpoint, slots=1, context=64)
    assert target.kernels == "torch"
    assert checkpoint.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "head_dim": 32,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(("name", "settings", "store", "dims"), [
    ("Qwen3MoeConfig", GPTQ, partial(files.gptq, group=32), 2),
    ("GptOssConfig", {"quant_method": "mxfp4"}, files.mxfp4, 3),
])  # fmt: skip
def test_experts_are_dequantized(tmp_path, name, settings, store, dims):
    written = files.write_quantized(tmp_path, _model(name, **_EXPERTS), store, settings, dims=dims)
    state = load_checkpoint(written.folder, dtype="float32", kernels="torch").model.state_dict()
    expected = written.model.state_dict()
    assert not [key for key in expected if not torch.equal(state[key], expected[key])]
    assert read_weights(written.folder, torch.bfloat16).keys() == state.keys()


@needs_compiler
@pytest.mark.parametrize(("name", "case", "kinds"), [
    ("MixtralConfig", "packed int8", ["int8"]),
    ("Qwen3MoeConfig", "awq 32", ["int4"]),
    ("Qwen3MoeConfig", "gptq desc_act", ["bfloat16", "int4"]),  # the experts have their inputs in different orders
    ("OlmoeConfig", "fp8", ["bfloat16"]),
])  # fmt: skip
@torch.inference_mode()
def test_the_kernels_hold_experts_without_loss(tmp_path, name, case, kinds):
    settings, store, _ = CASES[case]
    given = {key: value for key, value in _EXPERTS.items() if (name, key) != ("OlmoeConfig", "head_dim")}
    written = files.write_quantized(tmp_path, _model(name, **given), _with_order(store), settings)
    checkpoint = load_checkpoint(written.folder, device="cpu")
    found = {each.partition(" (")[0] for each in checkpoint.blocks.types if "(from" in each}
    assert sorted(found) == kinds
    expected = written.model.state_dict()
    target = tiny.make_target(checkpoint, slots=2, context=64, kernels="native")
    assert target.kernels == " ".join(["native", *checkpoint.block_types])
    packed = target._decoder.weights.unpacked()
    for key in (key for key in expected if ".experts." in key):
        held = expected[key] if "bfloat16" not in kinds else expected[key].bfloat16().to(packed[key].dtype)
        assert torch.equal(packed[key], held)
    check_target(target, checkpoint)


def _with_order(store):
    """Give each matrix a random order of inputs of its own, where the format has one."""
    if not store.keywords.get("shuffled"):
        return store
    seeds = iter(range(1000))
    return lambda weight: store(weight, seed=next(seeds))


def test_commands_see_the_dequantized_model(shelf, tmp_path):
    written = shelf["awq"]
    written.model.save_pretrained(tmp_path)
    assert flops_per_token(written.folder) == flops_per_token(tmp_path)
    trainable = load_trainable(written.folder, torch.device("cpu")).model
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(trainable.state_dict()[name], written.values[name])
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": "ab" * count}) + "\n" for count in range(1, 9)))
    target = str(written.folder)
    settings = with_engine(Settings, out=str(tmp_path / "out"), data=[str(data)], target=target, train_target=0.3)
    with pytest.raises(OutriderError, match="keeps its quantized ones; use the folder of the unquantized model"):
        Training("mtp", settings)
    ranks = SimpleNamespace(size=2)
    placement = place_draft_model(target, ranks, asked="auto", device=torch.device("cpu"), dtype=torch.bfloat16)
    assert (placement.sharded, placement.reason) == (False, "a quantized checkpoint cannot be split")


@needs_compiler
def test_a_copy_of_4_bits_drafts_for_wider_weights(shelf):
    for case, wider in (("awq", False), ("gptq", False), ("packed", False), ("W8A8", True), ("fp8", True)):
        folder = shelf[case].folder
        assert can_draft_for_itself(folder, device="cpu", kernels="auto", quantize=None) is wider
    llm = LLM(folder.parent / "W8A8", proposer="quantized:int4", device="cpu", max_model_len=64, max_num_seqs=1)
    assert llm.generate([[5, 6, 7]], SamplingParams(**PARAMS))[0].stats.tau > 1


@needs_compiler
def test_memory_is_that_of_the_blocks(shelf, monkeypatch):
    """A command may ask before a model has been loaded, and so before the attention is registered."""
    monkeypatch.delitem(AttentionInterface._global_mapping, NAME, raising=False)
    asked = []
    monkeypatch.setattr("outrider.models.loader.load.check_memory", lambda path, size, device: asked.append(size))
    for dtype in ("auto", "bfloat16", "float32"):
        check_fits(shelf["awq"].folder, dtype=dtype, device="cpu")
    tables = 2 * tiny.VOCAB * 128
    weights = sum(value.numel() for value in shelf["awq"].values.values())
    assert asked[0] == asked[1] < 2 * tables + 5 / 8 * weights
    assert asked[2] > 4 * (tables / 2 + weights)
