"""One way to decode, as the answer of a fit shows it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.lab.common.trial import Choice
from outrider.lab.tune.candidate import Candidate
from outrider.lab.tune.figures import Case, Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An option at one temperature."""

    temperature: float
    speedup: float  # over plain decoding, from the prompts to the last token
    low: float | None = None  # of the 95% interval
    high: float | None = None
    tau: float

    @property
    def interval(self) -> str:
        return Estimate(value=self.speedup, low=self.low, high=self.high).text


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Choice):
    """One way to decode, with its best draft length."""

    speedup: float  # the geometric mean over the temperatures
    by_temperature: tuple[Speed, ...]
    memory_bytes: int  # weights and KV cache of the draft
    held_out: bool  # measured on the held-out prompts; otherwise only in the first measurement
    verdict: str


def speeds(candidate: Candidate, cases: Sequence[Case]) -> Iterator[Speed]:
    """Yield the speeds of a candidate by temperature."""
    for case in cases:
        if case.choice == candidate.choice:
            overall = case.overall
            yield Speed(
                temperature=case.temperature,
                speedup=overall.value,
                low=overall.low,
                high=overall.high,
                tau=case.total.tau,
            )
