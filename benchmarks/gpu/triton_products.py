"""Time matrix products of few rows, and compare them with cuBLAS.

A product reads another copy of its weight each time, so that the weight is not in the L2 cache. The calls over all
copies are one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.lab.bench.rates import read_bandwidth
from outrider.models.triton import linear as products
from outrider.models.triton.linear import Norm, Tile, compile_linear, linear
from outrider.models.triton.quantized import QuantizedWeight, from_fp8, quantize

_SECONDS = 40.0  # after them, the remaining products are left out
_COPIED = 200e6  # bytes of the copies of a weight together, at least
_ROWS = (1, 5, 8, 16, 32, 64)
_QUANTIZED_ROWS = (1, 8, 64)
_KINDS = ("bf16", "fp8", "fp8-128", "int8", "int4")
_MAIN = ("8B qkv", "8B down", "1B qkv")  # the shapes whose tiles are compared


class Shape(NamedTuple):
    """A product of a model: its weight [outputs, inputs], and what is fused into it."""

    outputs: int
    inputs: int
    norm: bool = False
    residual: bool = False
    gate: str = ""


_SHAPES = {
    "8B qkv": Shape(6144, 4096, norm=True),
    "8B o": Shape(4096, 4096, residual=True),
    "8B gate up": Shape(28672, 4096, norm=True, gate="silu"),
    "8B down": Shape(4096, 14336, residual=True),
    "8B head": Shape(128256, 4096, norm=True),
    "1B qkv": Shape(3072, 2048, norm=True),
    "1B o": Shape(2048, 2048, residual=True),
    "1B gate up": Shape(16384, 2048, norm=True, gate="silu"),
    "1B down": Shape(2048, 8192, residual=True),
    "1B head": Shape(128256, 2048, norm=True),
}
_TINY = {"tiny qkv": Shape(48, 256, norm=True), "tiny gate up": Shape(64, 256, norm=True, gate="silu")}
_TILES = {
    8: (Tile(16, 8, 4, 4), Tile(16, 8, 4, 6), Tile(32, 8, 4, 4), Tile(32, 8, 4, 5), Tile(64, 8, 4, 4)),
    16: (Tile(16, 16, 4, 6), Tile(32, 16, 4, 4), Tile(32, 16, 4, 5), Tile(64, 16, 4, 3)),
    32: (Tile(16, 32, 4, 4), Tile(32, 32, 4, 4), Tile(64, 32, 4, 3), Tile(64, 16, 4, 3)),
    64: (Tile(16, 64, 4, 3), Tile(32, 64, 4, 3), Tile(32, 32, 4, 4), Tile(64, 32, 4, 3), Tile(64, 64, 4, 3)),
}  # by the rows


def run(device: torch.device) -> dict[str, Any]:
    """Return the microseconds, the share of the bandwidth and the errors of products, by shape, kind and rows."""
    began = perf_counter()
    with ExitStack() as stack:
        if device.type == "cpu":
            from tests.helpers.triton import interpreted

            stack.enter_context(interpreted(products))
        bench = _Bench(device, _TINY if device.type == "cpu" else _SHAPES)
        compiled = bench.compile_all()
        compile_seconds = perf_counter() - began
        bench.measure(began + _SECONDS)
    return {
        "read_bytes_per_s": bench.rate,
        "kernels": compiled,
        "compile_seconds": compile_seconds,
        "products": bench.products,
        "tiles": bench.tiles,
        "left_out": bench.left_out,
    }


class _Inputs(NamedTuple):
    """The rows of a product, and what is fused into it."""

    x: torch.Tensor  # [64, inputs]
    norm: Norm | None
    residual: torch.Tensor | None  # [64, outputs]
    gate: str

    def options(self, rows: slice = slice(64)) -> dict[str, Any]:
        """Return the options of `linear` for some rows."""
        residual = None if self.residual is None else self.residual[rows]
        return {"norm": self.norm, "residual": residual, "gate": self.gate}


class _Bench:
    """The measurements of some shapes on a device."""

    def __init__(self, device: torch.device, shapes: dict[str, Shape]) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self._shapes = shapes
        self.rate = max(read_bandwidth(device).values())
        self.products: dict[str, Any] = {}
        self.tiles: dict[str, Any] = {}
        self.left_out: list[str] = []

    def compile_all(self) -> int:
        """Compile all kernels at the same time. Return their number."""
        if self._device.type == "cpu":
            return 0
        from triton.runtime._async_compile import AsyncCompileMode

        calls = list(self._calls())
        with ThreadPoolExecutor(16) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for x, weight, options in calls:
                compile_linear(x, weight, **options)
        return len(calls)

    def _calls(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | QuantizedWeight, dict[str, Any]]]:
        """Yield the arguments of the products, with small weights: the sizes are no part of a kernel."""
        fused = {shape._replace(outputs=min(shape.outputs, 4096), inputs=256) for shape in self._shapes.values()}
        for shape in sorted(fused):
            for kind in _KINDS:
                weight = self._weight(shape, kind)
                inputs = self._inputs(shape)
                for rows in _ROWS if kind == "bf16" else _QUANTIZED_ROWS:
                    yield inputs.x[:rows], weight, inputs.options(slice(rows))
        plain = Shape(4096, 256)
        weight = self._weight(plain, "bf16")
        x = self._inputs(plain).x
        for rows, tiles in _TILES.items():
            for tile in tiles:
                yield x[:rows], weight, {"tile": tile}

    def measure(self, deadline: float) -> None:
        """Measure the products, those of bfloat16 first, until the time is over."""
        for kinds in (("bf16",), _KINDS[1:]):
            for name, shape in self._shapes.items():
                for kind in kinds:
                    if perf_counter() > deadline:
                        self.left_out.append(f"{name} {kind}")
                        continue
                    self.products.setdefault(name, {})[kind] = self._product(name, shape, kind)

    def _product(self, name: str, shape: Shape, kind: str) -> dict[str, Any]:
        """Return the figures of a shape in one kind, by rows."""
        weight = self._weight(shape, kind)
        inputs = self._inputs(shape)
        size = weight.bytes if isinstance(weight, QuantizedWeight) else weight.nbytes
        copies = [weight, *(_copy(weight) for _ in range(math.ceil(self._copied() / size)))]
        limit = 1e6 * size / self.rate
        figures: dict[str, Any] = {"bytes": size, "copies": len(copies), "limit_us": limit, "rows": {}}
        whole = linear(inputs.x, weight, **inputs.options())
        for rows in _ROWS if kind == "bf16" else _QUANTIZED_ROWS:
            first = slice(rows)
            us = self._time([partial(linear, inputs.x[first], each, **inputs.options(first)) for each in copies])
            figure = {"us": us, "share": limit / us, "equal": _is_equal(whole, rows, inputs, weight)}
            if kind == "bf16":
                figure["cublas_us"] = self._time([partial(functional.linear, inputs.x[first], each) for each in copies])
            figures["rows"][rows] = figure
        figures["relative_error"] = _error(shape, inputs, weight, whole)
        if kind == "bf16" and name in _MAIN:
            self.tiles[name] = {rows: self._compare(inputs.x[:rows], copies, limit) for rows in _TILES}
        return figures

    def _compare(self, x: torch.Tensor, copies: list[Any], limit: float) -> dict[str, Any]:
        """Return the figures of each tile, without norm and residual."""
        figures = {}
        expected = linear(x, copies[0])
        for tile in _TILES[len(x)]:
            label = f"{tile.outputs} outputs x {tile.rows} rows, {tile.stages} stages"
            try:
                equal = torch.equal(linear(x, copies[0], tile=tile), expected)
                us = self._time([partial(linear, x, each, tile=tile) for each in copies])
                figures[label] = {"us": us, "share": limit / us, "equal": equal}
            except Exception as error:  # a tile may need more than the GPU has
                figures[label] = {"error": str(error)[:200]}
        return figures

    def _copied(self) -> float:
        return _COPIED if self._device.type == "cuda" else 1.0

    def _random(self, *size: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(sum(size))
        return torch.randn(size, generator=generator, device=self._device, dtype=self._dtype)

    def _inputs(self, shape: Shape) -> _Inputs:
        """Return 64 rows, and what a shape fuses into the product."""
        norm = Norm(self._random(shape.inputs).abs(), 1e-5) if shape.norm else None
        residual = self._random(64, shape.outputs) if shape.residual else None
        return _Inputs(self._random(64, shape.inputs), norm, residual, shape.gate)

    def _weight(self, shape: Shape, kind: str) -> torch.Tensor | QuantizedWeight:
        dense = self._random(shape.outputs, shape.inputs) / shape.inputs**0.5
        if kind == "bf16":
            return dense
        if kind.startswith("int"):
            return quantize(dense, int(kind[3:]))
        if kind == "fp8":
            scale = dense.abs().amax(1, keepdim=True).float() / 448
            return from_fp8((dense / scale.to(dense.dtype)).to(torch.float8_e4m3fn), scale)
        blocks = self._random(-(-shape.outputs // 128), shape.inputs // 128).abs()
        return from_fp8(dense.to(torch.float8_e4m3fn), blocks)

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
    """Return whether the first rows alone, and the last ones, have the bits that they have among 64."""
    for part in (slice(rows), slice(64 - rows, 64)):
        if not torch.equal(linear(inputs.x[part], weight, **inputs.options(part)), whole[part]):
            return False
    return True


def _error(shape: Shape, inputs: _Inputs, weight: torch.Tensor | QuantizedWeight, whole: torch.Tensor) -> float:
    """Return the relative error of a product of 64 rows, beside float32. Of a large matrix it takes some outputs."""
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
