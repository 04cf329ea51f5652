"""Runs one way to decode over one batch of prompts and records its speed and acceptance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING

from outrider.core.stats import Stats
from outrider.drafting.propose.expression import short
from outrider.lab.common.clock import DecodeSpeed
from outrider.lab.common.jobs import Condition, PromptBatch
from outrider.lab.common.timeline import run_jobs

if TYPE_CHECKING:
    from outrider.llm import LLM

PHASES = ("first", "middle", "last")  # thirds of an output
MIN_BATCHES = 2  # batches of prompts for which a time limit is planned, so that there is an interval
WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to decode, at whichever batch size and temperature."""

    proposer: str  # an expression; "" or "none" is plain decoding
    k: int | str
    draft_quantize: str | None = None  # of its draft, where several are compared; None: that of the settings

    @property
    def choice(self) -> Choice:
        """These fields alone, to compare records that have more."""
        return Choice(proposer=self.proposer, k=self.k, draft_quantize=self.draft_quantize)

    @property
    def label(self) -> str:
        """The proposer with the weights of its draft."""
        return label(self.proposer, self.draft_quantize)

    @property
    def name(self) -> str:
        """The name for people."""
        return "plain decoding" if self.plain else f"{label(short(self.proposer), self.draft_quantize)}, k {self.k}"

    @property
    def plain(self) -> bool:
        return self.proposer in ("", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(Choice):
    """One way to decode, at one batch size and temperature."""

    batch: int  # sequences at once
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a variant over one batch of prompts."""

    variant: Variant
    repeat: int
    batch_number: int  # of the prompts
    tokens: int  # emitted by all sequences
    seconds: float  # from the prompts to the last token
    prefill_seconds: float  # part of `seconds` until every sequence has a token
    speed: DecodeSpeed  # the rest: decoding only
    gaps: tuple[float, ...]  # seconds between the tokens of a sequence, over all sequences
    stats: Stats  # passes of the whole run; rounds and seconds of decoding only
    categories: Mapping[str, Stats]  # passes only
    output_thirds: tuple[Stats, ...]  # passes that began in each third of their output

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Runs of all variants on one batch of prompts, which are comparable with each other."""

    repeat: int
    condition: Condition
    number: int  # of the batch of prompts


def label(proposer: str, draft_quantize: str | None) -> str:
    """Return a proposer with the weights of its draft: draft:DIR in int8."""
    return proposer if draft_quantize is None else f"{proposer} in {draft_quantize}"


def run(llm: LLM, variant: Variant, batch: PromptBatch, repeat: int = 0) -> Trial:
    """Complete the prompts of a batch together, and return the figures of this run."""
    timeline = run_jobs(llm, batch.jobs)
    thirds = [list(map(partial(timeline.passes, seq), split(seq.rounds))) for seq in timeline.seqs]
    categories = {}
    for category in dict.fromkeys(batch.categories):
        seqs = [seq for seq, name in zip(timeline.seqs, batch.categories, strict=True) if name == category]
        categories[category] = reduce(add, (timeline.passes(seq, seq.rounds) for seq in seqs))
    return Trial(
        variant=variant,
        repeat=repeat,
        batch_number=batch.number,
        tokens=timeline.tokens,
        seconds=timeline.seconds,
        prefill_seconds=timeline.prefill_seconds,
        speed=timeline.speed(),
        gaps=timeline.token_gaps(),
        stats=timeline.stats,
        categories=categories,
        output_thirds=tuple(reduce(add, third) for third in zip(*thirds, strict=True)),
    )


def split(passes: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the passes that began in each third of their output.

    A pass is a triple: depth of the draft, accepted draft tokens, emitted tokens.
    """
    starts = list(accumulate((emitted for _, _, emitted in passes), initial=0))
    output_tokens = starts[-1]
    for third in range(len(PHASES)):
        yield [
            each for start, each in zip(starts, passes, strict=False) if len(PHASES) * start // output_tokens == third
        ]
