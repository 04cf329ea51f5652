"""Counts of the engine as Prometheus reads them, taken from its sums when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.serve.driver import Driver


class EngineCounts:
    """A collector over the engine's `Stats`, which only ever grow."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def collect(self) -> Iterator[Metric]:
        stats = self._driver.stats
        for name, says, value in (
            ("outrider_rounds", "Passes of the target", stats.rounds),
            ("outrider_row_passes", "Rows that decoded in passes of the target", stats.passes),
            ("outrider_prompt_tokens", "Tokens of prompts that were read", stats.prompt),
            ("outrider_emitted_tokens", "Tokens written", stats.emitted),
            ("outrider_drafted_tokens", "Guesses verified", stats.drafted),
            ("outrider_accepted_tokens", "Guesses kept", sum(stats.accepted)),
        ):
            yield CounterMetricFamily(name, says, value=value)
        for name, says, counts in (
            ("outrider_reached_by_position", "Guesses whose ancestors were all kept", stats.reached),
            ("outrider_accepted_by_position", "Those of them that were kept", stats.accepted),
        ):
            family = CounterMetricFamily(name, says, labels=["position"])
            for position, count in enumerate(counts):
                family.add_metric([str(position)], count)
            yield family
        seconds = CounterMetricFamily("outrider_seconds", "Where rounds spent their time", labels=["part"])
        seconds.add_metric(["propose"], stats.propose_seconds)
        seconds.add_metric(["target"], stats.target_seconds)
        seconds.add_metric(["host"], stats.host_seconds)
        yield seconds
        yield GaugeMetricFamily("outrider_running", "Completions that hold a slot", value=self._driver.running)
        yield GaugeMetricFamily("outrider_waiting", "Completions that wait for one", value=self._driver.waiting)


def exposition(driver: Driver) -> bytes:
    """All metrics, as text."""
    return generate_latest(driver.clocks.registry)
