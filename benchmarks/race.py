"""Proposers and numbers of guesses against plain decoding, each prompt under all of them, a few tokens in turn.

    python benchmarks/race.py --target DIR --prompts FILE "draft:DIR@0,4,8,12,auto"
    python benchmarks/race.py --target DIR --prompts FILE --fresh ngram@auto "merge(suffix:100000,recycle)@auto"
    python benchmarks/race.py --target DIR --prompts FILE --batch 8 --limit 24 --temperature 1 "draft:DIR@auto"

An entry is a proposer and the k it is run with; plain decoding is always there. `hopeless` guesses at random. Entries
share the target's weights and nothing else. Sampled texts end in different places, so give a batch several times as
many prompts (--limit) as rows, or have all go on to the same length (--ignore-eos); with --verifier coupled all entries
write the same texts, at some cost in acceptance. `none@0` is plain decoding once more: where it lies beside 1 is how
far chance goes.
With --fresh each round begins with proposers and planners that know nothing, and what is remembered of finished outputs
is of other prompts; without it they go on learning, as in a server. Prints a table and, in its last line, a document.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field, replace
from itertools import cycle, groupby, islice
from pathlib import Path
from statistics import harmonic_mean, median
from time import perf_counter
from typing import Annotated, Any

import typer

from outrider import tree
from outrider.build import Loaded, furnish, load_target
from outrider.llm import LLM
from outrider.machine import hardware, versions
from outrider.params import SamplingParams
from outrider.propose.base import Setup
from outrider.types import Batch, Draft, Needs, Request, Round

PLAIN = "plain"
_SLICE = 16  # tokens of a row between one entry's turn and the next


class Hopeless:
    """Random tokens."""

    needs = Needs()

    def __init__(self, setup: Setup) -> None:
        self._vocab, self._device, self._chance = setup.vocab, setup.device, random.Random(0)

    def admit(self, slot: int, request: Request) -> None:
        pass

    def propose(self, batch: Batch) -> Draft:
        size = max(batch.budget)
        if not size:
            return tree.empty(len(batch.rows), self._device)
        tokens = [[self._chance.randrange(self._vocab) for _ in range(size)] for _ in batch.rows]
        return tree.chain(tree.upload(tokens, self._device), batch.budget)

    def commit(self, round: Round) -> None:
        pass

    def release(self, slot: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Entry:
    """A proposer and its number of guesses."""

    proposer: str
    k: str

    def __str__(self) -> str:
        return f"{self.proposer}@{self.k}"


def read_entries(words: list[str]) -> list[Entry]:
    """Of PROPOSER@K,K,...; the last @ parts them."""
    return [Entry(word.rpartition("@")[0], k) for word in words for k in word.rpartition("@")[2].split(",")]


def read_texts(file: Path) -> dict[str, list[str]]:
    """Prompts by category, of JSON lines."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    lines.sort(key=lambda line: str(line["category"]))
    groups = groupby(lines, key=lambda line: str(line["category"]))
    return {category: [line["prompt"] for line in some] for category, some in groups}


@dataclass(frozen=True, slots=True)
class Turn:
    """A round of the race."""

    number: int
    batch: int
    params: SamplingParams
    seeded: bool


@dataclass(slots=True)
class Score:
    """One entry in one category."""

    rates: list[float] = field(default_factory=list)  # tokens a second, round by round
    emitted: int = 0
    passes: int = 0
    drafted: int = 0


class Runner:
    """One entry: an engine of its own around the target that all share."""

    def __init__(self, loaded: Loaded, entry: Entry, slots: range, verifier: str | None) -> None:
        maker = Hopeless if entry.proposer == "hopeless" else entry.proposer
        k = entry.k if entry.k == "auto" else int(entry.k)
        self._llm = LLM.of(furnish(loaded, maker, k=k, verifier=verifier, chunk=512, planner=None, slots=slots))
        self.seconds, self._began = 0.0, self._llm.stats

    def begin(self, prompts: list[str], params: list[SamplingParams]) -> None:
        """Queue some prompts, and count from here."""
        self.seconds, self._began = 0.0, self._llm.stats
        for prompt, want in zip(prompts, params, strict=True):
            self._llm.submit(prompt, want)

    def advance(self, tokens: int) -> bool:
        """Go on until so many have come out since `begin`; returns whether there is more to do."""
        engine, house = self._llm.engine, self._llm.house
        house.target.export(house.proposer.needs.layers)  # and not those of whoever went before
        start = perf_counter()
        while engine.busy() and self.since("emitted") < tokens:
            engine.step()
        self.seconds += perf_counter() - start
        return engine.busy()

    def since(self, name: str) -> int:
        """What a count has grown by since `begin`."""
        return int(getattr(self._llm.stats, name) - getattr(self._began, name))


def main(
    entries: Annotated[list[str], typer.Argument(help="PROPOSER@K,K,...; the last @ parts them.")],
    target: Annotated[str, typer.Option(help="Folder of the target.")],
    prompts: Annotated[Path, typer.Option(help="JSON lines with category and prompt.")],
    batch: Annotated[int, typer.Option(help="Rows at once.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest tokens that are drawn from.")] = 1.0,
    limit: Annotated[int, typer.Option(help="Prompts of each category; they are repeated where there are fewer.")] = 3,
    rounds: Annotated[int, typer.Option(help="How often all is measured.")] = 5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget between rounds.")] = False,
    verifier: Annotated[str | None, typer.Option(help="Of all entries. Default: what suits each.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="All texts get as long as they may.")] = False,
) -> None:
    """Race them, and print what came out."""
    asked = read_entries(entries)
    ways = [Entry("none", "0"), *asked]
    names = [PLAIN, *map(str, asked)]
    texts = {category: list(islice(cycle(some), limit)) for category, some in read_texts(prompts).items()}
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=128, ignore_eos=ignore_eos)
    scores = {(name, category): Score() for name in names for category in texts}
    settings: dict[str, Any] = {"dtype": "auto", "kernels": "auto", "quantize": None, "device": "cpu"}
    # One copy of the weights for all: where a copy comes to lie in memory is worth some percent.
    loaded = load_target(target, **settings, rows=batch * len(ways), context=2048)
    runners: list[Runner] = []
    for turn in range(rounds):
        if fresh or not turn:
            runners = [Runner(loaded, way, range(batch * i, batch * (i + 1)), verifier) for i, way in enumerate(ways)]
            _together(runners, ["def warm_up(x):"], [params], random.Random(0), _SLICE)
        _round(texts, names, runners, scores, Turn(turn, batch, params, verifier == "coupled"))
    _print(names, list(texts), scores)
    report = {
        "benchmark": "race",
        "target": Path(target).name,
        "batch": batch,
        "temperature": temperature,
        "top_p": top_p,
        "limit": limit,
        "rounds": rounds,
        "fresh": fresh,
        "verifier": verifier,
        "ignore_eos": ignore_eos,
        "hardware": hardware("cpu"),
        "versions": versions(),
        "scores": [{"entry": name, "category": c, **_figures(scores, name, c)} for name, c in scores],
    }
    print(json.dumps(report, default=str))


def _round(
    texts: dict[str, list[str]],
    names: list[str],
    runners: list[Runner],
    scores: dict[tuple[str, str], Score],
    turn: Turn,
) -> None:
    chance = random.Random(turn.number)
    # A batch is refilled as rows end, as in a server: else those who end first would leave the last one alone.
    size = 1 if turn.batch == 1 else max(map(len, texts.values()))
    jobs = [(category, i) for category, some in texts.items() for i in range(0, len(some), size)]
    chance.shuffle(jobs)
    seconds = dict.fromkeys(scores, 0.0)
    tokens = dict.fromkeys(scores, 0)
    for category, i in jobs:
        prompts = texts[category][i : i + size]
        # A seed that is given holds the planner to the same guesses each time, but where they do not make the text.
        seeds = (1000 * turn.number + i + j if turn.seeded else None for j in range(len(prompts)))
        _together(runners, prompts, [replace(turn.params, seed=seed) for seed in seeds], chance, _SLICE * turn.batch)
        for name, runner in zip(names, runners, strict=True):
            seconds[name, category] += runner.seconds
            tokens[name, category] += runner.since("emitted")
            for count in ("emitted", "passes", "drafted"):
                setattr(scores[name, category], count, getattr(scores[name, category], count) + runner.since(count))
    for place, score in scores.items():
        score.rates.append(tokens[place] / seconds[place])


def _together(
    runners: list[Runner], prompts: list[str], params: list[SamplingParams], chance: random.Random, slice: int
) -> None:
    """Complete them under all entries, a few tokens of each in turn: the machine's moods are shared among them."""
    for runner in runners:
        runner.begin(prompts, params)
    running, goal = list(runners), 0
    while running:
        goal += slice
        chance.shuffle(running)
        running = [runner for runner in running if runner.advance(goal)]


def _figures(scores: dict[tuple[str, str], Score], name: str, category: str) -> dict[str, Any]:
    score, plain = scores[name, category], scores[PLAIN, category]
    ratios = [a / b for a, b in zip(score.rates, plain.rates, strict=True)]
    return {
        "tokens_per_second": median(score.rates),
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "tau": score.emitted / max(score.passes, 1),
        "guesses_per_pass": score.drafted / max(score.passes, 1),
        "rates": score.rates,
    }


def _print(names: list[str], categories: list[str], scores: dict[tuple[str, str], Score]) -> None:
    width = max(34, *(len(short(name)) + 2 for name in names))
    print(" " * 20 + "".join(f"{short(name):>{width}}" for name in names))
    for category in categories:
        cells = [_figures(scores, name, category) for name in names]
        text = (
            f"{c['tokens_per_second']:.0f} {_spread(c['speedup'], c['speedup_range'])} tau {c['tau']:5.2f}"
            for c in cells
        )
        print(f"{category:20}" + "".join(f"{cell:>{width}}" for cell in text))
    for label, some in {"all": categories, "code_edit+extraction": ["code_edit", "extraction"]}.items():
        if not set(some) <= set(categories):
            continue
        rates = {name: _overall(name, some, scores) for name in names}
        ratios = ([a / b for a, b in zip(rates[name], rates[PLAIN], strict=True)] for name in names)
        pairs = zip(names, ratios, strict=True)
        text = (f"{median(rates[name]):.0f} {_spread(median(ratio), ratio)}" for name, ratio in pairs)
        print(f"{label:20}" + "".join(f"{cell:>{width}}" for cell in text))


def _spread(middle: float, ratios: list[float]) -> str:
    return f"{middle:5.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


def short(name: str) -> str:
    """Without the folders before a model's own."""
    return re.sub(r"[^(:,]*/", "", name)


def _overall(name: str, categories: list[str], scores: dict[tuple[str, str], Score]) -> list[float]:
    """As many tokens of each category: the harmonic mean, round by round."""
    return [harmonic_mean(some) for some in zip(*(scores[name, c].rates for c in categories), strict=True)]


if __name__ == "__main__":
    typer.run(main)
