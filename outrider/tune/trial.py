"""One contestant over one batch of prompts, and what became of its guesses on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add
from time import perf_counter

from outrider.bench.contestants import Job
from outrider.core.stats import Stats
from outrider.core.types import FinishReason, SequenceState
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.measure.clock import DecodeSpeed, EmitEvent, decode_pace, opening, timed
from outrider.tune.settings import PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to decode, somewhere."""

    proposer: str  # an expression; "" is plain decoding
    k: int | str
    batch: int  # rows at once
    temperature: float

    @property
    def plain(self) -> bool:
        """Whether nobody guesses."""
        return not self.proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that run together, and the category of each."""

    number: int
    jobs: tuple[Job, ...]
    categories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One heat, run one way."""

    variant: Variant
    repeat: int
    tokens: int  # emitted by all rows, in all
    seconds: float  # from the prompts to the last token
    prefill_seconds: float  # seconds of them until every row had a token
    pace: DecodeSpeed  # the rest: decoding alone
    stats: Stats  # passes of the whole run, rounds and seconds of decoding
    categories: Mapping[str, Stats]  # passes alone
    output_thirds: tuple[Stats, ...]  # passes that began in each third of their output
    exact: bool


def run(llm: LLM, way: Variant, heat: PromptBatch) -> Trial:
    """Complete the prompts of a heat together."""
    engine = llm.engine
    rows: dict[int, SequenceState | None] = {id: None for job in heat.jobs for id in llm.submit(job.prompt, job.params)}
    marks, looks = [EmitEvent(at=perf_counter(), emitted=(0,) * len(rows))], [engine.stats]
    while engine.busy():
        for row in engine.step():
            rows[row.request.id] = row
        marks.append(
            EmitEvent(at=perf_counter(), emitted=tuple(row.num_output_tokens if row else 0 for row in rows.values()))
        )
        looks.append(engine.stats)
    done = [_whole(row) for row in rows.values()]
    first = opening(marks)
    passes = [_stats(row.rounds, row) for row in done]
    thirds = [[_stats(part, row) for part in split(row.rounds)] for row in done]
    return Trial(
        variant=way,
        repeat=heat.number,
        tokens=sum(marks[-1].emitted),
        seconds=marks[-1].at - marks[0].at,
        prefill_seconds=marks[first].at - marks[0].at,
        pace=decode_pace(marks),
        stats=timed(reduce(add, passes), looks[first], looks[-1]),
        categories={
            category: reduce(
                add, (each for each, name in zip(passes, heat.categories, strict=True) if name == category)
            )
            for category in dict.fromkeys(heat.categories)
        },
        output_thirds=tuple(reduce(add, each) for each in zip(*thirds, strict=True)),
        exact=engine.stats.exact,
    )


def split(passes: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """The passes that began in each third of their output; a pass is (deepest guess, accepted, emitted)."""
    ends = list(accumulate((emitted for _, _, emitted in passes), initial=0))
    for third in range(len(PHASES)):
        # A pass that began at token i of n is in the third that i / n is in.
        yield [each for begin, each in zip(ends, passes, strict=False) if len(PHASES) * begin // ends[-1] == third]


def _whole(row: SequenceState | None) -> SequenceState:
    assert row is not None
    if row.finish_reason is FinishReason.ERROR:
        raise OutriderError(f"a prompt could not be completed: {row.error}; try another dtype")
    return row


def _stats(passes: Sequence[tuple[int, int, int]], row: SequenceState) -> Stats:
    """Nodes are known of all passes of a row together alone."""
    whole = len(passes) == len(row.rounds)
    return Stats.of_passes(
        passes, drafted=row.num_draft_tokens if whole else 0, prompt=len(row.request.prompt_token_ids)
    )
