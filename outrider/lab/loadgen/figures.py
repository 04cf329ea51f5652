"""Throughput and latencies of a server, from the results of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.loadgen.response import RequestResult
from outrider.lab.loadgen.settings import Settings

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Throughput and latencies of one server."""

    seconds: float  # of the whole load
    completed: int  # requests
    canceled: int
    retries: int
    errors: tuple[str, ...]
    output_tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ms: Mapping[str, Mapping[str, float]]  # percentiles by latency; {}: no request was completed

    @property
    def answered(self) -> bool:
        """Whether a request was completed, or all of them were canceled."""
        return bool(self.completed or not self.errors)

    @classmethod
    def of(cls, settings: Settings, results: Sequence[RequestResult], seconds: float) -> Figures:
        completed = [result for result in results if result.completed]
        num_good = sum(
            result.ttft <= settings.goodput_ttft and result.tpot <= settings.goodput_tpot for result in completed
        )
        return cls(
            seconds=round(seconds, 3),
            completed=len(completed),
            canceled=sum(result.canceled for result in results),
            retries=sum(result.retries for result in results),
            errors=tuple(result.error for result in results if result.error),
            output_tokens_per_s=round(sum(result.tokens for result in completed) / seconds, 2),
            requests_per_s=round(len(completed) / seconds, 3),
            goodput_per_s=round(num_good / seconds, 3),
            ms={
                "ttft": percentiles([result.ttft for result in completed]),
                "itl": percentiles([latency for result in completed for latency in result.inter_token_latencies]),
                "chunk": percentiles([gap for result in completed for gap in result.chunk_gaps]),
                "tpot": percentiles([result.tpot for result in completed]),
                "e2e": percentiles([result.e2e for result in completed]),
            },
        )


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 50th, 95th and 99th percentile in ms; {} without values.

    The p-th percentile is the smallest value that at least p percent of the values do not exceed.
    """
    ordered = sorted(seconds)
    if not ordered:
        return {}
    ranks = {percent: -(-len(ordered) * percent // 100) for percent in PERCENTILES}  # rounded up
    return {f"p{percent}": round(1e3 * ordered[rank - 1], 3) for percent, rank in ranks.items()}
