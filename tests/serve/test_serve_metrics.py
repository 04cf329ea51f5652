"""Tests of the metrics, the drift alarm and the Grafana dashboard."""

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Batch, Draft, Request
from outrider.drafting.plan.cost_planner import CostPlanner
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.drafting.propose.combine import Switch
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.lookup.recycle import RecycleProposer
from outrider.drafting.propose.registry import alternatives
from outrider.serve.monitoring.drift import Drift
from outrider.serve.monitoring.latency import LatencyMetrics
from outrider.serve.monitoring.metrics import exposition
from outrider.testing import ToyTarget
from tests.helpers.engines import make_engine
from tests.helpers.serving import BODY, PROMPT, metric_values, serving, wait_until_idle
from tests.models.cache.test_replay import toy_prompts

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
COSTS = CostModel(target=PassCost(tokens=(1, 64), seconds=(1e-3, 2e-3), entry=0.0, pair=0.0), draft=None)


@pytest.fixture(scope="module")
def server_metrics():
    """The `AsyncLLM` of a server that has served 4 completions, and the samples of its metrics."""
    options = {
        "proposer": "switch(ngram,recycle)",
        "isolate_faults": True,
        "k": "auto",
        "planner": CostPlanner(COSTS, COSTS),
    }
    with serving(options) as (url, async_llm):
        for temperature in (0, 1):
            body = {"prompt": PROMPT, "max_tokens": 60, "temperature": temperature, "ignore_eos": True, "n": 2}
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        wait_until_idle(async_llm)
        families = text_string_to_metric_families(exposition(async_llm).decode())
        yield async_llm, [sample for family in families for sample in family.samples]


def value(samples, name, **labels):
    """Return the value of the one sample with this name and these labels."""
    matches = [each.value for each in samples if each.name == name and each.labels.items() >= labels.items()]
    (match,) = matches
    return match


def test_counters_of_speculation_have_the_names_of_vllm():
    with serving(vllm_metrics=True) as (url, async_llm):
        httpx.post(url + "/v1/completions", json=BODY, timeout=60)
        stats = async_llm.stats
        prefix = "vllm:spec_decode_num_"
        for name, value in (
            ("drafts", stats.offered[0]),
            ("draft_tokens", stats.draft_tokens),
            ("accepted_tokens", sum(stats.accepted)),
        ):
            assert metric_values(url, f'{prefix}{name}_total{{engine="0",model_name="nano"}}') == [value]
        assert metric_values(url, f"{prefix}accepted_tokens_per_pos_total") == list(stats.accepted)


def test_cache_metrics(server_metrics):
    async_llm, samples = server_metrics
    usage = async_llm.engine.cache_usage()
    states = {state: value(samples, "outrider_kv_cache_blocks", state=state) for state in ("used", "cached", "free")}
    assert states == {"used": usage.used_blocks, "cached": usage.cached_blocks, "free": usage.free_blocks}
    assert value(samples, "outrider_prefix_cache_queries_total") == usage.query_tokens
    assert value(samples, "outrider_prefix_cache_hits_total") == usage.hit_tokens <= usage.query_tokens
    assert value(samples, "outrider_cache_evicted_blocks_total") == usage.evicted_blocks
    assert value(samples, "outrider_preemptions_total") == usage.preempted


def test_token_metrics_are_consistent(server_metrics):
    async_llm, samples = server_metrics
    stats = async_llm.stats
    assert value(samples, "outrider_output_tokens_total") == stats.output_tokens == 240
    assert value(samples, "outrider_draft_tokens_total") == stats.draft_tokens > 0
    rejected = value(samples, "outrider_rejected_tokens_total")
    assert rejected == stats.draft_tokens - value(samples, "outrider_accepted_tokens_total")
    for part in ("draft_tokens", "accepted_tokens"):
        by_proposer = [
            value(samples, f"outrider_proposer_{part}_total", proposer=name) for name in ("ngram", "recycle")
        ]
        assert sum(by_proposer) == value(samples, f"outrider_{part}_total")
    drafts = value(samples, "outrider_drafts_total")
    assert drafts == sum(value(samples, "outrider_proposer_drafts_total", proposer=n) for n in ("ngram", "recycle"))
    assert value(samples, "outrider_tokens_per_pass") == pytest.approx(stats.tau)
    assert value(samples, "outrider_requests_total", finish_reason="length") == 4
    parts = [value(samples, "outrider_round_seconds_total", part=part) for part in ("draft", "target", "host")]
    assert sum(parts) == pytest.approx(stats.seconds)


def test_draft_depth_histogram_is_consistent(server_metrics):
    async_llm, samples = server_metrics
    buckets = [each.value for each in samples if each.name == "outrider_draft_depth_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(samples, "outrider_draft_depth_count") == async_llm.stats.passes
    assert buckets[0] == async_llm.stats.passes - async_llm.stats.offered[0]
    assert value(samples, "outrider_draft_depth_sum") == sum(async_llm.stats.offered)


def test_estimated_speedup_comes_from_planner(server_metrics):
    async_llm, samples = server_metrics
    planner = async_llm.parts.planner
    assert value(samples, "outrider_planned_seconds_total") == planner.spent_seconds > 0
    assert value(samples, "outrider_estimated_speedup") == planner.plain_seconds / planner.spent_seconds > 0


def test_dashboard_queries_use_existing_metrics(server_metrics):
    _, samples = server_metrics
    known = {(each.name, *sorted(each.labels)) for each in samples}
    names = {name for name, *_ in known}
    document = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in document["templating"]["list"]]
    queried = {name for query in queries for name in re.findall(r"\boutrider_\w+", query)}
    assert len(queried) > 20
    assert queried <= names
    for query in queries:
        for label in re.findall(r"by \((\w+)\)", query):
            for name in re.findall(r"\boutrider_\w+", query):
                assert any(each[0] == name and label in each[1:] for each in known), (label, name)


def add_passes(drift, stats, passes, acceptance):
    """Update the drift alarm with passes of this acceptance. Return the new sums."""
    stats += Stats(passes=passes, reached=(passes,), accepted=(round(passes * acceptance),))
    drift.update(stats)
    return stats


def test_drift_alarm_starts_and_ends_with_acceptance():
    drift = Drift()
    stats = Stats()
    for _ in range(100):
        stats = add_passes(drift, stats, 8, 0.25)
    assert not drift.alarm  # too few draft tokens for an alarm
    for _ in range(500):
        stats = add_passes(drift, stats, 8, 0.75)
    assert not drift.alarm
    assert drift.recent == pytest.approx(0.75, abs=0.01)
    for _ in range(200):
        stats = add_passes(drift, stats, 8, 0.25)
    assert drift.alarm
    for _ in range(200):
        stats = add_passes(drift, stats, 8, 0.75)
    assert not drift.alarm


def test_drift_baseline_follows_lasting_change():
    drift = Drift()
    stats = Stats()
    stats = add_passes(drift, stats, 20_000, 0.8)
    for _ in range(50):
        stats = add_passes(drift, stats, 100, 0.2)
    assert drift.alarm
    for _ in range(1000):
        stats = add_passes(drift, stats, 100, 0.2)
    assert not drift.alarm
    recent_before = drift.recent
    drift.update(stats)
    assert drift.recent == recent_before


class RecordingPlanner(CostPlanner):
    """Records the outcomes that the statistics of its proposers learn from, and does not trim drafts."""

    def __init__(self, *costs):
        super().__init__(*costs)
        self.outcomes = [[], []]
        for proposer, outcomes in zip(self.proposers, self.outcomes, strict=True):
            proposer.learn = self._recorded(proposer.learn, outcomes)

    def _recorded(self, learn, outcomes):
        def record_and_learn(outcome, cached, **options):
            outcomes.append(outcome)
            learn(outcome, cached, **options)

        return record_and_learn

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        super().trim(batch, draft)
        return draft


def test_planner_does_not_learn_from_requests_with_own_proposer():
    """The planner learns only from the passes of the requests without a proposer."""
    target = ToyTarget(spread=3.0)
    planner = RecordingPlanner(COSTS, COSTS)
    engine = make_engine(
        target,
        lambda setup: Switch(setup, [NgramProposer(setup), RecycleProposer(setup)]),
        rows=8,
        chunk=64,
        planner=planner,
    )
    params = SamplingParams(temperature=0.7)
    for i, prompt in enumerate(toy_prompts(4)):
        alternative = None if i < 2 else 1
        request = Request(
            id=i,
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=i,
            end_ids=frozenset(),
            max_tokens=120,
            alternative=alternative,
        )
        engine.add(request)
    without_proposer = set()
    with_proposer = set()
    while engine.busy():
        for seq in engine.step():
            (without_proposer if seq.request.alternative is None else with_proposer).add(seq)
    assert all(seq.num_draft_tokens > 0 for seq in with_proposer)
    outcomes = [outcome for each in planner.outcomes for outcome in each]
    assert outcomes
    assert sum(outcome.nodes for outcome in outcomes) <= sum(seq.num_draft_tokens for seq in without_proposer)
    assert all(outcome.output_tokens >= outcome.seqs > 0 for outcome in outcomes)
    assert sum(each.draft_tokens for each in engine.alternative_stats) == engine.stats.draft_tokens


def test_short_names_of_alternatives():
    assert alternatives("ngram") == ("ngram",)
    assert alternatives("draft:/a/b/nano") == ("draft",)
    assert alternatives("switch(ngram,draft:/a/one,draft:/a/two)") == ("ngram", "draft:one", "draft:two")
    assert alternatives("switch(ngram:1-3,merge(ngram,recycle))") == ("ngram", "merge")
    assert alternatives("switch(draft:/a/x,draft:/b/x)") == ("draft:x#1", "draft:x#2")
    assert alternatives("pkg.module:Class") == ("pkg.module:Class",)


def test_tokens_of_a_round_share_its_latency():
    latency = LatencyMetrics()
    latency.begin(0)
    latency.record(0, 1.0, 2)  # the first tokens have no inter-token latency
    latency.record(0, 1.027, 5)
    latency.record(0, 1.04, 5)  # no new token
    latency.record(0, 1.5, 6)
    latency.end(0, "stop")
    families = {family.name: family for family in latency.registry.collect()}
    histogram = families["outrider_inter_token_latency_seconds"]
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.samples}
    assert samples["outrider_inter_token_latency_seconds_bucket", "0.005"] == 0
    assert samples["outrider_inter_token_latency_seconds_bucket", "0.01"] == 3
    assert (
        samples["outrider_inter_token_latency_seconds_bucket", "0.5"]
        == samples["outrider_inter_token_latency_seconds_count", None]
        == 4
    )
    assert samples["outrider_inter_token_latency_seconds_sum", None] == pytest.approx(0.5)
