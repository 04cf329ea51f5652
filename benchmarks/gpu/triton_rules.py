"""Time verification and sampling filters on Triton kernels beside torch, and count results that differ.

`run(torch.device("cuda"))` takes at most about 20 seconds. On a CPU it runs tiny sizes in Triton's interpreter.
Each entry has microseconds by implementation, the seconds of the first Triton call (it compiles), and the number of
sequences whose results differ.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from outrider.core.draws import DrawParams
from outrider.core.noise import PositionNoise
from outrider.core.types import Draft, DraftKind, Packed
from outrider.verify.rules import EXACT
from outrider.verify.sampling import SamplingTensors, target_probs

_LIMIT = 18.0  # seconds; no cell starts later


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    vocab: int
    batches: tuple[int, ...]
    filter_batches: tuple[int, ...]
    trees: tuple[int, ...]  # numbers of nodes


_GPU = _Sizes(vocab=128256, batches=(1, 16), filter_batches=(1, 64), trees=(16, 32))
_CPU = _Sizes(vocab=50, batches=(1, 2), filter_batches=(1, 2), trees=(4,))


def run(device: torch.device) -> dict[str, Any]:
    """Return the entries by name, such as `block k=4 B=1`."""
    sizes = _GPU if device.type == "cuda" else _CPU
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    deadline = perf_counter() + _LIMIT
    results: dict[str, Any] = {}
    for name, cell in (*_rule_cells(sizes), *_filter_cells(sizes)):
        results[name] = cell(device) if perf_counter() < deadline else "not run: the time is over"
    return results


def _rule_cells(sizes: _Sizes) -> list[tuple[str, Callable[[torch.device], dict[str, Any]]]]:
    """Return the verifications, the most important ones first."""
    shapes = [("traversal", f"{size} nodes", _tree_parents(size)) for size in sizes.trees]
    shapes += [(rule, "k=4", tuple(range(-1, 3))) for rule in ("block", "walk", "rejection", "coupled")]
    shapes += [("siblings", f"{size} nodes", _tree_parents(size)) for size in sizes.trees]
    return [
        (f"{rule} {label} B={batch}", lambda device, of=(rule, parents, batch): _verify(device, sizes.vocab, *of))
        for rule, label, parents in shapes
        for batch in sizes.batches
    ]


def _filter_cells(sizes: _Sizes) -> list[tuple[str, Callable[[torch.device], dict[str, Any]]]]:
    """Return the filters of 5 nodes per sequence, as for a chain of 4."""
    params = {
        "top-p 0.9": DrawParams(temperature=0.7, top_k=sizes.vocab, top_p=0.9, min_p=0.0),
        "top-k 40": DrawParams(temperature=0.7, top_k=40, top_p=1.0, min_p=0.0),
    }
    return [
        (f"{name} B={batch}", lambda device, of=(params[name], batch): _filter(device, sizes.vocab, *of))
        for name in params
        for batch in sizes.filter_batches
    ]


def _tree_parents(size: int) -> tuple[int, ...]:
    """Return a tree in which each node has up to four children."""
    return tuple((node - 4) // 4 for node in range(size))


def _verify(device: torch.device, vocab: int, rule: str, parents: tuple[int, ...], batch: int) -> dict[str, Any]:
    from outrider.models.triton.rules import on_device

    draft, p = _case(device, vocab, parents, batch)
    ours = on_device(EXACT[rule])
    noise = [
        PositionNoise(torch.arange(batch, device=device) + 1000 * i, draft.count)
        for i in range(4 if device.type == "cuda" else 1)
    ]
    begin = perf_counter()
    ours.verify(draft, p, noise[0])
    _wait(device)
    first = perf_counter() - begin
    differing = 0
    for each in noise:
        actual, expected = ours.verify(draft, p, each), EXACT[rule].verify(draft, p, each)
        same = (actual.path == expected.path).all(1) & (actual.bonus == expected.bonus)
        differing += int((~same | (actual.accepted != expected.accepted)).sum())
    return {
        "triton_us": _microseconds(lambda: ours.verify(draft, p, noise[0]), device),
        "graph_us": _graph_microseconds(lambda: ours.verify(draft, p, noise[0]), device),
        "torch_us": _microseconds(lambda: EXACT[rule].verify(draft, p, noise[0]), device),
        "first_s": round(first, 2),
        "accepted": round(float(expected.accepted.double().mean()), 2),
        "differing": differing,
    }


def _filter(device: torch.device, vocab: int, params: DrawParams, batch: int) -> dict[str, Any]:
    from outrider.models.triton.sampling import target_probs as ours

    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(batch, 5, vocab, device=device, generator=generator) * 3
    sampling = _sampling(params, batch, vocab, device)
    begin = perf_counter()
    actual = ours(logits, sampling, slice(None))
    _wait(device)
    first = perf_counter() - begin
    expected = target_probs(logits, sampling, slice(None))
    return {
        "triton_us": _microseconds(lambda: ours(logits, sampling, slice(None)), device),
        "graph_us": _graph_microseconds(lambda: ours(logits, sampling, slice(None)), device),
        "torch_us": _microseconds(lambda: target_probs(logits, sampling, slice(None)), device),
        "first_s": round(first, 2),
        "kept": int((actual > 0).sum()) // (5 * batch),
        "differing_tokens": int(((actual > 0) != (expected > 0)).sum()),
        "largest_difference": float((actual - expected).abs().max()),
    }


def _case(device: torch.device, vocab: int, parents: tuple[int, ...], batch: int) -> tuple[Draft, Packed]:
    """Return a draft that is sampled from q, and p close to q. Siblings are sampled without replacement."""
    size = len(parents)
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(batch, 1 + size, vocab, device=device, generator=generator) * 3
    p = logits.softmax(-1)
    q = torch.empty(batch, size, vocab, device=device)
    tokens = torch.empty(batch, size, dtype=torch.int64, device=device)
    for above in sorted(set(parents)):
        children = [node for node, parent in enumerate(parents) if parent == above]
        other = torch.randn(batch, vocab, device=device, generator=generator)
        probs = (logits[:, above + 1] + other).softmax(-1)
        chosen = torch.multinomial(probs, len(children), generator=generator)
        for order, node in enumerate(children):
            q[:, node] = probs
            tokens[:, node] = chosen[:, order]
    is_chain = parents == tuple(range(-1, size - 1))
    kind = DraftKind.SAMPLED if is_chain else DraftKind.WITHOUT_REPLACEMENT
    draft = Draft(
        tokens=tokens,
        parent=torch.tensor(parents, device=device).repeat(batch, 1),
        count=torch.full((batch,), size, device=device),
        kind=torch.full((batch, size), int(kind), device=device),
        q=Packed.of(q),
        width=(size,) * batch,
        depth=(_depth(parents),) * batch,
        chain=is_chain,
    )
    return draft, Packed.of(p)


def _depth(parents: tuple[int, ...]) -> int:
    depths = [0]
    for above in parents:
        depths.append(1 + depths[above + 1])
    return max(depths)


def _sampling(params: DrawParams, batch: int, vocab: int, device: torch.device) -> SamplingTensors:
    """Return the tensors of `batch` sequences with the same parameters."""
    from outrider.core.params import SamplingParams
    from outrider.testing.drive import make_seq

    given = SamplingParams(
        temperature=params.temperature, top_k=params.top_k % vocab, top_p=params.top_p, min_p=params.min_p
    )
    return SamplingTensors.of([make_seq([1], slot, given) for slot in range(batch)], vocab, device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the time of a call, launches included: the fastest of some groups."""
    if device.type != "cuda":
        begin = perf_counter()
        call()
        return round((perf_counter() - begin) * 1e6, 1)
    call()
    _wait(device)
    begin = perf_counter()
    call()
    _wait(device)
    times = [perf_counter() - begin]
    for _ in range(3 if times[0] < 0.01 else 0):
        begin = perf_counter()
        for _ in range(4):
            call()
        _wait(device)
        times.append((perf_counter() - begin) / 4)
    return round(min(times) * 1e6, 1)


def _graph_microseconds(call: Callable[[], Any], device: torch.device) -> float | None:
    """Return the time of a call in a CUDA graph: that of its kernels."""
    if device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _microseconds(graph.replay, device)
