"""Writes small models of transformers as quantized checkpoints, as the published formats say."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.helpers.tiny import save_model

Tensors = dict[str, torch.Tensor]
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class Stored(NamedTuple):
    """A weight as a checkpoint stores it."""

    tensors: Tensors  # by the ends of their names
    value: torch.Tensor  # float32, as the format defines it


class Integers(NamedTuple):
    """A matrix of integers. The weight is (q - zero) * scale."""

    q: torch.Tensor  # [O, I] from 0 on
    scale: torch.Tensor  # [O, G]
    zero: torch.Tensor  # [O, G]
    index: torch.Tensor  # [I] the group of each input

    def value(self) -> torch.Tensor:
        shifted = self.q.float() - self.zero.float()[:, self.index]
        return shifted * self.scale.float()[:, self.index]


def quantize(
    weight: torch.Tensor,
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = False,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
    least_zero: int = 0,
    seed: int | None = None,
) -> Integers:
    """Round a weight to integers. `shuffled` puts random inputs into a group, as GPTQ with desc_act does, by a seed."""
    inputs = weight.shape[1]
    group = inputs if group == -1 else group
    index = torch.arange(inputs) // group
    if shuffled:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed or inputs))]
    most = (1 << bits) - 1
    scales, zeros = [], []
    for g in range(int(index.max()) + 1):
        columns = weight[:, index == g]
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        scale = 2 * columns.abs().amax(1) / most if symmetric else (high - low) / most
        scale = scale.to(dtype)
        middle = torch.full_like(low, (most + 1) // 2)
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(least_zero, most + least_zero))
        scales.append(scale)
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1).int()
    q = (weight / scale.float()[:, index] + zero[:, index]).round().clamp(0, most).int()
    return Integers(q, scale, zero, index)


@torch.no_grad()
def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers [..., n] into words [..., n * bits / 32], from the lowest bits on."""
    per_word = 32 // bits
    words = values.numpy().astype(np.uint32)
    words = np.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, -words.shape[-1] % per_word)])
    words = words.reshape(*words.shape[:-1], -1, per_word) << (bits * np.arange(per_word, dtype=np.uint32))
    return torch.from_numpy(np.bitwise_or.reduce(words, -1).view(np.int32))


def gptq(weight: torch.Tensor, *, bits: int = 4, version: int = 1, g_idx: bool = True, **options: Any) -> Stored:
    made = quantize(weight, bits=bits, least_zero=int(version == 1), **options)
    zero = made.zero - int(version == 1)
    tensors = {
        ".qweight": pack(made.q, bits).T,
        ".qzeros": pack(zero.T, bits),
        ".scales": made.scale.T,
        **({".g_idx": made.index.int()} if g_idx else {}),
    }
    return Stored(tensors, made.value())


def awq(weight: torch.Tensor, **options: Any) -> Stored:
    made = quantize(weight, **options)
    words = [pack(each.T.unflatten(1, (-1, 8))[..., _AWQ_ORDER], 4)[..., 0] for each in (made.q, made.zero)]
    return Stored({".qweight": words[0], ".qzeros": words[1], ".scales": made.scale.T}, made.value())


def pack_quantized(weight: torch.Tensor, *, bits: int = 4, symmetric: bool = True, **options: Any) -> Stored:
    made = quantize(weight, bits=bits, symmetric=symmetric, **options)
    tensors = {
        ".weight_packed": pack(made.q, bits),
        ".weight_scale": made.scale,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = pack(made.zero.T, bits).T
    if options.get("shuffled"):
        tensors[".weight_g_idx"] = made.index.int()
    return Stored(tensors, made.value())


def int_quantized(weight: torch.Tensor, *, symmetric: bool = True, dtype: torch.dtype = torch.float32) -> Stored:
    made = quantize(weight, bits=8, group=-1, symmetric=symmetric, dtype=dtype)
    tensors = {".weight": (made.q - 128).to(torch.int8), ".weight_scale": made.scale}
    if not symmetric:
        tensors[".weight_zero_point"] = (made.zero - 128).to(torch.int8)
    return Stored(tensors, made.value())


def fp8(weight: torch.Tensor, *, rows: int, columns: int, name: str = ".weight_scale_inv") -> Stored:
    """Blocks of rows and columns; the last ones may be smaller. 0: all of them."""
    outputs, inputs = weight.shape
    rows, columns = rows or outputs, columns or inputs
    scale = torch.empty(-(-outputs // rows), -(-inputs // columns))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    value = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            scale[i, j] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            value[block] = stored[block].float() * scale[i, j]
    return Stored({".weight": stored, name: scale}, value)


def nf4(weight: torch.Tensor, *, block: int = 64, nested: bool = True) -> Stored:
    table = torch.linspace(-1, 1, 16) ** 3
    blocks = weight.reshape(-1, block)
    scale = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float16", "shape": list(weight.shape)}
    tensors = {".weight.quant_map": table, ".weight.absmax": scale}
    if nested:
        offset = float(scale.mean())
        map_ = torch.linspace(-1, 1, 256)
        shifted = torch.nn.functional.pad(scale - offset, (0, -len(scale) % 16)).view(-1, 16)
        most = shifted.abs().amax(1)
        codes = ((shifted / most[:, None])[..., None] - map_).abs().argmin(-1)
        scale = (map_[codes] * most[:, None]).flatten()[: len(scale)] + offset
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        tensors[".weight.absmax"] = codes.flatten()[: len(scale)].to(torch.uint8)
        tensors |= {".weight.nested_absmax": most, ".weight.nested_quant_map": map_}
    codes = ((blocks / scale[:, None])[..., None] - table).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    tensors[".weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return Stored(tensors, (table[codes] * scale[:, None]).view(weight.shape))


def int8(weight: torch.Tensor) -> Stored:
    most = weight.abs().amax(1)
    q = (weight * 127 / most[:, None]).round().to(torch.int8)
    tensors = {".weight": q, ".SCB": most, ".weight_format": torch.zeros((), dtype=torch.uint8)}
    return Stored(tensors, q.float() * (most / 127)[:, None])


def mxfp4(experts: torch.Tensor) -> Stored:
    """Experts [E, I, O] of gpt-oss."""
    blocks = experts.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil().int()
    scale = torch.ldexp(torch.ones(exponent.shape), exponent)[..., None]
    codes = ((blocks / scale)[..., None] - torch.tensor(_FP4)).abs().argmin(-1)
    packed = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    value = (torch.tensor(_FP4)[codes] * scale).flatten(2).transpose(1, 2)
    return Stored({"_blocks": packed, "_scales": (exponent + 127).to(torch.uint8)}, value)


class Written(NamedTuple):
    """A quantized checkpoint."""

    folder: Path
    values: Tensors  # the dequantized weights, by their names in the checkpoint
    model: Any  # of transformers, with the dequantized weights in float32


def write_quantized(
    folder: Path,
    model: Any,
    store: Callable[[torch.Tensor], Stored],
    settings: Mapping[str, Any],
    *,
    ignore: tuple[str, ...] = ("lm_head", "embed", ".gate.", "router"),
    dims: int = 2,
    dtype: torch.dtype = torch.float16,
) -> Written:
    """Write a model as a quantized checkpoint.

    Args:
        folder: of the checkpoint.
        model: a model of transformers.
        store: stores a weight.
        settings: the quantization_config.
        ignore: parts of the names of weights that are not quantized.
        dims: dimensions of weights that are quantized.
        dtype: of the other weights.
    """
    save_model(folder, model.to(dtype))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    values: Tensors = {}
    for name in [name for name, value in tensors.items() if value.dim() == dims and not any(x in name for x in ignore)]:
        stored = store(tensors.pop(name).float())
        prefix = name.removesuffix(".weight")
        tensors |= {prefix + end: tensor.contiguous() for end, tensor in stored.tensors.items()}
        values[name] = stored.value.contiguous()
    dense = {name: value for name, value in tensors.items() if value.dtype == dtype and value.dim()}
    save_file({**dense, **values}, file, {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(settings)}))
    return Written(folder, values, reference)
