"""Proposers and numbers of guesses against plain decoding, each prompt in turns under all of them.

    python benchmarks/race.py --target DIR --prompts FILE "draft:DIR@0,4,8,12,auto"
    python benchmarks/race.py --target DIR --prompts FILE --fresh ngram@auto "merge(suffix:100000,recycle)@auto"
    python benchmarks/race.py --target DIR --prompts FILE --batch 8 --limit 24 --temperature 1 "draft:DIR@auto"

An entry is a proposer and the k it is run with; plain decoding is always there. `hopeless` guesses at random. Sampled
texts end in different places, so give a batch several times as many prompts (--limit) as rows; with --verifier coupled
all entries write the same texts, at some cost in acceptance. With --fresh each round begins with proposers and
planners that know nothing, so what is remembered from finished outputs is of other prompts; without it they go on
learning, as in a server. Prints a table and, as its last line, a JSON document.
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
from outrider.bench.contest import SwitchPlanner
from outrider.build import auto_planner
from outrider.cache.base import Caching
from outrider.llm import LLM
from outrider.machine import hardware, versions
from outrider.params import SamplingParams
from outrider.propose.base import Setup
from outrider.types import Batch, Draft, Needs, Request, Round

PLAIN = "plain"


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


@dataclass(slots=True)
class Score:
    """One entry in one category."""

    rates: list[float] = field(default_factory=list)  # tokens a second, round by round
    emitted: int = 0
    passes: int = 0
    drafted: int = 0


class Runner:
    """A model with one proposer, run with any k."""

    def __init__(self, target: str, proposer: str, *, rows: int, params: SamplingParams, verifier: str | None) -> None:
        self._planner, self._params = SwitchPlanner(), params
        maker = Hopeless if proposer == "hopeless" else proposer
        settings = {"rows": rows, "context": 2048, "verifier": verifier, "caching": Caching(share=False)}
        self._llm = LLM(target, proposer=maker, planner=self._planner, **settings)
        self._planner.auto = auto_planner(self._llm.house.target, self._llm.house.proposer)

    def run(self, k: str, prompts: list[str], seed: int) -> tuple[float, Score]:
        """Seconds and counts of some prompts, as many at once as there are rows: where one ends the next begins."""
        self._planner.k = k if k == "auto" else int(k)
        wants = [replace(self._params, seed=seed + i) for i in range(len(prompts))]
        before, began = self._llm.stats, perf_counter()
        self._llm.generate(prompts, wants)
        seconds, after = perf_counter() - began, self._llm.stats
        counts = (getattr(after, name) - getattr(before, name) for name in ("emitted", "passes", "drafted"))
        return seconds, Score([], *counts)


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
) -> None:
    """Race them, and print what came out."""
    asked = [(entry.rpartition("@")[0], k) for entry in entries for k in entry.rpartition("@")[2].split(",")]
    names = [PLAIN, *(f"{proposer}@{k}" for proposer, k in asked)]
    pairs = [("none", "0"), *asked]
    lines = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
    lines.sort(key=lambda line: str(line["category"]))
    texts = {
        category: list(islice(cycle([line["prompt"] for line in some]), limit))
        for category, some in groupby(lines, key=lambda line: str(line["category"]))
    }
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=128)
    scores = {(name, category): Score() for name in names for category in texts}
    runners: dict[str, Runner] = {}
    for turn in range(rounds):
        if fresh or not turn:
            kept = {} if not runners else {"none": runners["none"]}
            made = {p for p, _ in pairs} - kept.keys()
            runners = kept | {p: Runner(target, p, rows=batch, params=params, verifier=verifier) for p in sorted(made)}
        for runner in runners.values():
            runner.run("0", ["def warm_up(x):"], 0)
        _round(texts, pairs, names, runners, scores, turn, batch)
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
        "hardware": hardware("cpu"),
        "versions": versions(),
        "scores": [{"entry": name, "category": c, **_figures(names, scores, name, c)} for name, c in scores],
    }
    print(json.dumps(report, default=str))


def _round(
    texts: dict[str, list[str]],
    pairs: list[tuple[str, str]],
    names: list[str],
    runners: dict[str, Runner],
    scores: dict[tuple[str, str], Score],
    turn: int,
    batch: int,
) -> None:
    chance = random.Random(turn)
    # A batch is refilled as rows end, as in a server: else those who end first would leave the last one alone.
    size = 1 if batch == 1 else max(map(len, texts.values()))
    jobs = [(category, i) for category, some in texts.items() for i in range(0, len(some), size)]
    chance.shuffle(jobs)
    seconds = dict.fromkeys(scores, 0.0)
    tokens = dict.fromkeys(scores, 0)
    for category, i in jobs:
        for who in chance.sample(range(len(names)), len(names)):
            (proposer, k), place = pairs[who], (names[who], category)
            took, counts = runners[proposer].run(k, texts[category][i : i + size], 1000 * turn + i)
            seconds[place] += took
            tokens[place] += counts.emitted
            for name in ("emitted", "passes", "drafted"):
                setattr(scores[place], name, getattr(scores[place], name) + getattr(counts, name))
    for place, score in scores.items():
        score.rates.append(tokens[place] / seconds[place])


def _figures(names: list[str], scores: dict[tuple[str, str], Score], name: str, category: str) -> dict[str, Any]:
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
    width = max(24, *(len(_short(name)) + 2 for name in names))
    print(" " * 20 + "".join(f"{_short(name):>{width}}" for name in names))
    for category in categories:
        cells = [_figures(names, scores, name, category) for name in names]
        text = (f"{c['tokens_per_second']:.0f} {c['speedup']:5.2f}x tau {c['tau']:5.2f}" for c in cells)
        print(f"{category:20}" + "".join(f"{cell:>{width}}" for cell in text))
    for label, some in {"all": categories, "code_edit+extraction": ["code_edit", "extraction"]}.items():
        if not set(some) <= set(categories):
            continue
        rates = {name: _overall(name, some, scores) for name in names}
        ratios = ([a / b for a, b in zip(rates[name], rates[PLAIN], strict=True)] for name in names)
        text = (f"{median(rates[name]):.0f} {median(ratio):5.2f}x" for name, ratio in zip(names, ratios, strict=True))
        print(f"{label:20}" + "".join(f"{cell:>{width}}" for cell in text))


def _short(name: str) -> str:
    """Without the folders before a model's own."""
    return re.sub(r"[^(:,]*/", "", name)


def _overall(name: str, categories: list[str], scores: dict[tuple[str, str], Score]) -> list[float]:
    """As many tokens of each category: the harmonic mean, round by round."""
    return [harmonic_mean(some) for some in zip(*(scores[name, c].rates for c in categories), strict=True)]


if __name__ == "__main__":
    typer.run(main)
