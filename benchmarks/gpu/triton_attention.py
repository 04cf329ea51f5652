"""Time attention over a paged cache in Triton beside torch's, and check its numbers and bits.

A CUDA graph runs each pass in several layers. So the cache of the GPU does not hold the entries of the last replay, as
in a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from outrider.models.triton import attention
from outrider.models.triton.attention import Shape, attend, attend_prompt

BLOCK = 64
LIMIT = 32.0  # seconds
BYTES = 256 << 20  # of entries in a graph, where few layers would fit the cache of the GPU
_WORD = (1 << 64) - 1
VARIANTS = {
    "rows32": Shape(rows=32),
    "rows64": Shape(rows=64, stages=2),
    "piece128": Shape(piece=128),
    "piece512": Shape(piece=512),
    "stages4": Shape(stages=4),
    "stages2": Shape(stages=2),
    "programs528": Shape(programs=528),
    "programs2112": Shape(programs=2112),
    "warps8": Shape(warps=8),
    "overlaps": Shape(overlaps=True),
}
PROMPTS = {
    "rows128": Shape(rows=128, warps=8, stages=2),
    "stages3": Shape(rows=128, warps=8, stages=3),
    "keys32": Shape(rows=128, keys=32, warps=8, stages=3),
    "rows64": Shape(rows=64, warps=4, stages=2),
}


class Size(NamedTuple):
    """The heads of a model, and the entries of its longest sequence."""

    heads: int
    key_heads: int
    dim: int
    longest: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pass: `lengths` entries of each row before its `columns` tokens, which are a chain or a random tree."""

    lengths: tuple[int, ...]
    columns: int
    is_tree: bool = False

    @property
    def name(self) -> str:
        """The case as rows x columns @ entries."""
        length = str(self.lengths[0]) if len(set(self.lengths)) == 1 else "mixed"
        return f"{len(self.lengths)}x{self.columns}{' tree' * self.is_tree}@{length}"


def run(device: torch.device) -> dict[str, Any]:
    """Return times in microseconds of a layer, their share of the read bandwidth, errors and equalities by case.

    On a CPU, Triton's interpreter runs tiny sizes, and times are left out.
    """
    with ExitStack() as stack:
        if device.type == "cpu":
            from tests.helpers.triton import interpreted

            stack.enter_context(interpreted(attention))
        return _run(device)


def _run(device: torch.device) -> dict[str, Any]:
    end = time.monotonic() + LIMIT
    is_cuda = device.type == "cuda"
    size = Size(32, 8, 128, 32768) if is_cuda else Size(4, 2, 32, 128)
    found: dict[str, Any] = {"heads": list(size[:3]), "cases": {}, "variants": {}, "prompts": {}}
    bandwidth = _bandwidth(device) if is_cuda else 0.0
    found["read_gb_s"] = round(bandwidth / 1e9)
    if is_cuda:
        _compile(size, device)
    found["compiled_s"] = round(LIMIT - (end - time.monotonic()), 1)
    jobs: list[tuple[str, str, Callable[[], Any]]] = []
    for case in _cases(size):
        jobs.append(("cases", case.name, partial(_measure, size, case, device, bandwidth)))
    for case in _important() if is_cuda else ():
        jobs.append(("variants", case.name, partial(_variants, size, case, device)))
    for columns, length in ((512, 0), (512, size.longest // 4), (2048, 0)):
        jobs.append(("prompts", f"{columns}@{length}", partial(_prompt, size, columns, length, device)))
    for part, name, job in sorted(jobs, key=lambda job: "mixed" in job[1] or "@32768" in job[1]):
        if time.monotonic() > end:
            found[part][name] = "no time is left"
            continue
        try:
            found[part][name] = job()
        except Exception as error:
            found[part][name] = f"{type(error).__name__}: {error}"[:300]
    found["seconds"] = round(LIMIT - (end - time.monotonic()), 1)
    return found


def _cases(size: Size) -> list[Case]:
    grid = [(1, 1), (1, 5), (1, 16), (8, 5), (32, 1), (32, 5)]
    lengths = [length for length in (256, 2048, 8192, 32768) if length <= size.longest] or [size.longest // 2]
    rows_most = 32 if size.longest > 1024 else 2
    cases = []
    for length in lengths:
        cases += [
            Case(lengths=(length,) * min(rows, rows_most), columns=columns, is_tree=columns == 16)
            for rows, columns in grid
        ]
    mixed = [256 + (8192 - 256) * i // 31 for i in range(32)] if size.longest > 1024 else [3, 70]
    return [*cases, Case(lengths=tuple(mixed), columns=5)]


def _important() -> list[Case]:
    return [
        Case(lengths=(8192,), columns=1),
        Case(lengths=(2048,), columns=1),
        Case(lengths=(8192,), columns=16, is_tree=True),
        Case(lengths=(2048,) * 8, columns=5),
        Case(lengths=(2048,) * 32, columns=5),
    ]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of a pass, and its options."""

    tensors: tuple[torch.Tensor, ...]  # query, block table, prefix, bits, position
    entries: torch.Tensor  # [blocks, layers, Hkv, 2, BLOCK, D]
    rows: int
    columns: int
    scale: float

    def attend(self, layer: int, shape: Shape | None = None) -> torch.Tensor:
        """Attend in one layer."""
        query, *others = self.tensors
        return attend(
            query,
            self.entries[:, layer],
            *others,
            scale=self.scale,
            rows=self.rows,
            columns=self.columns,
            shape=shape,
        )

    def part(self, row: int, columns: int) -> Inputs:
        """Return the pass of the first columns of one row alone."""
        query, table, prefix, bits, position = self.tensors
        tokens = slice(row * self.columns, row * self.columns + columns)
        alone = (query[tokens], table[row : row + 1], prefix[row : row + 1], bits[tokens], position[tokens])
        return Inputs(
            tensors=tuple(tensor.contiguous() for tensor in alone),
            entries=self.entries,
            rows=1,
            columns=columns,
            scale=self.scale,
        )


def _inputs(size: Size, case: Case, device: torch.device, layers: int | None = None) -> Inputs:
    """Return a pass whose block tables have room for the longest sequence."""
    torch.manual_seed(0)
    rows, columns = len(case.lengths), case.columns
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    used = [-(-(length + columns) // BLOCK) for length in case.lengths]
    if layers is None:
        layers = max(1, min(32, BYTES // max(1, _bytes(size, case)))) if device.type == "cuda" else 1
    entries = torch.empty(sum(used) + 1, layers, size.key_heads, 2, BLOCK, size.dim, dtype=dtype, device=device)
    entries.normal_()
    order = torch.randperm(sum(used)) + 1
    table = torch.zeros(rows, -(-size.longest // BLOCK) + 8, dtype=torch.int32)
    for row, blocks in enumerate(order.split(used)):
        table[row, : len(blocks)] = blocks
    parents = [max(0, column - 1 - column % 3) if case.is_tree else column - 1 for column in range(columns)]
    words, depths = [1], [0]
    for column in range(1, columns):
        words.append(words[parents[column]] | 1 << column)
        depths.append(depths[parents[column]] + 1)
    prefix = torch.tensor(case.lengths, dtype=torch.int32)
    # Columns past the 64 bits of a word are those of prompts, for which any bit stands for a token.
    bits = torch.tensor([(word & _WORD) - (1 << 64) * (word >> 63 & 1) for word in words])
    position = prefix[:, None] + torch.tensor(depths, dtype=torch.int32)
    query = torch.randn(rows * columns, size.heads, size.dim, dtype=dtype, device=device)
    others = (table, prefix, bits.repeat(rows)[:, None], position.flatten())
    tensors = (query, *(tensor.to(device).contiguous() for tensor in others))
    return Inputs(tensors=tensors, entries=entries, rows=rows, columns=columns, scale=size.dim**-0.5)


def _bytes(size: Size, case: Case) -> int:
    """Return the bytes of keys and values of a layer, of 2 bytes each."""
    entries = sum(case.lengths) + len(case.lengths) * case.columns
    return entries * size.key_heads * size.dim * 4


def _dense(inputs: Inputs, layer: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values [rows, Hkv, S, D], and the mask [rows, 1, C, S], in which True is seen."""
    _, table, prefix, bits, _ = inputs.tensors
    longest = int(prefix.max()) + inputs.columns
    entry = torch.arange(longest, device=table.device)
    held = inputs.entries[table[rows][:, entry // BLOCK].long(), layer, :, :, entry % BLOCK]  # [rows, S, Hkv, 2, D]
    keys, values = held.permute(3, 0, 2, 1, 4).contiguous().unbind(0)
    offset = entry[None] - prefix[rows].long()[:, None]
    words = bits.view(-1, inputs.columns)[rows]
    tail = (words[:, :, None] >> offset[:, None].clamp(0, 63) & 1).bool() & (offset < inputs.columns)[:, None]
    mask = (offset < 0)[:, None] | (tail & (offset >= 0)[:, None])
    return keys, values, mask[:, None]


def _measure(size: Size, case: Case, device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Time a case, and check it in float32 and in other batches."""
    inputs = _inputs(size, case, device)
    out = inputs.attend(0)
    found: dict[str, Any] = {"error": _error(inputs, out), **_bits(inputs, out)}
    if device.type == "cuda":
        layers = inputs.entries.shape[1]
        found["us"] = _time([partial(inputs.attend, layer) for layer in range(layers)])
        found["bandwidth"] = round(_bytes(size, case) / bandwidth * 1e6 / found["us"], 2)
        if _bytes(size, case) * layers < 3 << 30:
            found["torch_us"] = _torch_time(inputs)
    return found


def _error(inputs: Inputs, out: torch.Tensor) -> float:
    """Return the largest difference to attention in float32, of the first and the last row."""
    rows = sorted({0, inputs.rows - 1})
    keys, values, mask = _dense(inputs, 0, rows)
    shape = (inputs.rows, inputs.columns, *out.shape[1:])
    query = inputs.tensors[0].view(shape)[rows].transpose(1, 2).float()
    wanted = functional.scaled_dot_product_attention(
        query, keys.float(), values.float(), mask, scale=inputs.scale, enable_gqa=True
    )
    return float((out.view(shape)[rows].transpose(1, 2).float() - wanted).abs().max())


def _bits(inputs: Inputs, out: torch.Tensor) -> dict[str, bool]:
    """Say whether the last row alone, and its first token alone, have the bits that they have in the batch."""
    row = inputs.rows - 1
    own = out[row * inputs.columns : (row + 1) * inputs.columns]
    return {
        "equal_row": torch.equal(inputs.part(row, inputs.columns).attend(0), own),
        "equal_token": torch.equal(inputs.part(row, 1).attend(0), own[:1]),
    }


def _torch_time(inputs: Inputs) -> float:
    """Return the microseconds of torch's attention over contiguous keys; rows are padded to the longest."""
    layers = range(inputs.entries.shape[1])
    dense = [_dense(inputs, layer, list(range(inputs.rows))) for layer in layers]
    shape = (inputs.rows, inputs.columns, *inputs.tensors[0].shape[1:])
    query = inputs.tensors[0].view(shape).transpose(1, 2)
    needs_mask = not bool(dense[0][2].all())
    calls = [
        partial(
            functional.scaled_dot_product_attention,
            query,
            keys,
            values,
            mask if needs_mask else None,
            scale=inputs.scale,
            enable_gqa=True,
        )
        for keys, values, mask in dense
    ]
    return _time(calls)


def _variants(size: Size, case: Case, device: torch.device) -> dict[str, Any]:
    """Time the divisions of the work, and say which have the bits of the default."""
    inputs = _inputs(size, case, device)
    default = inputs.attend(0)
    found: dict[str, Any] = {}
    for name, shape in {"default": Shape(), **VARIANTS}.items():
        found[name] = {"equal": torch.equal(inputs.attend(0, shape), default)}
        if device.type == "cuda":
            layers = range(inputs.entries.shape[1])
            found[name]["us"] = _time([partial(inputs.attend, layer, shape) for layer in layers])
    return found


def _prompt(size: Size, columns: int, length: int, device: torch.device) -> dict[str, Any]:
    """Time a chunk of a prompt, and check that it does not depend on how the prompt is cut."""
    if device.type == "cpu":
        columns, length = 70, 40
    inputs = _inputs(size, Case(lengths=(length,), columns=columns), device, layers=1)
    query, table, prefix, _, _ = inputs.tensors
    position = length + torch.arange(columns, dtype=torch.int32, device=device)
    real = torch.ones(columns, 1, dtype=torch.int64, device=device)

    def attend_from(first: int, shape: Shape | None = None) -> torch.Tensor:
        return attend_prompt(
            query[first:],
            inputs.entries[:, 0],
            table,
            prefix + first,
            real[first:],
            position[first:],
            scale=inputs.scale,
            rows=1,
            columns=columns - first,
            shape=shape,
        )

    out = attend_from(0)
    keys, values, _ = _dense(inputs, 0, [0])
    mask = torch.arange(length + columns, device=device) <= position[:, None]
    states = (query.transpose(0, 1)[None], keys, values)
    wanted = functional.scaled_dot_product_attention(
        *(state.float() for state in states), mask, scale=inputs.scale, enable_gqa=True
    )
    found = {
        "error": float((out.transpose(0, 1) - wanted[0]).abs().max()),
        "equal_cut": torch.equal(attend_from(columns // 3), out[columns // 3 :]),
    }
    if device.type == "cuda":
        for name, shape in PROMPTS.items():
            found[name] = _time([partial(attend_from, 0, shape)])
        found["torch_us"] = _time(
            [partial(functional.scaled_dot_product_attention, *states, mask, scale=inputs.scale, enable_gqa=True)]
        )
    return found


def _compile(size: Size, device: torch.device) -> None:
    """Compile all variants at once, each in a thread."""
    inputs = _inputs(size, Case(lengths=(100,), columns=1), device, layers=1)
    shapes = [None, *VARIANTS.values()]

    def attend_quietly(shape: Shape | None) -> None:
        with suppress(Exception):  # a variant that fails says so where it is timed
            inputs.attend(0, shape)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attend_quietly, shapes))


def _bandwidth(device: torch.device) -> float:
    """Return the bytes a second of a sum over 2 GiB."""
    numbers = torch.ones(1 << 29, dtype=torch.float32, device=device)
    return numbers.nbytes / _time([numbers.sum]) * 1e6


def _time(calls: list[Callable[[], Any]]) -> float:
    """Return the microseconds of one of the calls in the replay of a CUDA graph of all: the least of some replays."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(min(times[1:]) / len(calls) * 1e3, 1)
