"""Measures the peak rates of this machine: memory reads and matrix products."""

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

_BUFFER = 1 << 29  # bytes: larger than the caches of most machines
_DEVICE_BUFFER = 1 << 32  # bytes: large enough that the wait for a GPU does not count
_REPEATS = 7
_MATRIX = (512, 8192)  # smallest and largest size of the matrices
_MIN_SECONDS = 0.02  # shortest time of a product that is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Medians of several measurements at one time."""

    read: Mapping[str, float]  # bytes/s, by the kind of memory pages
    gemm: float  # FLOP/s of a large matrix product

    def as_dict(self) -> dict[str, Any]:
        return {"read_bytes_per_s": dict(self.read), "gemm_flops_per_s": self.gemm}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return both rates, measured. A processor without instructions for `dtype` multiplies in float32 faster."""
    gemm = max(gemm_rate(device, kind) for kind in {dtype, torch.float32})
    return Rates(read=read_bandwidth(device), gemm=gemm)


def best_rates(measurements: Sequence[Rates]) -> tuple[float, float]:
    """Return the highest bandwidth and the highest arithmetic rate of several measurements.

    They serve as limits, so no measured speed may exceed them.
    """
    bandwidth = max(max(rates.read.values()) for rates in measurements)
    gemm = max(rates.gemm for rates in measurements)
    return bandwidth, gemm


def read_bandwidth(device: torch.device, size: int | None = None) -> dict[str, float]:
    """Return the bytes/s of summing a buffer, by the kind of its memory pages. The kinds are read in turns.

    On Linux a buffer in transparent huge pages can be read up to twice as fast as one in normal pages. Weights are in
    normal pages by default and could be moved, so both kinds are measured.
    """
    buffers = _buffers(device, size or _size(device))
    for buffer in buffers.values():
        buffer.fill_(1)  # first touch by the torch threads that read it later
    seconds: dict[str, list[float]] = {kind: [] for kind in buffers}
    for _ in range(_REPEATS):
        for kind, buffer in buffers.items():
            seconds[kind].append(_timed(buffer.sum))
    return {kind: buffer.nbytes / median(seconds[kind]) for kind, buffer in buffers.items()}


def gemm_rate(device: torch.device, dtype: torch.dtype, sizes: tuple[int, int] = _MATRIX) -> float:
    """Return 2 n^3 over the seconds of the product of two n x n matrices.

    n grows from the smallest to the largest of `sizes` until a product takes long enough.
    """
    size, largest = sizes
    while (seconds := _product_seconds(size, device, dtype, repeats=1)) < _MIN_SECONDS and size < largest:
        size *= 2
    # A product in an emulated precision takes seconds. It is far from any limit, so one measurement suffices.
    repeats = _REPEATS if seconds < 1 else 1
    return 2 * size**3 / _product_seconds(size, device, dtype, repeats=repeats)


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype, *, repeats: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = partial(torch.matmul, left, right)
    _timed(product)  # to warm up
    return median(_timed(product) for _ in range(repeats))


def _timed(function: Callable[[], torch.Tensor]) -> float:
    began = perf_counter()
    function().view(-1)[0].item()  # waits for the device
    return perf_counter() - began


def _size(device: torch.device) -> int:
    if device.type != "cuda":
        return _BUFFER
    free, _ = torch.cuda.mem_get_info(device)
    return min(_DEVICE_BUFFER, free // 4)


def _buffers(device: torch.device, size: int) -> dict[str, torch.Tensor]:
    """Return float32 buffers of `size` bytes, by the kind of their memory pages."""
    if device.type != "cpu":
        return {"device": torch.empty(size // 4, device=device)}
    advice = {"normal_pages": "MADV_NOHUGEPAGE", "huge_pages": "MADV_HUGEPAGE"}
    buffers = {}
    for kind, name in advice.items():
        with suppress(AttributeError, OSError):  # not Linux, or a kernel without huge pages
            # The default of mmap is a shared mapping, which never gets huge pages.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(getattr(mmap, name))
            buffers[kind] = torch.frombuffer(pages, dtype=torch.float32)
    return buffers or {"normal_pages": torch.empty(size // 4)}
