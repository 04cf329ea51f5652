"""Weights of quantized checkpoints and GGUF files keep their values in the layouts of the Triton kernels."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.errors import UnsupportedModel
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.quantized.weights import QuantizedWeights
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.quantize import QuantizedLinear
from outrider.models.triton import gguf
from outrider.models.triton.quantized import from_weight, quantize, stacked
from tests.helpers import quantized_files as files
from tests.helpers import tiny
from tests.helpers.configs import make_config

pytest.importorskip("tests.helpers.triton")
from outrider.models.triton.target import TritonTarget
from tests.helpers import triton_reference

GPTQ = {"quant_method": "gptq", "bits": 4}
GPTQ8 = {"quant_method": "gptq", "bits": 8}
AWQ = {"quant_method": "awq", "bits": 4}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FP8 = {"quant_method": "fp8"}
STORED = {
    "GPTQ": (GPTQ, partial(files.gptq, group=128)),
    "GPTQ of one group": (GPTQ, partial(files.gptq, group=-1)),
    "symmetric GPTQ": (GPTQ, partial(files.gptq, group=32, symmetric=True)),
    "GPTQ with 8 bits": (GPTQ8, partial(files.gptq, bits=8, group=64)),
    "AWQ": (AWQ, partial(files.awq, group=64)),
    "pack-quantized": (COMPRESSED, partial(files.pack_quantized, group=128)),
    "asymmetric pack-quantized": (COMPRESSED, partial(files.pack_quantized, group=32, symmetric=False)),
    "int-quantized": (COMPRESSED, files.int_quantized),
    "asymmetric int-quantized": (COMPRESSED, partial(files.int_quantized, symmetric=False)),
    "float-quantized": (COMPRESSED, partial(files.fp8, rows=1, columns=0, name=".weight_scale")),
    "FP8 of blocks": (FP8 | {"weight_block_size": [128, 128]}, partial(files.fp8, rows=128, columns=128)),
    "FP8": (FP8, partial(files.fp8, rows=0, columns=0)),
}


def weights_of(folder, settings, stored):
    """Return the weights of a checkpoint with one matrix, as they are read for a GPU."""
    save_file({"w" + end: value.contiguous() for end, value in stored.tensors.items()}, folder / "model.safetensors")
    return QuantizedWeights(folder, settings, torch.bfloat16, blocks=True, fp8=True)


@pytest.mark.parametrize("name", STORED)
def test_checkpoints(name, tmp_path):
    settings, store = STORED[name]
    stored = store(torch.randn(160, 256, generator=torch.Generator().manual_seed(0)))
    weights = weights_of(tmp_path, settings, stored)
    weight = from_weight(weights["w.weight"])
    assert weights.types == (weight.kind,)
    assert torch.equal(weight.dequantize(), stored.value)
    assert weight.values.nbytes == 160 * 256 * (0.5 if weight.kind == "int4" else 1)
    if weight.scale_rows == 1:  # 160 rows are no blocks of 128
        assert torch.equal(stacked([weight, weight]).dequantize(), stored.value.repeat(2, 1))


def test_inputs_in_another_order_are_refused(tmp_path):
    stored = files.gptq(torch.randn(32, 256), group=64, shuffled=True)
    weights = weights_of(tmp_path, GPTQ, stored)
    with pytest.raises(UnsupportedModel, match="act-order"):
        from_weight(weights["w.weight"])


def random_blocks(kind):
    files = pytest.importorskip("tests.helpers.gguf_files")
    return BlockWeight(files.random_blocks(kind, 16, 512), kind, 512)


@pytest.mark.parametrize("kind", gguf.BITS)
def test_gguf_blocks(kind):
    blocks = random_blocks(kind)
    weight = from_weight(blocks)
    torch.testing.assert_close(weight.dequantize(), blocks.dequantize(), rtol=1e-6, atol=1e-5)
    assert weight.nbytes == gguf.device_bytes(kind, (16, 512), torch.bfloat16)


def test_parts_of_a_matrix_may_differ_in_type():
    parts = [from_weight(random_blocks(kind)) for kind in ("Q4_K", "Q4_K", "Q6_K")]
    joined = stacked([*parts, torch.ones(8, 512)])
    assert [part.shape[0] for part in joined.parts] == [32, 16, 8]
    assert torch.equal(joined.dequantize(), torch.cat([*(part.dequantize() for part in parts), torch.ones(8, 512)]))
    assert stacked(parts[:2]).kind == "int4"


def test_gguf_types_without_equal_blocks_are_refused():
    with pytest.raises(UnsupportedModel, match="IQ4_XS do not stay quantized on a GPU; use Q4_0"):
        from_weight(BlockWeight(np.zeros((1, 136), dtype=np.uint8), "IQ4_XS", 256))


@pytest.mark.parametrize("bits", [8, 4])
def test_own_quantization_is_that_of_the_cpu(bits):
    dense = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(quantize(dense, bits).dequantize(), QuantizedLinear(dense, None, bits=bits).values())


@torch.inference_mode()
@pytest.mark.parametrize("name", ["AWQ", "FP8 of blocks"])
def test_models_keep_their_weights_quantized(name, tmp_path, monkeypatch):
    triton_reference.use(monkeypatch)
    settings, store = STORED[name]
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = make_config("LlamaConfig", **sizes, num_hidden_layers=2, max_position_embeddings=256)
    written = files.write_quantized(tmp_path, AutoModelForCausalLM.from_config(config), store, settings)
    checkpoint = load_checkpoint(tmp_path, device="cpu", dtype="float32", kernels="triton")
    target = TritonTarget(checkpoint, slots=1, context=128)
    layer = target._decoder._layers[0]
    assert {layer.qkv.kind, layer.down.kind} == {"int4" if name == "AWQ" else "fp8"}
    prompt = list(range(3, 20))
    row = tiny.admit(target, 0, prompt)
    logits = target.score(tiny.everything([row]), tree.empty(1, torch.device("cpu"))).logits
    expected = written.model(torch.tensor([prompt])).logits[:, -1]
    torch.testing.assert_close(logits.view(1, -1), expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
def test_gguf_models_keep_their_weights_quantized(tied, tmp_path, monkeypatch):
    """A file of Q4_K_M: values, down and the LM head are Q6_K. One of its matrices has a type that is expanded."""
    files = pytest.importorskip("tests.helpers.gguf_files")
    triton_reference.use(monkeypatch)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {"num_hidden_layers": 2, "max_position_embeddings": 256, "tie_word_embeddings": tied}
    model = AutoModelForCausalLM.from_config(make_config("LlamaConfig", **sizes, **settings))
    kinds = {"0.attn_output": "Q4_K", "1.attn_output": "IQ4_XS"}
    kinds |= dict.fromkeys(("attn_v", "ffn_down", "output.weight"), "Q6_K")
    path = files.write_gguf(tmp_path / "model.gguf", model, "Q4_K", kinds=kinds)
    checkpoint = load_checkpoint(path, device="cpu", dtype="float32", kernels="triton")
    target = TritonTarget(checkpoint, slots=1, context=128)
    decoder = target._decoder
    assert [part.kind for part in decoder._layers[0].qkv.parts] == ["int4", "int6"]
    assert (decoder._layers[0].gate_up.kind, decoder._layers[0].down.kind) == ("int4", "int6")
    assert isinstance(decoder._layers[1].out, torch.Tensor)
    assert (decoder._embedding.kind, decoder._head.kind) == ("int4", "int4" if tied else "int6")
    check_target(target, checkpoint)  # raises where the logits of a tree differ
