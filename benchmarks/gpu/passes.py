"""Cells that time single passes and kernels."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from pair import Setup, cached_batch, draft_of, seconds_of
from torch.profiler import ProfilerActivity, profile

from outrider.lab.bench.rates import read_bandwidth
from outrider.models.torch.attention import Fixed, attend, has_grouped_kernel

_TOKENS = (1, 2, 4, 8, 16, 32, 64)  # tokens of a pass
_PROFILED = 256  # cached tokens
_ROWS = (2, 3, 5, 8, 16, 32, 64)  # rows of a product
_CACHED = {"cuda": (2048, 8192, 32768, 131072), "cpu": (64, 256)}  # entries of the cache, by device
_SHAPES = ((1, 1), (1, 5), (1, 16), (1, 64), (8, 1), (8, 5))  # sequences and queries of each
_HEADS, _KEY_HEADS, _DIM = 32, 8, 128  # of Llama 3 8B


def bandwidth(setup: Setup) -> dict[str, Any]:
    return {"read_bytes_per_s": _read_rate(setup.inputs.device)}


@cache
def _read_rate(device: torch.device) -> float:
    """Return the highest bytes/s of a measurement."""
    return max(read_bandwidth(device).values())


def step(setup: Setup) -> dict[str, Any]:
    """Time passes of the target over one sequence, by cached tokens and by tokens of the pass."""
    return _steps(setup, setup.pair.scale.cached, _TOKENS)


def step_uncompiled(setup: Setup) -> dict[str, Any]:
    """Time a few of these passes, before the layers are compiled."""
    return _steps(setup, setup.pair.scale.cached[:2], _TOKENS[::3])


def _steps(setup: Setup, cached_tokens: Sequence[int], token_counts: Sequence[int]) -> dict[str, Any]:
    """Time passes. A pass reads the weights, and the cached keys and values."""
    device = setup.inputs.device
    target = setup.long_target()
    seconds: dict[int, dict[int, float]] = {}
    token_bytes = 0
    for cached in cached_tokens:
        with cached_batch(target, cached) as batch:
            if setup.compiled:  # what is recorded after this is compiled, too
                target.graphs.warm(rows=1, length=1, columns=(1, 2), compiled=True)
            passes = {count: partial(target.score, batch, draft_of(count - 1, device)) for count in token_counts}
            seconds[cached] = {count: seconds_of(run, device) for count, run in passes.items()}
            token_bytes = target.cache.usage().token_bytes
    rate = _read_rate(device)
    results = {}
    for cached, times in seconds.items():
        limit = (setup.weight_bytes + cached * token_bytes) / rate
        results[str(cached)] = {
            str(count): {"ms": 1e3 * time, "limit_share": limit / time} for count, time in times.items()
        }
    return {"read_bytes_per_s": rate, "compiled": setup.compiled, "ms_by_cached_and_tokens": results}


def attention(setup: Setup) -> dict[str, Any]:
    """Return microseconds of the attention of one layer by cached entries, and its share of the bandwidth limit.

    Few queries read long caches. A soft cap shows the path without a fused kernel. The calls are not recorded as a
    graph, so the smallest figures are the time of launches.
    """
    parts = setup.llm.parts
    rate = _read_rate(parts.device)
    results = {}
    for cached in _CACHED[parts.device.type]:
        for rows, size in _SHAPES:
            for softcap in (None, 50.0):
                seconds = seconds_of(_attention(rows, size, cached, softcap, parts.device, parts.dtype), parts.device)
                read = 2 * rows * _KEY_HEADS * cached * _DIM * parts.dtype.itemsize
                name = f"{cached} cached, {rows} x {size}{', soft cap' if softcap else ''}"
                results[name] = {"us": 1e6 * seconds, "limit_share": read / rate / seconds}
    return results


def _attention(
    rows: int, size: int, cached: int, softcap: float | None, device: torch.device, dtype: torch.dtype
) -> Callable[[], object]:
    """Return a function that runs the attention of a pass of fixed shape, with random keys and values."""
    generator = torch.Generator(device=device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    keys, values = (random(rows, _KEY_HEADS, cached, _DIM) for _ in range(2))
    query = random(1, _HEADS, rows * size, _DIM)
    new_keys, new_values = (random(1, _KEY_HEADS, rows * size, _DIM) for _ in range(2))
    sharing = _HEADS // _KEY_HEADS
    kv = Fixed(
        keys=keys,
        values=values,
        entries=torch.arange(cached - size, cached, device=device).expand(rows, -1),
        mask=torch.zeros(rows, 1, sharing * size, cached, device=device, dtype=dtype),
        grouped=has_grouped_kernel(keys, sharing),
    )
    return lambda: attend(torch.nn.Module(), query, new_keys, new_values, None, kv=kv, softcap=softcap)


def kernels(setup: Setup) -> dict[str, Any]:
    """Return the kernels of a pass over one token, of target and draft, and the time in which none runs."""
    if setup.llm.parts.device.type != "cuda":
        return {"skipped": "there are kernels on a GPU only"}
    results = {}
    for name, model in zip(("target", "draft"), setup.models, strict=True):
        with cached_batch(model, _PROFILED) as batch, torch.inference_mode():
            run = partial(model.score, batch, draft_of(0, model.device))
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                run()
                torch.cuda.synchronize()
        spans = sorted((e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_time > 0)
        busy = sum(end - start for start, end in spans)
        results[name] = {
            "kernels": len(spans),
            "busy_us": busy,
            "idle_us": spans[-1][1] - spans[0][0] - busy if spans else 0.0,
        }
    return results


@torch.inference_mode()
def rows(setup: Setup) -> dict[str, Any]:
    """Return, by number of rows, whether the first row of a product has the bits that it has alone."""
    parts = setup.llm.parts
    generator = torch.Generator(device=parts.device).manual_seed(0)
    hidden = 4096 if parts.device.type == "cuda" else 64
    weight = torch.randn(hidden, hidden, generator=generator, device=parts.device).to(parts.dtype)
    inputs = torch.randn(max(_ROWS), hidden, generator=generator, device=parts.device).to(parts.dtype)
    alone = inputs[:1] @ weight
    return {str(count): bool(torch.equal((inputs[:count] @ weight)[:1], alone)) for count in _ROWS}


def memory(setup: Setup) -> dict[str, Any]:
    """Return the most bytes in use since the models were made, and those of graphs."""
    device = setup.llm.parts.device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    graphs = [model.graphs for model in setup.models if getattr(model, "graphs", None)]
    return {
        "peak_bytes": peak,
        "graph_bytes": [model.graph_bytes() for model in setup.models if hasattr(model, "graph_bytes")],
        "recording_seconds": [getattr(each, "seconds", 0.0) for each in graphs],
    }
