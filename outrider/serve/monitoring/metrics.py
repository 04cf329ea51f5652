"""Computes the metrics of the engine from its counters on each scrape, in the Prometheus text format."""

from collections.abc import Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from outrider._version import __version__
from outrider.core.cache import CacheUsage
from outrider.core.stats import Stats
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.serve.async_llm import AsyncLLM

_DEPTH_BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)  # draft tokens


class EngineMetrics:
    """A Prometheus collector for the counters of engine, planner and proposers."""

    def __init__(self, async_llm: AsyncLLM) -> None:
        self._async_llm = async_llm
        self._parts = async_llm.parts

    def collect(self) -> Iterator[Metric]:
        stats = self._async_llm.stats
        yield from _token_metrics(stats)
        yield from _position_metrics(stats)
        yield _draft_depth(stats)
        yield from self._proposer_metrics()
        yield from self._planner_metrics()
        yield from self._request_metrics()
        yield from _cache_metrics(self._async_llm.engine.cache_usage())
        yield _gauge("tokens_per_pass", "tau: output tokens per pass", stats.tau)
        info = GaugeMetricFamily("outrider_build_info", "Always 1", labels=["version", "verifier"])
        info.add_metric([__version__, self._parts.verifier.name], 1)
        yield info

    def _proposer_metrics(self) -> Iterator[Metric]:
        proposers = self._parts.proposers
        stats = self._async_llm.engine.alternative_stats
        for name, help, counts in (
            ("drafts", "Drafts of this proposer", [_first(each.offered) for each in stats]),
            ("draft_tokens", "Draft tokens that were verified", [each.draft_tokens for each in stats]),
            ("accepted_tokens", "Draft tokens that were accepted", [sum(each.accepted) for each in stats]),
            ("output_tokens", "Output tokens of rounds with drafts", [each.output_tokens for each in stats]),
        ):
            yield _by_proposer(CounterMetricFamily, name, help, proposers, counts)
        failures = [guard.failures for guard in self._parts.isolated] or [0] * len(proposers)
        yield _by_proposer(CounterMetricFamily, "failures", "Exceptions of this proposer", proposers, failures)
        disabled = [guard.disabled for guard in self._parts.isolated] or [False] * len(proposers)
        drifts = self._async_llm.drifts
        for name, help, values in (
            ("disabled", "1 while the proposer is switched off after failures", disabled),
            ("acceptance_recent", "Acceptance at position 0, recently", [each.recent for each in drifts]),
            ("acceptance_baseline", "Acceptance at position 0, in the long run", [each.baseline for each in drifts]),
            ("drift", "1 while recent acceptance is far below the baseline", [each.alarm for each in drifts]),
        ):
            yield _by_proposer(GaugeMetricFamily, name, help, proposers, values)

    def _planner_metrics(self) -> Iterator[Metric]:
        """Yield the metrics of the cost planner. They stay 0 with a fixed k, whose planner has no cost model."""
        planner = self._parts.planner
        planned_seconds = 0.0
        plain_seconds = 0.0
        if isinstance(planner, CostPlanner):
            planned_seconds = planner.spent_seconds
            plain_seconds = planner.plain_seconds
        yield _counter("planned_seconds", "Time of the rounds that k auto planned", planned_seconds)
        yield _counter("plain_seconds", "Time that plain decoding would have taken for their tokens", plain_seconds)
        speedup = plain_seconds / planned_seconds if planned_seconds else 0.0
        yield _gauge("estimated_speedup", "plain_seconds / planned_seconds; 0 before the first planned round", speedup)

    def _request_metrics(self) -> Iterator[Metric]:
        async_llm = self._async_llm
        failed_help = "Rounds that raised an exception and were repeated sequence by sequence"
        yield _gauge("num_requests_running", "Completions that hold a slot", async_llm.running)
        yield _gauge("num_requests_waiting", "Completions in the queue", async_llm.waiting)
        yield _gauge("max_num_seqs", "Completions that can run at once", async_llm.max_num_seqs)
        yield _counter("failed_rounds", failed_help, async_llm.failed_rounds)
        yield _gauge("degraded", "1 while errors reduce speculation; see /health", bool(async_llm.degraded))


class VLLMMetrics:
    """A Prometheus collector for the counters of speculation under the names that vLLM has."""

    def __init__(self, async_llm: AsyncLLM, model: str) -> None:
        """Label the counters with the name of a model."""
        self._async_llm = async_llm
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        stats = self._async_llm.stats
        yield self._counter("drafts", "Drafts", [(_first(stats.offered), {})])
        yield self._counter("draft_tokens", "Draft tokens", [(stats.draft_tokens, {})])
        yield self._counter("accepted_tokens", "Accepted draft tokens", [(sum(stats.accepted), {})])
        by_position = [(count, {"position": str(i)}) for i, count in enumerate(stats.accepted)]
        yield self._counter("accepted_tokens_per_pos", "Accepted draft tokens by position", by_position)

    def _counter(self, name: str, help: str, values: Sequence[tuple[int, dict[str, str]]]) -> Metric:
        family = CounterMetricFamily(f"vllm:spec_decode_num_{name}", help)
        for value, labels in values:
            family.add_sample(f"{family.name}_total", self._labels | labels, value)
        return family


def _cache_metrics(usage: CacheUsage) -> Iterator[Metric]:
    """Yield the metrics of the target's KV cache. A cache without blocks reports 0 blocks."""
    blocks = GaugeMetricFamily("outrider_kv_cache_blocks", "Blocks of the target's KV cache", labels=["state"])
    states = {"used": usage.used_blocks, "cached": usage.cached_blocks, "free": usage.free_blocks}
    for state, count in states.items():
        blocks.add_metric([state], count)
    yield blocks
    yield _counter("prefix_cache_queries", "Tokens of the sequences that got a slot", usage.query_tokens)
    yield _counter("prefix_cache_hits", "Tokens of these sequences that were in the cache", usage.hit_tokens)
    yield _counter("cache_evicted_blocks", "Cached blocks that were evicted", usage.evicted_blocks)
    yield _counter("preemptions", "Sequences that lost their slot and continue later", usage.preempted)


def _token_metrics(stats: Stats) -> Iterator[Metric]:
    accepted = sum(stats.accepted)
    yield _counter("rounds", "Forward passes of the target", stats.rounds)
    yield _counter("passes", "Decoding sequences, summed over rounds", stats.passes)
    yield _counter("drafts", "Decoding sequences with draft tokens, summed over rounds", _first(stats.offered))
    prompt_help = "Tokens of the prompts that were processed, with those that the cache held"
    yield _counter("prompt_tokens", prompt_help, stats.prompt_tokens)
    yield _counter("output_tokens", "Output tokens", stats.output_tokens)
    yield _counter("draft_tokens", "Draft tokens that were verified", stats.draft_tokens)
    yield _counter("accepted_tokens", "Draft tokens that were accepted", accepted)
    yield _counter("rejected_tokens", "Draft tokens that were verified and rejected", stats.draft_tokens - accepted)
    seconds = CounterMetricFamily("outrider_round_seconds", "Time of the rounds by part", labels=["part"])
    seconds.add_metric(["draft"], stats.draft_seconds)
    seconds.add_metric(["target"], stats.target_seconds)
    seconds.add_metric(["host"], stats.host_seconds)
    yield seconds


def _position_metrics(stats: Stats) -> Iterator[Metric]:
    for name, help, counts in (
        ("outrider_reached_by_position", "Draft tokens whose ancestors were all accepted", stats.reached),
        ("outrider_accepted_by_position", "Draft tokens at this position that were accepted", stats.accepted),
    ):
        family = CounterMetricFamily(name, help, labels=["position"])
        for position, count in enumerate(counts):
            family.add_metric([str(position)], count)
        yield family


def _draft_depth(stats: Stats) -> Metric:
    # `stats.offered[i]` passes had a draft deeper than i. The other passes are in the cumulative
    # bucket of depth i.
    deeper = [stats.offered[depth] if depth < len(stats.offered) else 0 for depth in _DEPTH_BUCKETS]
    buckets = [(str(float(depth)), stats.passes - count) for depth, count in zip(_DEPTH_BUCKETS, deeper, strict=True)]
    return HistogramMetricFamily(
        "outrider_draft_depth",
        "Depth of the draft of one sequence in one round",
        buckets=[*buckets, ("+Inf", stats.passes)],
        sum_value=sum(stats.offered),
    )


def _by_proposer(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    help: str,
    proposers: Sequence[str],
    values: Sequence[float],
) -> Metric:
    family = kind(f"outrider_proposer_{name}", help, labels=["proposer"])
    for proposer, value in zip(proposers, values, strict=True):
        family.add_metric([proposer], value)
    return family


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"outrider_{name}", help, value=value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"outrider_{name}", help, value=value)


def _first(counts: Sequence[int]) -> int:
    return counts[0] if counts else 0


def exposition(async_llm: AsyncLLM) -> bytes:
    """Return all metrics in the Prometheus text format."""
    return generate_latest(async_llm.latency.registry)
