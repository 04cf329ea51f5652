"""What a server counts, and what is drawn of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.core.types import Batch, Draft, Request
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Scheduler
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.pass_cost import CostModel, PassCost
from outrider.propose.combine import Switch
from outrider.propose.lookup.ngram import NgramProposer
from outrider.propose.lookup.recycle import RecycleProposer
from outrider.propose.registry import alternatives
from outrider.serve.monitoring.drift import Drift
from outrider.serve.monitoring.latency import LatencyMetrics
from outrider.serve.monitoring.metrics import exposition
from outrider.testing import ToyTarget
from tests.cache.test_replay import toy_prompts
from tests.helpers.engines import make_engine
from tests.serve.test_serve import PROMPT, serving, settled

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
COSTS = CostModel(target=PassCost(tokens=(1, 64), seconds=(1e-3, 2e-3), entry=0.0, pair=0.0), draft=None)


@pytest.fixture(scope="module")
def counted():
    options = {
        "proposer": "switch(ngram,recycle)",
        "isolate_faults": True,
        "k": "auto",
        "planner": CostPlanner(COSTS, COSTS),
    }
    with serving(options) as (url, driver):
        for temperature in (0, 1):
            body = {"prompt": PROMPT, "max_tokens": 60, "temperature": temperature, "ignore_eos": True, "n": 2}
            assert httpx.post(url + "/v1/completions", json=body).status_code == 200
        settled(driver)
        families = text_string_to_metric_families(exposition(driver).decode())
        yield driver, [sample for family in families for sample in family.samples]


def value(samples, name, **labels):
    (found,) = [each.value for each in samples if each.name == name and each.labels.items() >= labels.items()]
    return found


def test_the_cache_is_counted(counted):
    driver, samples = counted
    use = driver.engine.cache_usage()
    states = {state: value(samples, "outrider_kv_cache_blocks", state=state) for state in ("used", "cached", "free")}
    assert states == {"used": use.used_blocks, "cached": use.cached_blocks, "free": use.free_blocks}
    assert value(samples, "outrider_prefix_cache_queries_total") == use.query_tokens
    assert value(samples, "outrider_prefix_cache_hits_total") == use.hit_tokens <= use.query_tokens
    assert value(samples, "outrider_cache_evicted_blocks_total") == use.evicted_blocks
    assert value(samples, "outrider_preemptions_total") == use.preempted


def test_sums_agree(counted):
    driver, samples = counted
    stats = driver.stats
    assert value(samples, "outrider_output_tokens_total") == stats.output_tokens == 240
    assert value(samples, "outrider_draft_tokens_total") == stats.draft_tokens > 0
    wasted = value(samples, "outrider_rejected_tokens_total")
    assert wasted == stats.draft_tokens - value(samples, "outrider_accepted_tokens_total")
    for part in ("draft_tokens", "accepted_tokens"):
        own = sum(value(samples, f"outrider_proposer_{part}_total", proposer=name) for name in ("ngram", "recycle"))
        assert own == value(samples, f"outrider_{part}_total")
    drafts = value(samples, "outrider_drafts_total")
    assert drafts == sum(value(samples, "outrider_proposer_drafts_total", proposer=n) for n in ("ngram", "recycle"))
    assert value(samples, "outrider_tokens_per_pass") == pytest.approx(stats.tau)
    assert value(samples, "outrider_requests_total", finish="length") == 4
    parts = [value(samples, "outrider_round_seconds_total", part=part) for part in ("draft", "target", "host")]
    assert sum(parts) == pytest.approx(stats.seconds)


def test_the_histogram_of_guesses_adds_up(counted):
    driver, samples = counted
    buckets = [each.value for each in samples if each.name == "outrider_draft_depth_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == value(samples, "outrider_draft_depth_count") == driver.stats.passes
    assert buckets[0] == driver.stats.passes - driver.stats.offered[0]
    assert value(samples, "outrider_draft_depth_sum") == sum(driver.stats.offered)


def test_the_speedup_is_the_planners(counted):
    driver, samples = counted
    planner = driver.front.parts.planner
    assert value(samples, "outrider_planned_seconds_total") == planner.spent_seconds > 0
    assert value(samples, "outrider_estimated_speedup") == planner.plain_seconds / planner.spent_seconds > 0


def test_every_query_of_the_dashboard_names_a_metric(counted):
    _, samples = counted
    known = {(each.name, *sorted(each.labels)) for each in samples}
    names = {name for name, *_ in known}
    document = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in document["templating"]["list"]]
    asked = {name for query in queries for name in re.findall(r"\boutrider_\w+", query)}
    assert len(asked) > 20
    assert asked <= names
    for query in queries:
        for label in re.findall(r"by \((\w+)\)", query):
            for name in re.findall(r"\boutrider_\w+", query):
                assert any(each[0] == name and label in each[1:] for each in known), (label, name)


def fed(drift, stats, passes, rate):
    stats += Stats(passes=passes, reached=(passes,), accepted=(round(passes * rate),))
    drift.update(stats)
    return stats


def test_the_alarm_begins_when_guesses_are_kept_less_often_and_ends_again():
    drift, stats = Drift(), Stats()
    for _ in range(100):
        stats = fed(drift, stats, 8, 0.25)
    assert not drift.alarm  # too few to know, even were it less
    for _ in range(500):
        stats = fed(drift, stats, 8, 0.75)
    assert not drift.alarm
    assert drift.recent == pytest.approx(0.75, abs=0.01)
    for _ in range(200):
        stats = fed(drift, stats, 8, 0.25)
    assert drift.alarm
    for _ in range(200):
        stats = fed(drift, stats, 8, 0.75)
    assert not drift.alarm


def test_what_stays_different_becomes_usual():
    drift, stats = Drift(), Stats()
    stats = fed(drift, stats, 20_000, 0.8)
    for _ in range(50):
        stats = fed(drift, stats, 100, 0.2)
    assert drift.alarm
    for _ in range(1000):
        stats = fed(drift, stats, 100, 0.2)
    assert not drift.alarm
    before = drift.recent
    drift.update(stats)
    assert drift.recent == before


class Seen(CostPlanner):
    """Keeps what its arms were told."""

    def __init__(self, *costs):
        super().__init__(*costs)
        self.told = [[], []]
        for arm, told in zip(self.proposers, self.told, strict=True):
            learn = arm.learn
            arm.learn = lambda seen, cached, learn=learn, told=told: (told.append(seen), learn(seen, cached))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        super().trim(batch, draft)
        return draft


def test_who_chose_its_proposer_teaches_the_planner_nothing_of_the_others():
    """The free rows' outcomes are summed from their own passes."""
    target, planner = ToyTarget(spread=3.0), Seen(COSTS, COSTS)
    spare = make_engine(target, lambda setup: Switch(setup, [NgramProposer(setup), RecycleProposer(setup)]))
    engine = Engine(
        target=target,
        proposer=spare._proposer,
        verifier=spare._verifier,
        planner=planner,
        scheduler=Scheduler(slots=8, chunk=64, context=256),
    )
    params = SamplingParams(temperature=0.7)
    for i, prompt in enumerate(toy_prompts(4)):
        arm = None if i < 2 else 1
        request = Request(
            id=i,
            prompt_token_ids=tuple(prompt),
            params=params,
            seed=i,
            end_ids=frozenset(),
            max_tokens=120,
            alternative=arm,
        )
        engine.add(request)
    free, pinned = set(), set()
    while engine.busy():
        for row in engine.step():
            (free if row.request.alternative is None else pinned).add(row)
    assert all(row.num_draft_tokens > 0 for row in pinned)
    told = [seen for arm in planner.told for seen in arm]
    assert told
    assert sum(seen.nodes for seen in told) <= sum(row.num_draft_tokens for row in free)
    assert all(seen.output_tokens >= seen.seqs > 0 for seen in told)
    assert sum(each.draft_tokens for each in engine.alternative_stats) == engine.stats.draft_tokens


def test_alternatives_have_short_names():
    assert alternatives("ngram") == ("ngram",)
    assert alternatives("draft:/a/b/nano") == ("draft",)
    assert alternatives("switch(ngram,draft:/a/one,draft:/a/two)") == ("ngram", "draft:one", "draft:two")
    assert alternatives("switch(ngram:1-3,merge(ngram,recycle))") == ("ngram", "merge")
    assert alternatives("switch(draft:/a/x,draft:/b/x)") == ("draft:x#1", "draft:x#2")
    assert alternatives("pkg.module:Class") == ("pkg.module:Class",)


def test_gaps_between_tokens_are_counted_by_the_round():
    clocks = LatencyMetrics()
    clocks.begin(0)
    clocks.record(0, 1.0, 2)  # the first
    clocks.record(0, 1.027, 5)
    clocks.record(0, 1.04, 5)  # ended, with nothing more
    clocks.record(0, 1.5, 6)
    clocks.end(0, "stop")
    (found,) = (each for each in clocks.registry.collect() if each.name == "outrider_inter_token_latency_seconds")
    samples = {(each.name, each.labels.get("le")): each.value for each in found.samples}
    assert samples["outrider_inter_token_latency_seconds_bucket", "0.005"] == 0
    assert samples["outrider_inter_token_latency_seconds_bucket", "0.01"] == 3
    assert (
        samples["outrider_inter_token_latency_seconds_bucket", "0.5"]
        == samples["outrider_inter_token_latency_seconds_count", None]
        == 4
    )
    assert samples["outrider_inter_token_latency_seconds_sum", None] == pytest.approx(0.5)
