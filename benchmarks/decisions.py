"""What a planner's decisions are worth, whatever the machine is busy with.

    python benchmarks/decisions.py --target DIR --prompts FILE draft:DIR@2,4,8,auto hopeless@auto

Real engines make real guesses, but not by the machine's clock: a pass takes what such passes have been measured to
take, give or take a few percent. All texts are drawn by noise of their own (`coupled`), so that all entries write the
same ones. What tells two entries apart is then what they guessed and nothing else: 0.98 is 0.98, which a race
(`race.py`) tells from 1.00 only after hours. It leaves out what the host does beyond its usual share of a round; so
this says which decisions are good, and a race how fast they are.

With --fresh each text is the first one of an engine, as in `outrider run`; else an entry goes on learning, as in a
server. Costs are measured, or read from --costs FILE where that exists and written there where not. Prints a table
and, in its last line, a document.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import harmonic_mean
from typing import Annotated, Any

import typer
from race import PLAIN, Entry, Hopeless, read_entries, read_texts, short

import outrider.engine
from outrider.build import House, Loaded, auto_planner, furnish, load_target
from outrider.cache.base import Caching
from outrider.llm import LLM
from outrider.machine import hardware, versions
from outrider.params import SamplingParams
from outrider.passcost import CostModel, PassCost
from outrider.plan import CostPlanner, FixedPlanner, Planner
from outrider.proposers import draft_models
from outrider.target import Target
from outrider.types import Batch, Draft, Grown, Scores

_STRAYS = 0.03  # how far passes stray from what they usually take: the standard deviation of its logarithm
_GUESSING = 1e-4  # seconds that guesses cost the host in a round


class Clock:
    """Seconds that passes should have taken."""

    def __init__(self) -> None:
        self.now, self._chance = 0.0, random.Random(0)

    def __call__(self) -> float:
        return self.now

    def let_pass(self, seconds: float) -> None:
        """Go on by so much, more or less."""
        self.now += seconds * self._chance.lognormvariate(0.0, _STRAYS)


@dataclass(slots=True)
class Sum:
    """One entry in one category."""

    seconds: float = 0.0
    emitted: int = 0
    passes: int = 0
    drafted: int = 0
    texts: list[float] = field(default_factory=list)  # seconds a token of each, where it has the engine to itself


def time_target(target: Target, costs: CostModel, clock: Clock) -> None:
    """Have its passes, and the host's share of their rounds, take their time by the clock."""
    score = target.score

    def timed(batch: Batch, draft: Draft, **how: Any) -> Scores:
        rows = len(batch.rows)
        feed, cached = sum(map(len, batch.feed)) - rows, sum(batch.start) / rows
        seconds = costs.host + costs.target(rows + sum(draft.width), rows=rows, cached=cached, feed=feed)
        clock.let_pass(seconds + (_GUESSING if any(draft.width) else 0.0))
        return score(batch, draft, **how)

    target.score = timed  # type: ignore[method-assign]


def time_draft(model: Any, cost: PassCost, clock: Clock, cold: float) -> None:
    """The same of a draft model's passes, of which a chain that it grows by itself takes one for each guess.

    The first of a round takes `cold` seconds more, since a pass of the target has come between.
    """
    score, cached = model.score, lambda batch: sum(batch.start) / len(batch.rows)

    def read(batch: Batch, guesses: int) -> None:
        rows, feed = len(batch.rows), sum(map(len, batch.feed))
        clock.let_pass(cold + cost(rows + guesses, rows=rows, cached=cached(batch), feed=feed - rows))

    def timed(batch: Batch, draft: Draft, first: int | None = None, **how: Any) -> Scores:
        if first is None:
            read(batch, sum(draft.width))
        else:
            columns = sum(max(width - first, 0) for width in draft.width)
            clock.let_pass(cost(max(columns, 1), rows=len(batch.rows), cached=cached(batch)))
        return score(batch, draft, **({} if first is None else {"first": first}), **how)

    def chained(grow: Callable[..., Grown | None], batch: Batch, *how: Any) -> Grown | None:
        grown = grow(batch, *how)
        if grown is not None:
            looked: Sequence[int] = grown.count if grown.margin is None else [*map(len, grown.margin)]
            read(batch, 0)
            for depth in range(1, max(looked)):
                rows = sum(length > depth for length in looked)
                clock.let_pass(cost(rows, rows=rows, cached=cached(batch)))
        return grown

    model.score = timed
    for name in ("grow", "draw"):
        if hasattr(model, name):
            setattr(model, name, partial(chained, getattr(model, name)))


class Runner:
    """Makes engines around one target, and has them write."""

    def __init__(self, loaded: Loaded, known: dict[str, CostModel]) -> None:
        self._loaded, self._known, self.clock = loaded, known, Clock()
        self._costs("none")
        time_target(loaded.model, known["none"], self.clock)
        outrider.engine.perf_counter = self.clock  # type: ignore[attr-defined]

    def engine(self, entry: Entry) -> LLM:
        """One that has seen nothing yet."""
        costs = self._costs(entry.proposer)
        planner = CostPlanner(costs) if entry.k == "auto" else FixedPlanner(int(entry.k))
        house = self._house(entry.proposer, planner)
        if costs.draft is not None:
            for model in draft_models(house.proposer):
                # Costs are those of one pass after another. In a round its weights come from memory again, as fast as
                # the target's do.
                cold = model.bytes() / house.target.bytes() * costs.target.base(1)
                time_draft(model, costs.draft, self.clock, cold)
        return LLM.of(house)

    def write(self, llm: LLM, prompts: list[str], params: list[SamplingParams], into: Sum) -> None:
        """Complete them, and count what that took."""
        before, began = llm.stats, self.clock.now
        llm.generate(prompts, params)
        after, took = llm.stats, self.clock.now - began
        into.seconds += took
        into.emitted += after.emitted - before.emitted
        into.passes += after.passes - before.passes
        into.drafted += after.drafted - before.drafted
        into.texts += [took / (after.emitted - before.emitted)] * (len(prompts) == 1)

    def _costs(self, proposer: str) -> CostModel:
        if proposer not in self._known:
            house = self._house(proposer, None)
            costs = auto_planner(house.target, house.proposer).arms[0].costs
            first = self._known.get("none", costs)
            self._known[proposer] = CostModel(target=first.target, draft=costs.draft, host=first.host)
        return self._known[proposer]

    def _house(self, proposer: str, planner: Planner | None) -> House:
        maker = Hopeless if proposer == "hopeless" else proposer
        alone = Caching(share=False)  # or whoever comes later would find the prompts read
        return furnish(self._loaded, maker, k=0, verifier="coupled", chunk=512, planner=planner, caching=alone)


def main(
    entries: Annotated[list[str], typer.Argument(help="PROPOSER@K,K,...; the last @ parts them.")],
    target: Annotated[str, typer.Option(help="Folder of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with category and prompt.")],
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    limit: Annotated[int, typer.Option(help="Prompts of each category.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Of a text.")] = 128,
    fresh: Annotated[bool, typer.Option("--fresh", help="A new engine for each text, or each batch of them.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="All texts get as long as they may.")] = False,
    costs: Annotated[Path | None, typer.Option(help="File of what passes cost.")] = None,
) -> None:
    """Compare decisions, and print what came out."""
    asked = read_entries(entries)
    known: dict[str, CostModel] = {}
    if costs is not None and costs.exists():
        known = {name: CostModel.loads(text) for name, text in json.loads(costs.read_text("utf-8")).items()}
    settings: dict[str, Any] = {"dtype": "auto", "kernels": "auto", "quantize": None, "device": "cpu"}
    runner = Runner(load_target(target, **settings, rows=batch, context=2048), known)
    asks = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos)
    texts = {category: some[:limit] for category, some in read_texts(prompts).items()}
    sums: dict[str, dict[str, Sum]] = {}
    for name, entry in {PLAIN: Entry("none", "0"), **{str(entry): entry for entry in asked}}.items():
        sums[name], llm = {}, runner.engine(entry)
        for category, some in texts.items():
            into = sums[name][category] = Sum()
            size = 1 if batch == 1 else len(some)
            for i in range(0, len(some), size):
                params = [replace(asks, seed=i + j) for j in range(size)]
                llm = runner.engine(entry) if fresh else llm
                runner.write(llm, some[i : i + size], params[: len(some) - i], into)
    if costs is not None and not costs.exists():
        costs.write_text(json.dumps({name: each.dumps() for name, each in known.items()}), "utf-8")
    figures = {name: {category: _figures(sums, name, category) for category in texts} for name in sums}
    _print(figures)
    report = {
        "benchmark": "decisions",
        "target": Path(target).name,
        "batch": batch,
        "temperature": temperature,
        "limit": limit,
        "max_tokens": max_tokens,
        "fresh": fresh,
        "ignore_eos": ignore_eos,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "costs": {short(name): json.loads(each.dumps()) for name, each in known.items()},
        "figures": {short(name): each for name, each in figures.items()},
    }
    print(json.dumps(report, default=str))


def _figures(sums: dict[str, dict[str, Sum]], name: str, category: str) -> dict[str, float]:
    one, plain = sums[name][category], sums[PLAIN][category]
    speedup = plain.seconds / plain.emitted / (one.seconds / one.emitted)
    ratios = [before / took for before, took in zip(plain.texts, one.texts, strict=True)]
    return {
        "speedup": speedup,
        "least": min(ratios, default=speedup),
        "tau": one.emitted / one.passes,
        "guesses_per_pass": one.drafted / one.passes,
    }


def _print(figures: dict[str, dict[str, dict[str, float]]]) -> None:
    names = [name for name in figures if name != PLAIN]
    width = max(24, *(len(short(name)) + 2 for name in names))
    print(" " * 20 + "".join(f"{short(name):>{width}}" for name in names))
    for category in figures[PLAIN]:
        cells = (figures[name][category] for name in names)
        text = (f"{c['speedup']:.2f}x ({c['least']:.2f}) tau {c['tau']:5.2f}" for c in cells)
        print(f"{category:20}" + "".join(f"{cell:>{width}}" for cell in text))
    overall = {name: harmonic_mean(c["speedup"] for c in figures[name].values()) for name in names}
    print(f"{'all':20}" + "".join(f"{f'{overall[name]:.2f}x':>{width}}" for name in names))


if __name__ == "__main__":
    typer.run(main)
