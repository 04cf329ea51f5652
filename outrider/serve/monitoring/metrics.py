"""Counts of the engine as Prometheus reads them, taken from its sums when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider._version import __version__
from outrider.cache.base import CacheUsage
from outrider.core.stats import Stats
from outrider.plan.planner import CostPlanner
from outrider.serve.async_llm import AsyncLLM

_DEPTHS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # of the histogram of guesses


class EngineCounts:
    """A collector over what engine, planner and guards count; sums only ever grow."""

    def __init__(self, driver: AsyncLLM) -> None:
        self._driver = driver
        self._parts = driver.front.parts

    def collect(self) -> Iterator[Metric]:
        stats = self._driver.stats
        yield from _sums(stats)
        yield from _positions(stats)
        yield _depths(stats)
        yield from self._proposers()
        yield from self._planned()
        yield from self._requests()
        yield from _cache(self._driver.engine.cache_usage())
        yield GaugeMetricFamily("outrider_tokens_per_pass", "tau: tokens that a row emits in a pass", value=stats.tau)
        info = GaugeMetricFamily("outrider_build_info", "1; what runs is in the labels", labels=["version", "verifier"])
        info.add_metric([__version__, self._parts.verifier.name], 1)
        yield info

    def _proposers(self) -> Iterator[Metric]:
        """What each alternative guessed, in the passes in which it did, and how it fares."""
        names, arms = self._parts.proposers, self._driver.engine.alternative_stats
        for name, says, values in (
            ("drafts", "Passes with guesses", [_first(each.offered) for each in arms]),
            ("drafted_tokens", "Guesses verified", [each.drafted for each in arms]),
            ("accepted_tokens", "Guesses kept", [sum(each.accepted) for each in arms]),
            ("emitted_tokens", "Tokens written in passes with guesses", [each.emitted for each in arms]),
        ):
            yield _by_proposer(CounterMetricFamily, f"outrider_proposer_{name}", says, names, values)
        failures = [guard.failures for guard in self._parts.isolated] or [0] * len(names)
        yield _by_proposer(CounterMetricFamily, "outrider_proposer_failures", "Times that it raised", names, failures)
        off = [guard.off for guard in self._parts.isolated] or [False] * len(names)
        drifts = self._driver.drifts
        for name, says, gauges in (
            ("off", "1 while it is not asked, for it has failed", off),
            ("acceptance_recent", "Share of first guesses kept, lately", [each.recent for each in drifts]),
            ("acceptance_usual", "Share of first guesses kept, in the long run", [each.usual for each in drifts]),
            ("drift", "1 while the recent share is far below the usual one", [each.alarm for each in drifts]),
        ):
            yield _by_proposer(GaugeMetricFamily, f"outrider_proposer_{name}", says, names, gauges)

    def _planned(self) -> Iterator[Metric]:
        """What k auto reckons with; without it nobody knows what plain decoding would take."""
        planner = self._parts.planner
        spent, plain = (
            (planner.spent_seconds, planner.plain_seconds) if isinstance(planner, CostPlanner) else (0.0, 0.0)
        )
        yield CounterMetricFamily("outrider_planned_seconds", "Seconds of rounds that k auto planned", value=spent)
        yield CounterMetricFamily(
            "outrider_plain_seconds", "What plain decoding would have taken for their tokens", value=plain
        )
        yield GaugeMetricFamily(
            "outrider_estimated_speedup", "The one over the other; 0 where nobody knows", value=plain / (spent or 1.0)
        )

    def _requests(self) -> Iterator[Metric]:
        driver = self._driver
        yield GaugeMetricFamily("outrider_running", "Completions that hold a slot", value=driver.running)
        yield GaugeMetricFamily("outrider_waiting", "Completions that wait for one", value=driver.waiting)
        yield GaugeMetricFamily("outrider_slots", "Completions that may run at once", value=driver.slots)
        yield CounterMetricFamily(
            "outrider_failed_rounds", "Rounds that raised, and were taken again row by row", value=driver.failed_rounds
        )
        yield GaugeMetricFamily(
            "outrider_degraded", "1 while errors cost guesses; /health says which", value=bool(driver.degraded)
        )


def _cache(use: CacheUsage) -> Iterator[Metric]:
    """Of the target's; where a slot has room for a whole context there are no blocks to tell of."""
    blocks = GaugeMetricFamily("outrider_cache_blocks", "Blocks of the target's cache", labels=["state"])
    for state, count in (("held", use.held), ("kept", use.kept), ("free", use.free)):
        blocks.add_metric([state], count)
    yield blocks
    for name, says, value in (
        ("asked_tokens", "Tokens of texts that were taken in", use.query_tokens),
        ("hit_tokens", "Those of them that were cached already", use.hit_tokens),
        ("evicted_blocks", "Blocks of texts that had ended, for others", use.evicted),
    ):
        yield CounterMetricFamily(f"outrider_cache_{name}", says, value=value)
    yield CounterMetricFamily("outrider_preemptions", "Rows that gave way and came back", value=use.preempted)


def _sums(stats: Stats) -> Iterator[Metric]:
    kept = sum(stats.accepted)
    for name, says, value in (
        ("outrider_rounds", "Passes of the target", stats.rounds),
        ("outrider_row_passes", "Rows that decoded in passes of the target", stats.passes),
        ("outrider_drafts", "Rows that had guesses in passes of the target", _first(stats.offered)),
        ("outrider_prompt_tokens", "Tokens of prompts that were read", stats.prompt),
        ("outrider_emitted_tokens", "Tokens written", stats.emitted),
        ("outrider_drafted_tokens", "Guesses verified", stats.drafted),
        ("outrider_accepted_tokens", "Guesses kept", kept),
        ("outrider_wasted_tokens", "Guesses verified and not kept", stats.drafted - kept),
    ):
        yield CounterMetricFamily(name, says, value=value)
    seconds = CounterMetricFamily("outrider_seconds", "Where rounds spent their time", labels=["part"])
    seconds.add_metric(["draft"], stats.propose_seconds)
    seconds.add_metric(["target"], stats.target_seconds)
    seconds.add_metric(["host"], stats.host_seconds)
    yield seconds


def _positions(stats: Stats) -> Iterator[Metric]:
    for name, says, counts in (
        ("outrider_reached_by_position", "Guesses whose ancestors were all kept", stats.reached),
        ("outrider_accepted_by_position", "Those of them that were kept", stats.accepted),
    ):
        family = CounterMetricFamily(name, says, labels=["position"])
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family


def _depths(stats: Stats) -> Metric:
    """From how many passes had a guess at each position."""
    deeper = [stats.offered[most] if most < len(stats.offered) else 0 for most in _DEPTHS]
    buckets = [(str(float(most)), stats.passes - count) for most, count in zip(_DEPTHS, deeper, strict=True)]
    return HistogramMetricFamily(
        "outrider_draft_depth",
        "Guesses one after another that a row had in a pass",
        buckets=[*buckets, ("+Inf", stats.passes)],
        sum_value=sum(stats.offered),
    )


def _by_proposer(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    says: str,
    names: Sequence[str],
    values: Sequence[float],
) -> Metric:
    family = kind(name, says, labels=["proposer"])
    for proposer, value in zip(names, values, strict=True):
        family.add_metric([proposer], value)
    return family


def _first(counts: Sequence[int]) -> int:
    return counts[0] if counts else 0


def exposition(driver: AsyncLLM) -> bytes:
    """All metrics, as text."""
    return generate_latest(driver.clocks.registry)
