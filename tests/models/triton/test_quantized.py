"""Weights of quantized checkpoints and GGUF files keep their values in the layouts of the Triton kernels."""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.errors import UnsupportedModel
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


@pytest.mark.parametrize("kind", gguf.KINDS)
def test_gguf_blocks(kind):
    package = pytest.importorskip("gguf")
    generator = np.random.default_rng(0)
    values, size = package.GGML_QUANT_SIZES[package.GGMLQuantizationType[kind]]
    data = generator.integers(0, 256, (16, 512 // values, size), dtype=np.uint8)
    numbers = 1 if kind in ("Q4_0", "Q5_0", "Q8_0") else 2
    data[..., : 2 * numbers] = generator.random((16, 512 // values, numbers)).astype(np.float16).view(np.uint8)
    rows = data.reshape(16, -1)
    weight = from_weight(BlockWeight(rows, kind, 512))
    assert weight.kind == ("int4" if kind.startswith("Q4") else "int8")
    expected = torch.from_numpy(package.dequantize(rows, package.GGMLQuantizationType[kind]))
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=5e-5 if kind in ("Q4_1", "Q4_K") else 0)


def test_gguf_types_without_equal_blocks_are_refused():
    with pytest.raises(UnsupportedModel, match="Q6_K do not stay quantized on a GPU; use Q4_0"):
        from_weight(BlockWeight(np.zeros((1, 210), dtype=np.uint8), "Q6_K", 256))


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
