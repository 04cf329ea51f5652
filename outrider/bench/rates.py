"""What this machine can do at most, measured on the spot: reading memory, and multiplying matrices."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

_BUFFER = 1 << 29  # bytes: larger than the caches of all but a few machines
_DEVICE_BUFFER = 1 << 32  # bytes: a GPU reads so fast that in less the wait for the answer would count
_REPEATS = 7
_MATRIX = (512, 8192)  # the smallest and the largest that is multiplied
_LONG_ENOUGH = 0.02  # seconds that a product should take


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Medians of several measurements at one moment."""

    read: Mapping[str, float]  # bytes a second, by the pages that the buffer lay in
    gemm: float  # floating-point operations a second of a large matrix product

    def as_dict(self) -> dict[str, Any]:
        return {"read_bytes_per_s": dict(self.read), "gemm_flops_per_s": self.gemm}


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Both rates as they are now."""
    return Rates(read=read_bandwidth(device), gemm=gemm_rate(device, dtype))


def best_rates(moments: Sequence[Rates]) -> tuple[float, float]:
    """The highest bandwidth and the highest rate of products seen: what one took for a limit must not be exceeded."""
    return max(max(rates.read.values()) for rates in moments), max(rates.gemm for rates in moments)


def read_bandwidth(device: torch.device, size: int | None = None) -> dict[str, float]:
    """Bytes a second of summing up a buffer, by the kind of its pages; the kinds are read in turns.

    On Linux a buffer in transparent huge pages can be read up to twice as fast as one in normal pages. Weights lie in
    normal pages unless somebody asks for others, and could be moved; so both are measured.
    """
    buffers = _buffers(device, size or _size(device))
    for buffer in buffers.values():
        buffer.fill_(1)  # by torch's threads, which will read it
    seconds: dict[str, list[float]] = {kind: [] for kind in buffers}
    for _ in range(_REPEATS):
        for kind, buffer in buffers.items():
            seconds[kind].append(_timed(buffer.sum))
    return {kind: buffer.nbytes / median(seconds[kind]) for kind, buffer in buffers.items()}


def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """2 n^3 over the seconds of multiplying two n x n matrices, n being large enough to take a while."""
    size, largest = _MATRIX
    while (seconds := _product(size, device, dtype, repeats=1)) < _LONG_ENOUGH and size < largest:
        size *= 2
    repeats = _REPEATS if seconds < 1 else 1  # an emulated precision takes seconds, and its rate is beside the point
    return 2 * size**3 / _product(size, device, dtype, repeats=repeats)


def _product(size: int, device: torch.device, dtype: torch.dtype, *, repeats: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    work = partial(torch.matmul, left, right)
    _timed(work)  # to warm up
    return median(_timed(work) for _ in range(repeats))


def _timed(work: Callable[[], torch.Tensor]) -> float:
    began = perf_counter()
    work().view(-1)[0].item()  # waits for the device
    return perf_counter() - began


def _size(device: torch.device) -> int:
    if device.type != "cuda":
        return _BUFFER
    free, _ = torch.cuda.mem_get_info(device)
    return min(_DEVICE_BUFFER, free // 4)


def _buffers(device: torch.device, size: int) -> dict[str, torch.Tensor]:
    """float32 buffers of `size` bytes, by the kind of their pages."""
    if device.type != "cpu":
        return {"device": torch.empty(size // 4, device=device)}
    advice = {"normal_pages": "MADV_NOHUGEPAGE", "huge_pages": "MADV_HUGEPAGE"}
    buffers = {}
    for kind, name in advice.items():
        with suppress(AttributeError, OSError):  # another system, or a kernel built without them
            # Private: a shared mapping, mmap's default, gets no huge pages whatever is advised.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            pages.madvise(getattr(mmap, name))
            buffers[kind] = torch.frombuffer(pages, dtype=torch.float32)
    return buffers or {"normal_pages": torch.empty(size // 4)}
