"""Write the models of `models.h` to the file in the first argument.

A model is its packed weights, tokens, and the logits that the kernels of this machine compute for them. The weights are
the same on every machine.
"""

import ctypes
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch

from outrider.core.cache import SequenceSpan
from outrider.core.config import EngineConfig
from outrider.engine.build import load_target
from outrider.models.cache.paged import BLOCK, CPool
from outrider.models.loader.embedded import embedded
from outrider.models.native.columns import Columns, PassOutput
from outrider.models.native.library import load_library
from outrider.models.native.pack import PANEL
from outrider.models.native.structures import CLayer, CLinear, CModel

KINDS = ("float32", "bfloat16", "int8", "int4")
_TOKENS = 40
_SUPER_BLOCK = 256
_NUMBER_SIZES = (2, 2, 4, 1)  # bytes, by `Number` of weights.h


class _Recorder:
    """The library of kernels. It keeps the model that was opened last."""

    def __init__(self, code: Any) -> None:
        self._code = code
        self.model = CModel()

    def outrider_open(self, model: Any) -> int:
        self.model = CModel.from_buffer_copy(model._obj)
        return self._code.outrider_open(model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)


def _linear_parts(linear: CLinear) -> dict[int, int]:
    """Return the sizes in bytes of the memory of a linear layer, by address."""
    rows = -(-linear.outputs // PANEL) * PANEL
    groups = rows * linear.inputs // max(linear.group, 1)
    numbers = rows * linear.inputs // _SUPER_BLOCK if linear.sub_scale else groups
    number_bytes = numbers * _NUMBER_SIZES[linear.number]
    sizes = {
        linear.weight: rows * linear.inputs * linear.bits // 8,
        linear.scale: number_bytes,
        linear.minimum: number_bytes,
        linear.sub_scale: groups,
        linear.sub_minimum: groups,
        linear.zero: groups,
        linear.order: 4 * linear.inputs,
        linear.bias: 4 * linear.outputs,
    }
    return {address: size for address, size in sizes.items() if address}


def _model_parts(model: CModel, element: int) -> dict[int, int]:
    """Return the bytes of the memory of a model, by address. `element` is the size of an element of the embedding."""
    parts = {
        model.layer: model.layers * ctypes.sizeof(CLayer),
        model.embedding: model.head.outputs * model.hidden * element,
        model.norm: 4 * model.hidden,
        model.frequency: 4 * model.rotaries * model.rotary_dim // 2,
        model.rotary_scale: 4 * model.rotaries,
        **_linear_parts(model.head),
        **_linear_parts(model.table),
    }
    for layer in (CLayer * model.layers).from_address(model.layer):
        for name in ("qkv", "out", "gate_up", "down", "value", "router"):
            parts |= _linear_parts(getattr(layer, name))
        for name in ("attention_norm", "mlp_norm", "attention_post_norm", "mlp_post_norm"):
            parts[getattr(layer, name)] = 4 * model.hidden
        for name in ("query_norm", "key_norm"):
            parts[getattr(layer, name)] = 4 * model.dim
    return {address: size for address, size in parts.items() if address}


def _logits(code: Any, model: CModel, tokens: list[int], element: int) -> torch.Tensor:
    """Return the logits [T, V] of tokens from a pass over all of them."""
    entries = torch.zeros(model.layers * model.key_heads * 2 * BLOCK * model.dim * element, dtype=torch.uint8)
    table = torch.zeros(1, dtype=torch.int32)
    pool = CPool(entries=entries.data_ptr(), table=table.data_ptr(), layers=model.layers, reach=1, bits=8 * element)
    model.pool = ctypes.addressof(pool)
    count = len(tokens)
    span = SequenceSpan(slot=0, begin=0, end=count, start=0, nodes=0, first=0, base=count, num_outputs=count)
    columns = Columns.consecutive(tokens, [span])
    logits = torch.empty(len(tokens), model.head.outputs)
    best = torch.empty(len(tokens), dtype=torch.int32)
    c_pass = columns.c_pass(PassOutput(logits=logits.data_ptr(), best=best.data_ptr()), None)
    handle = code.outrider_open(ctypes.byref(model))
    code.outrider_run(handle, ctypes.byref(c_pass))
    code.outrider_close(handle)
    return logits


def _write_bytes(file: BinaryIO, values: bytes, count: int) -> None:
    file.write(struct.pack("<i", count) + values)


def _write_model(file: BinaryIO, kind: str) -> None:
    quantized = kind.startswith("int")
    precision = {"dtype": "auto" if quantized else kind, "quantize": kind if quantized else None}
    target = load_target(EngineConfig(target=embedded("nano"), kernels="native", device="cpu", **precision)).model
    code = load_library().code
    recorder = _Recorder(code)
    decoder = target._decoder
    decoder._code = recorder
    decoder._open()
    model = recorder.model
    element = decoder.weights.dtype.itemsize
    parts = _model_parts(model, element)
    tokens = torch.randint(5, model.head.outputs, (_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = _logits(code, model, tokens, element)
    _write_bytes(file, kind.encode(), len(kind))
    file.write(struct.pack("<ii", 8 * element, len(parts)))
    for address, size in parts.items():
        file.write(struct.pack("<Q", address))
        _write_bytes(file, ctypes.string_at(address, size), size)
    _write_bytes(file, bytes(model), ctypes.sizeof(model))
    _write_bytes(file, struct.pack(f"<{_TOKENS}i", *tokens), _TOKENS)
    _write_bytes(file, logits.numpy().tobytes(), logits.numel())


def main(path: Path) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(KINDS)))
        for kind in KINDS:
            _write_model(file, kind)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
