"""Time matrix products of few rows, and compare them with cuBLAS.

A product reads another copy of its weight each time, so that the weight is not in the L2 cache. The calls over all
copies are one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.lab.bench.rates import read_bandwidth
from outrider.models.torch.fp8_weight import Fp8
from outrider.models.triton import linear as products
from outrider.models.triton.linear import Norm, compile_linear, linear
from outrider.models.triton.quantized import QuantizedWeight, from_fp8, quantize

_SECONDS = 40.0  # after them, the remaining products are left out
_COMPILE_SECONDS = 12.0  # that must remain for kernels to be compiled
_COPIED = 200e6  # bytes of the copies of a weight together, at least
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512)
_INTERPRETED_ROWS = (1, 16)
_QUANTIZED_ROWS = (1, 8, 64)
_QUANTIZED = ("fp8", "fp8-128", "int8", "int4", "Q4_K", "Q6_K")
_GGUF = {"Q4_K": (4, 32), "Q6_K": (6, 16)}  # bits of a value, and inputs of a group


class Shape(NamedTuple):
    """A product of a model: its weight [outputs, inputs], and what is fused into it."""

    outputs: int
    inputs: int
    norm: bool = False
    residual: bool = False
    gate: str = ""


# The most important come first, as the time may not suffice for all.
_SHAPES = {
    "8B gate up": Shape(28672, 4096, norm=True, gate="silu"),
    "8B down": Shape(4096, 14336, residual=True),
    "8B qkv": Shape(6144, 4096, norm=True),
    "8B o": Shape(4096, 4096, residual=True),
    "8B head": Shape(128256, 4096, norm=True),
}
_TINY = {"tiny qkv": Shape(48, 256, norm=True), "tiny gate up": Shape(64, 256, norm=True, gate="silu")}


def run(device: torch.device) -> dict[str, Any]:
    """Return the microseconds, the share of the bandwidth and the errors of products, by shape, kind and rows."""
    began = perf_counter()
    with ExitStack() as stack:
        if device.type == "cpu":
            from tests.helpers.triton import interpreted

            stack.enter_context(interpreted(products))
        bench = _Bench(device, _TINY if device.type == "cpu" else _SHAPES)
        bench.run(began + _SECONDS)
    return {
        "read_bytes_per_s": bench.rate,
        "compiled": bench.compiled,
        "products": bench.products,
        "left_out": bench.left_out,
    }


class _Inputs(NamedTuple):
    """The rows of a product, and what is fused into it."""

    x: torch.Tensor  # [512, inputs]
    norm: Norm | None
    residual: torch.Tensor | None  # [512, outputs]
    gate: str

    def options(self, rows: slice = slice(None)) -> dict[str, Any]:
        """Return the options of `linear` for some rows."""
        residual = None if self.residual is None else self.residual[rows]
        return {"norm": self.norm, "residual": residual, "gate": self.gate}

    def first(self, rows: int) -> _Inputs:
        """Return the first rows."""
        residual = None if self.residual is None else self.residual[:rows]
        return self._replace(x=self.x[:rows], residual=residual)


class _Bench:
    """The measurements of some shapes on a device."""

    def __init__(self, device: torch.device, shapes: dict[str, Shape]) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self._shapes = shapes
        self.rate = max(read_bandwidth(device).values())
        self._rows, self._quantized_rows = (
            (_ROWS, _QUANTIZED_ROWS) if device.type == "cuda" else (_INTERPRETED_ROWS, (1,))
        )
        self.products: dict[str, Any] = {}
        self.compiled: list[dict[str, float]] = []
        self.left_out: list[str] = []

    def run(self, deadline: float) -> None:
        """Measure the products, first those of dense weights."""
        for part, kinds in (("chosen", ("bf16",)), ("quantized", _QUANTIZED)):
            if perf_counter() > deadline - _COMPILE_SECONDS:
                self.left_out.append(part)
                continue
            self._compile(list(self._calls(kinds)))
            for name, shape in self._shapes.items():
                for kind in kinds:
                    if perf_counter() > deadline:
                        self.left_out.append(f"{name} {kind} {part}")
                        continue
                    self.products.setdefault(name, {}).setdefault(part, {})[kind] = self._product(shape, kind)

    def _compile(self, calls: list[tuple[torch.Tensor, torch.Tensor | QuantizedWeight, dict[str, Any]]]) -> None:
        """Compile the kernels of some calls at the same time."""
        if self._device.type == "cpu":
            return
        from triton.runtime._async_compile import AsyncCompileMode

        began = perf_counter()
        with ThreadPoolExecutor(16) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for x, weight, options in calls:
                compile_linear(x, weight, **options)
        self.compiled.append({"calls": len(calls), "seconds": perf_counter() - began})

    def _calls(
        self, kinds: Sequence[str]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | QuantizedWeight, dict[str, Any]]]:
        """Yield the arguments of the products, with few inputs: their number is no part of a kernel."""
        for shape in sorted({shape._replace(inputs=256) for shape in self._shapes.values()}):
            inputs = self._inputs(shape)
            for kind in kinds:
                weight = self._weight(shape, kind)
                for rows in self._rows if kind == "bf16" else self._quantized_rows:
                    yield inputs.x[:rows], weight, inputs.options(slice(rows))

    def _product(self, shape: Shape, kind: str) -> dict[str, Any]:
        """Return the figures of a shape in one kind, by rows."""
        weight = self._weight(shape, kind)
        inputs = self._inputs(shape)
        copied = _COPIED if self._device.type == "cuda" else 1.0
        copies = [weight, *(_copy(weight) for _ in range(math.ceil(copied / weight.nbytes)))]
        limit = 1e6 * weight.nbytes / self.rate
        figures: dict[str, Any] = {"bytes": weight.nbytes, "copies": len(copies), "limit_us": limit, "rows": {}}
        all_rows = self._rows if kind == "bf16" else self._quantized_rows
        inputs = inputs.first(max(all_rows))
        whole = linear(inputs.x, weight, **inputs.options())
        for rows in all_rows:
            first = slice(rows)
            us = self._time([partial(linear, inputs.x[first], each, **inputs.options(first)) for each in copies])
            figure = {"us": us, "share": limit / us, "equal": _is_equal(whole, rows, inputs, weight)}
            if kind == "bf16":
                figure["cublas_us"] = self._time([partial(functional.linear, inputs.x[first], each) for each in copies])
            figures["rows"][rows] = figure
        figures["relative_error"] = _error(shape, inputs, weight, whole)
        return figures

    def _random(self, *size: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(sum(size))
        return torch.randn(size, generator=generator, device=self._device, dtype=self._dtype)

    def _inputs(self, shape: Shape) -> _Inputs:
        """Return rows, and what a shape fuses into the product."""
        rows = max(*self._rows, *self._quantized_rows)
        norm = Norm(self._random(shape.inputs).abs(), 1e-5) if shape.norm else None
        residual = self._random(rows, shape.outputs) if shape.residual else None
        return _Inputs(self._random(rows, shape.inputs), norm, residual, shape.gate)

    def _weight(self, shape: Shape, kind: str) -> torch.Tensor | QuantizedWeight:
        dense = self._random(shape.outputs, shape.inputs) / shape.inputs**0.5
        if kind == "bf16":
            return dense
        if kind in _GGUF:
            return self._gguf(shape, *_GGUF[kind])
        if kind.startswith("int"):
            return quantize(dense, int(kind[3:]))
        if kind == "fp8":
            scale = dense.abs().amax(1, keepdim=True).float() / 448
            values = (dense / scale.to(dense.dtype)).to(torch.float8_e4m3fn)
            return from_fp8(Fp8(values=values, scale=scale, block=(1, shape.inputs)))
        blocks = self._random(-(-shape.outputs // 128), shape.inputs // 128).abs()
        return from_fp8(Fp8(values=dense.to(torch.float8_e4m3fn), scale=blocks, block=(128, 128)))

    def _gguf(self, shape: Shape, bits: int, group: int) -> QuantizedWeight:
        """Return random bytes in the form of a type of GGUF. Types of 4 bits have a minimum."""
        outputs, inputs = shape.outputs, shape.inputs
        tables = {"values": (outputs, inputs * bits // 8), "scale": (inputs // group, outputs)}
        if bits == 4:
            tables["zero"] = tables["scale"]
        made = {
            name: torch.randint(0, 64, size, device=self._device, dtype=torch.uint8) for name, size in tables.items()
        }
        factor = self._random(inputs // 256 * (len(tables) - 1), outputs).half() / (256 * inputs**0.5)
        made["scale"] = made["scale"].view(torch.int8)
        return QuantizedWeight(
            kind=f"int{bits}", shape=torch.Size((outputs, inputs)), group=group, factor=factor, **made
        )

    def _time(self, calls: list[Callable[[], object]]) -> float:
        """Return the microseconds of a call, from a CUDA graph of all."""
        if self._device.type == "cpu":
            began = perf_counter()
            calls[0]()
            return 1e6 * (perf_counter() - began)
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        times = []
        for _ in range(7):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return 1e3 * median(times) / len(calls)


def _is_equal(whole: torch.Tensor, rows: int, inputs: _Inputs, weight: torch.Tensor | QuantizedWeight) -> bool:
    """Return whether the first rows alone, and the last ones, have the bits that they have among all."""
    for part in (slice(rows), slice(len(whole) - rows, len(whole))):
        if not torch.equal(linear(inputs.x[part], weight, **inputs.options(part)), whole[part]):
            return False
    return True


def _error(shape: Shape, inputs: _Inputs, weight: torch.Tensor | QuantizedWeight, whole: torch.Tensor) -> float:
    """Return the relative error of a product, beside float32. Of a large matrix it takes some outputs."""
    dense = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
    outputs = shape.outputs if shape.gate else 4096
    x = inputs.x.float()
    if inputs.norm:
        x = functional.rms_norm(x, x.shape[-1:], inputs.norm.weight.float(), inputs.norm.epsilon)
    out = x @ dense[:outputs].float().T
    if shape.gate:
        first, second = out.chunk(2, -1)
        out = functional.silu(first) * second
    if inputs.residual is not None:
        out += inputs.residual[:, :outputs].float()
    return float((whole[:, :outputs].float() - out).norm() / out.norm())


def _copy(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor | QuantizedWeight:
    if isinstance(weight, QuantizedWeight):
        return dataclasses.replace(weight, values=weight.values.clone(), scale=weight.scale.clone())
    return weight.clone()
