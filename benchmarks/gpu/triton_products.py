"""Time matrix products of few rows, and compare them with cuBLAS.

A product reads another copy of its weight each time, so that the weight is not in the L2 cache. The calls over all
copies are one CUDA graph.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
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
from outrider.models.triton.linear import Norm, Tile, compile_linear, linear
from outrider.models.triton.quantized import QuantizedWeight, from_fp8, quantize

_SECONDS = 40.0  # after them, the remaining products are left out
_COPIED = 200e6  # bytes of the copies of a weight together, at least
_MAIN = ("8B qkv", "8B down", "1B qkv")  # the shapes whose tiles are compared

Weight = torch.Tensor | QuantizedWeight
Call = tuple[torch.Tensor, Weight, dict[str, Any]]  # rows, weight and options of `linear`


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


class Stage(NamedTuple):
    """Products that are compiled and measured together."""

    kind: str
    rows: tuple[int, ...]
    overlap: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}, overlapped" if self.overlap else self.kind


_FEW = (1, 8, 64)
_STAGES = (
    Stage("bf16", (1, 5, 8, 16, 32, 64)),
    Stage("bf16", (1, 5, 8, 16, 32, 64), overlap=True),
    Stage("int4", _FEW),
    Stage("fp8", _FEW),
    Stage("int8", _FEW),
    Stage("fp8-128", _FEW),
    Stage("int4", _FEW, overlap=True),
    Stage("fp8", _FEW, overlap=True),
)


def run(device: torch.device) -> dict[str, Any]:
    """Return the microseconds, the share of the bandwidth and the errors of products, by shape, kind and rows."""
    began = perf_counter()
    with ExitStack() as stack:
        if device.type == "cpu":
            from tests.helpers.triton import interpreted

            stack.enter_context(interpreted(products))
        bench = _Bench(device, _TINY if device.type == "cpu" else _SHAPES, began + _SECONDS)
        bench.measure_products(_STAGES[0])
        bench.compare_tiles()
        for stage in _STAGES[1:]:
            bench.measure_products(stage)
    return {
        "read_bytes_per_s": bench.rate,
        "compile_seconds": bench.compile_seconds,
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

    def __init__(self, device: torch.device, shapes: dict[str, Shape], deadline: float) -> None:
        self._device = device
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self._shapes = shapes
        self._deadline = deadline
        self.rate = max(read_bandwidth(device).values())
        self.compile_seconds: dict[str, float] = {}
        self.products: dict[str, Any] = {}
        self.tiles: dict[str, Any] = {}
        self.left_out: list[str] = []

    def measure_products(self, stage: Stage) -> None:
        """Measure the products of a stage, until the time is over."""
        if perf_counter() > self._deadline:
            self.left_out.append(stage.name)
            return
        products.overlap = stage.overlap
        self._compile(stage.name, self._calls(stage))
        for name, shape in self._shapes.items():
            if perf_counter() > self._deadline:
                self.left_out.append(f"{name} {stage.name}")
            else:
                self.products.setdefault(name, {})[stage.name] = self._product(shape, stage)
        products.overlap = False

    def compare_tiles(self) -> None:
        """Measure the tiles of the main shapes in bfloat16, until the time is over."""
        plain = Shape(4096, 256)
        weight = self._weight(plain, "bf16")
        x = self._inputs(plain).x
        calls = [(x[:rows], weight, {"tile": tile}) for rows, tiles in _TILES.items() for tile in tiles]
        self._compile("tiles", calls)
        for name in self._shapes.keys() & set(_MAIN):
            shape = self._shapes[name]
            copies, limit = self._copies(self._weight(shape, "bf16"))
            x = self._inputs(shape).x
            for rows in _TILES:
                if perf_counter() > self._deadline:
                    self.left_out.append(f"{name} tiles of {rows} rows")
                else:
                    self.tiles.setdefault(name, {})[rows] = self._compare(x[:rows], copies, limit)

    def _compile(self, name: str, calls: Iterable[Call]) -> None:
        """Compile kernels at the same time."""
        if self._device.type == "cpu":
            return
        from triton.runtime._async_compile import AsyncCompileMode

        began = perf_counter()
        with ThreadPoolExecutor(16) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for x, weight, options in calls:
                compile_linear(x, weight, **options)
        self.compile_seconds[name] = perf_counter() - began

    def _calls(self, stage: Stage) -> Iterator[Call]:
        """Yield the products of a stage, with small weights: the sizes are no part of a kernel."""
        fused = {shape._replace(outputs=min(shape.outputs, 4096), inputs=256) for shape in self._shapes.values()}
        for shape in sorted(fused):
            weight = self._weight(shape, stage.kind)
            inputs = self._inputs(shape)
            for rows in stage.rows:
                yield inputs.x[:rows], weight, inputs.options(slice(rows))

    def _product(self, shape: Shape, stage: Stage) -> dict[str, Any]:
        """Return the figures of a shape, by rows."""
        weight = self._weight(shape, stage.kind)
        inputs = self._inputs(shape)
        copies, limit = self._copies(weight)
        whole = linear(inputs.x, weight, **inputs.options())
        figures: dict[str, Any] = {"copies": len(copies), "limit_us": limit, "rows": {}}
        for rows in stage.rows:
            first = slice(rows)
            us = self._time([partial(linear, inputs.x[first], each, **inputs.options(first)) for each in copies])
            figure = {"us": us, "share": limit / us, "equal": _is_equal(whole, rows, inputs, weight)}
            if stage == _STAGES[0]:
                figure["cublas_us"] = self._time([partial(functional.linear, inputs.x[first], each) for each in copies])
            figures["rows"][rows] = figure
        figures["relative_error"] = _error(shape, inputs, weight, whole)
        return figures

    def _copies(self, weight: Weight) -> tuple[list[Weight], float]:
        """Return copies of a weight, and the microseconds in which the GPU reads one."""
        size = weight.nbytes
        copied = _COPIED if self._device.type == "cuda" else 1.0
        return [weight, *(_copy(weight) for _ in range(math.ceil(copied / size)))], 1e6 * size / self.rate

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

    def _random(self, *size: int) -> torch.Tensor:
        generator = torch.Generator(device=self._device).manual_seed(sum(size))
        return torch.randn(size, generator=generator, device=self._device, dtype=self._dtype)

    def _inputs(self, shape: Shape) -> _Inputs:
        """Return 64 rows, and what a shape fuses into the product."""
        norm = Norm(self._random(shape.inputs).abs(), 1e-5) if shape.norm else None
        residual = self._random(64, shape.outputs) if shape.residual else None
        return _Inputs(self._random(64, shape.inputs), norm, residual, shape.gate)

    def _weight(self, shape: Shape, kind: str) -> Weight:
        dense = self._random(shape.outputs, shape.inputs) / shape.inputs**0.5
        if kind == "bf16":
            return dense
        if kind.startswith("int"):
            return quantize(dense, int(kind[3:]))
        if kind == "fp8":
            scale = dense.abs().amax(1, keepdim=True).float() / 448
            values = (dense / scale.to(dense.dtype)).to(torch.float8_e4m3fn)
            return from_fp8(Fp8(values=values, scale=scale, block=(1, shape.inputs)))
        blocks = self._random(-(-shape.outputs // 128), shape.inputs // 128).abs()
        return from_fp8(Fp8(values=dense.to(torch.float8_e4m3fn), scale=blocks, block=(128, 128)))

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


def _is_equal(whole: torch.Tensor, rows: int, inputs: _Inputs, weight: Weight) -> bool:
    """Return whether the first rows alone, and the last ones, have the bits that they have among 64."""
    for part in (slice(rows), slice(64 - rows, 64)):
        if not torch.equal(linear(inputs.x[part], weight, **inputs.options(part)), whole[part]):
            return False
    return True


def _error(shape: Shape, inputs: _Inputs, weight: Weight, whole: torch.Tensor) -> float:
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


def _copy(weight: Weight) -> Weight:
    if isinstance(weight, QuantizedWeight):
        return dataclasses.replace(weight, values=weight.values.clone(), scale=weight.scale.clone())
    return weight.clone()
