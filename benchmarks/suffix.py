"""Time what the suffix proposer does on the host in a round: lookups and updates, beside long texts.

python benchmarks/suffix.py
python benchmarks/suffix.py --own 100000 --history 100000 --budget 16 --emitted 5 --kernels torch

A round is one row's: finished outputs are looked up, a tree of guesses grows, what became of it is learned, and the
text reads what was emitted. `in all` is that with the proposer around it and the tensors of the draft. Times are what
this thread took of a processor; `clock` is what passed on the wall, on a busy machine others' time as well. The last
line is one JSON document.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from time import perf_counter_ns, thread_time_ns
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from outrider import machine
from outrider.drive import append, make_round, make_row
from outrider.propose.suffix import SuffixProposer
from outrider.propose.suffix_history import History
from outrider.propose.suffix_text import text_maker
from outrider.propose.suffix_tree import Worth
from outrider.testing import ToyTarget, toy_setup
from outrider.types import Batch, Row, Scores

_OUTPUT = 400  # tokens of a finished output
_VOCAB = 32000

Number = Annotated[int, typer.Option(min=1)]


def phrases(chance: random.Random) -> Iterator[int]:
    """Like written text: phrases of a stock, common ones more often, with a token changed now and then."""
    stock = [[chance.randrange(_VOCAB) for _ in range(chance.randint(1, 20))] for _ in range(3000)]
    common = [1 / (rank + 1) for rank in range(len(stock))]
    while True:
        for phrase in chance.choices(stock, common, k=1000):
            yield from (chance.randrange(_VOCAB) if chance.random() < 0.05 else token for token in phrase)


def one_token(chance: random.Random) -> Iterator[int]:
    """The same token for ever."""
    while True:
        yield 7


def period(chance: random.Random) -> Iterator[int]:
    """The same hundred tokens for ever."""
    tokens = [chance.randrange(_VOCAB) for _ in range(100)]
    while True:
        yield from tokens


def two_tokens(chance: random.Random) -> Iterator[int]:
    """Two tokens by chance: every short ending has been everywhere."""
    while True:
        yield chance.randrange(2)


def noise(chance: random.Random) -> Iterator[int]:
    """A thousand tokens by chance: one token's successors are many, and nothing repeats for long."""
    while True:
        yield chance.randrange(1000)


TEXTS: dict[str, Callable[[random.Random], Iterator[int]]] = {
    "phrases": phrases,
    "one token": one_token,
    "period of 100": period,
    "two tokens": two_tokens,
    "noise": noise,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is measured."""

    own: int  # tokens of the row's text
    history: int  # tokens of finished outputs
    budget: int  # guesses
    emitted: int  # tokens a round
    rounds: int
    seed: int
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Microseconds of rounds."""

    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, nanoseconds: list[int]) -> Spread:
        ranked = [each / 1000 for each in sorted(nanoseconds)]
        return cls(median=ranked[len(ranked) // 2], p99=ranked[len(ranked) * 99 // 100], most=ranked[-1])

    def __str__(self) -> str:
        return f"{self.median:.0f} / {self.p99:.0f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What rounds took beside one kind of text."""

    text: str
    round: Spread
    clock: Spread
    in_all: Spread
    guesses: float  # a round
    admit_milliseconds: float  # to read the own text
    output_milliseconds: float  # to remember a finished output, and to forget another
    own_tokens: int
    own_bytes: int
    history_tokens: int
    history_bytes: int


def main(
    *,
    own: Number = 100_000,
    history: Number = 100_000,
    budget: Number = 16,
    emitted: Number = 5,
    rounds: Number = 2000,
    seed: int = 0,
    kernels: Annotated[str, typer.Option(help="auto, or torch for no native ones.")] = "auto",
) -> None:
    """Time the suffix proposer's lookups and updates."""
    torch.set_num_threads(1)
    load = Load(own=own, history=history, budget=budget, emitted=emitted, rounds=rounds, seed=seed, kernels=kernels)
    measured = [_measure(name, load) for name in TEXTS]
    _show(measured)
    document = {
        "benchmark": "suffix",
        "arguments": asdict(load),
        "texts": type(text_maker(kernels)()).__name__,
        "hardware": machine.hardware("cpu"),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "results": [asdict(each) for each in measured],
    }
    print(json.dumps(document))


def _measure(name: str, load: Load) -> Measured:
    source = TEXTS[name](random.Random(load.seed))
    outputs = [list(islice(source, _OUTPUT)) for _ in range(load.history // _OUTPUT + 20)]
    past, history_bytes, output_seconds = _remember(outputs, load)
    text, known, worth = list(islice(source, load.own)), text_maker(load.kernels)(), Worth()
    began = thread_time_ns()
    known.extend(text)
    admit = thread_time_ns() - began
    own_bytes, times, clock, guesses = known.bytes(), [], [], 0
    for _ in range(load.rounds):
        added = list(islice(source, load.emitted))
        start, began = perf_counter_ns(), thread_time_ns()
        grown = known.grow(*past.ways("", text, load.budget), worth.of, load.budget)
        worth.learn(grown, added)
        past.used(grown.outputs(added))
        known.extend(added)
        times.append(thread_time_ns() - began)
        clock.append(perf_counter_ns() - start)
        text += added
        guesses += len(grown.kinds)
    return Measured(
        text=name,
        round=Spread.of(times),
        clock=Spread.of(clock),
        in_all=Spread.of(_in_all(text, source, outputs, load)),
        guesses=guesses / load.rounds,
        admit_milliseconds=admit / 1e6,
        output_milliseconds=output_seconds * 1000,
        own_tokens=load.own,
        own_bytes=own_bytes,
        history_tokens=past.tokens(),
        history_bytes=history_bytes,
    )


def _remember(outputs: list[list[int]], load: Load) -> tuple[History, int, float]:
    """A full history, the memory that Python says it takes, and the seconds of an output."""
    past = History(load.history)
    tracemalloc.start()
    for output in outputs[:-20]:
        past.learn("", [], output)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    began = thread_time_ns()
    for output in outputs[-20:]:
        past.learn("", [], output)
    return past, taken, (thread_time_ns() - began) / 20e9


def _in_all(text: list[int], source: Iterator[int], outputs: list[list[int]], load: Load) -> list[int]:
    """Nanoseconds of rounds with the proposer around them and the tensors of the draft."""
    setup = replace(toy_setup(ToyTarget()), kernels=load.kernels)
    proposer = SuffixProposer(setup, history=load.history)
    for output in outputs:
        row = _admitted(proposer, [0])
        row.text += output
        proposer.propose(_batch(row, 0))
        proposer.release(0)
    row = _admitted(proposer, text)
    proposer.propose(_batch(row, 0))
    times = []
    for _ in range(load.rounds):
        batch, added = _batch(row, load.budget), tuple(islice(source, load.emitted))
        began = thread_time_ns()
        draft = proposer.propose(batch)
        proposed = thread_time_ns()
        round = make_round(batch, draft, Scores(logits=torch.empty(0)), [()], [added])
        committing = thread_time_ns()
        proposer.commit(round)
        times.append(thread_time_ns() - committing + proposed - began)
        append(round)
        row.cached = len(row.text) - 1
    return times


def _admitted(proposer: SuffixProposer, text: list[int]) -> Row:
    row = make_row(list(text), 0)
    proposer.admit(0, row.request)
    return row


def _batch(row: Row, budget: int) -> Batch:
    return Batch(rows=(row,), start=(row.cached,), feed=(tuple(row.text[row.cached :]),), budget=(budget,))


def _show(measured: list[Measured]) -> None:
    table = Table(title="microseconds a round: median / 99th percentile")
    for column in ("text", "round", "clock", "in all", "guesses", "admit ms", "output ms", "own B/token"):
        table.add_column(column, justify="left" if column == "text" else "right")
    table.add_column("history B/token", justify="right")
    for each in measured:
        table.add_row(
            each.text,
            *(str(spread) for spread in (each.round, each.clock, each.in_all)),
            f"{each.guesses:.1f}",
            f"{each.admit_milliseconds:.0f}",
            f"{each.output_milliseconds:.2f}",
            f"{each.own_bytes / each.own_tokens:.0f}",
            f"{each.history_bytes / max(each.history_tokens, 1):.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
