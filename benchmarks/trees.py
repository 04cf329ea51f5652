"""Trees of drawn guesses against chains of as many: guesses kept a pass, and tokens a second.

python benchmarks/trees.py --target DIR --draft DIR --prompts FILE
python benchmarks/trees.py --target DIR --draft DIR --prompts FILE --seconds-for 0

The tree is `tree:DIR` under `traversal`, the chain `draft:DIR` under `block`, both at temperature 1. A chain of fewer
guesses keeps fewer, so the best chain of so many nodes is the longest one. Every prompt is run with every seed by both;
intervals are of a bootstrap over prompts. Tokens a second are taken afterwards, one row at a time and interleaved with
plain decoding, from the first prompts of each category. The last line is one JSON document.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from time import perf_counter
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outrider import machine
from outrider.build import House, build
from outrider.noise import mix_int
from outrider.params import SamplingParams
from outrider.prompts import read_prompts
from outrider.types import Request, Row

_CATEGORIES = ("code_completion", "prose")
_RESAMPLES = 2000
_CHAIN, _TREE, _PLAIN = "chain", "tree", "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt, read."""

    id: str
    category: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What became of one prompt's guesses, over all seeds."""

    accepted: int
    passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Both at one number of nodes."""

    nodes: int
    category: str  # or all
    chain: float  # guesses kept a pass
    tree: float
    gain: float  # tree / chain - 1
    low: float  # of its 95% interval
    high: float


def main(
    *,
    target: Annotated[str, typer.Option(help="Folder of the target.")],
    draft: Annotated[str, typer.Option(help="Folder of the draft.")],
    prompts: Annotated[str, typer.Option(help="JSON lines with category and prompt.")],
    nodes: str = "4,8,16",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of a category.")] = 20,
    seconds_for: Annotated[int, typer.Option(min=0, help="Prompts of a category that are timed.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a completion.")] = 96,
    rows: Annotated[int, typer.Option(min=1, help="Prompts at once where nothing is timed.")] = 8,
    threads: int | None = None,
) -> None:
    """Measure how much more of a tree is kept than of a chain, and whether that pays."""
    machine.use_threads(threads)
    results: list[Result] = []
    speeds: list[dict[str, float]] = []
    for count in map(int, nodes.split(",")):
        houses = {name: _house(name, target, draft, count, rows) for name in (_CHAIN, _TREE, _PLAIN)}
        texts = _texts(houses[_CHAIN], prompts, limit)
        kept = {name: [_kept(houses[name], texts, seed, tokens) for seed in range(seeds)] for name in (_CHAIN, _TREE)}
        results += _results(count, texts, kept[_CHAIN], kept[_TREE])
        timed = [text for name in _CATEGORIES for text in [t for t in texts if t.category == name][:seconds_for]]
        if timed:
            speeds.append({"nodes": count, **_speeds(houses, timed, tokens)})
        _show(results[-len(_CATEGORIES) - 1 :], speeds[-1] if timed else None)
    document = {
        "benchmark": "trees",
        "arguments": {"nodes": nodes, "seeds": seeds, "limit": limit, "tokens": tokens, "rows": rows},
        "models": {"target": target, "draft": draft},
        "kernels": houses[_TREE].target.kernels,
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "results": [asdict(each) for each in results],
        "tokens_per_s": speeds,
    }
    print(json.dumps(document))


def _house(name: str, target: str, draft: str, nodes: int, rows: int) -> House:
    proposer = {_CHAIN: f"draft:{draft}", _TREE: f"tree:{draft}", _PLAIN: "none"}[name]
    return build(
        target,
        proposer=proposer,
        k=nodes,
        verifier=None,
        dtype="auto",
        kernels="auto",
        quantize=None,
        device="cpu",
        rows=rows,
        context=None,
        chunk=512,
        planner=None,
    )


def _texts(house: House, file: str, limit: int) -> list[Text]:
    found = [prompt for prompt in read_prompts(file, limit=limit) if prompt.category in _CATEGORIES]
    return [
        Text(id=prompt.id, category=prompt.category, tokens=tuple(house.tokenizer.encode(prompt.prompt)))
        for prompt in found
    ]


def _run(house: House, texts: Sequence[Text], seed: int, tokens: int) -> list[Row]:
    params = SamplingParams(temperature=1.0, max_tokens=tokens, seed=seed)
    for i, text in enumerate(texts):
        own = mix_int(seed, i + 1)
        house.engine.add(
            Request(id=i, prompt=text.tokens, params=params, seed=own, end_ids=house.end_ids, limit=tokens)
        )
    done: dict[int, Row] = {}
    while house.engine.busy():
        done |= {row.request.id: row for row in house.engine.step() if row.finish}
    return [done[i] for i in range(len(texts))]


def _kept(house: House, texts: Sequence[Text], seed: int, tokens: int) -> list[Kept]:
    """By prompt. Rounds whose budget was cut by the end of the completion count for both alike."""
    rows = _run(house, texts, seed, tokens)
    return [Kept(accepted=sum(kept for _, kept, _ in row.passes), passes=len(row.passes)) for row in rows]


def _results(
    nodes: int, texts: Sequence[Text], chain: Sequence[Sequence[Kept]], tree: Sequence[Sequence[Kept]]
) -> list[Result]:
    out = []
    for category in (*_CATEGORIES, "all"):
        which = [i for i, text in enumerate(texts) if category in (text.category, "all")]
        ours, theirs = _rate(tree, which), _rate(chain, which)
        chance = random.Random(nodes)
        draws = (chance.choices(which, k=len(which)) for _ in range(_RESAMPLES))
        pairs = ((_rate(tree, some), _rate(chain, some)) for some in draws)
        gains = sorted(more / less - 1 if less else inf for more, less in pairs)
        low, high = gains[_RESAMPLES * 25 // 1000], gains[_RESAMPLES * 975 // 1000]
        gain = ours / theirs - 1
        out.append(Result(nodes=nodes, category=category, chain=theirs, tree=ours, gain=gain, low=low, high=high))
    return out


def _rate(kept: Sequence[Sequence[Kept]], which: Sequence[int]) -> float:
    some = [seed[i] for seed in kept for i in which]
    return sum(each.accepted for each in some) / max(sum(each.passes for each in some), 1)


def _speeds(houses: dict[str, House], texts: Sequence[Text], tokens: int) -> dict[str, float]:
    """Tokens a second of each, one row at a time, in turns; who begins changes from prompt to prompt."""
    spent = dict.fromkeys(houses, (0, 0.0))
    for i, text in enumerate(texts):
        for name in list(houses)[:: 1 if i % 2 == 0 else -1]:
            began = perf_counter()
            row = _run(houses[name], [text], 1000 + i, tokens)[0]
            emitted, seconds = spent[name]
            spent[name] = emitted + row.emitted, seconds + perf_counter() - began
    return {name: emitted / seconds for name, (emitted, seconds) in spent.items()}


def _show(results: Sequence[Result], speeds: dict[str, float] | None) -> None:
    table = Table(title=f"{results[0].nodes} nodes: guesses kept a pass")
    for column in ("prompts", "chain", "tree", "gain", "95% interval"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for each in results:
        interval = f"{each.low:+.1%} to {each.high:+.1%}"
        table.add_row(each.category, f"{each.chain:.3f}", f"{each.tree:.3f}", f"{each.gain:+.1%}", interval)
    Console().print(table)
    if speeds:
        names = (_PLAIN, _CHAIN, _TREE)
        Console().print("tokens a second: " + ", ".join(f"{name} {speeds[name]:.1f}" for name in names))


if __name__ == "__main__":
    typer.run(main)
