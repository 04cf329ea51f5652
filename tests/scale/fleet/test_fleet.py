"""Tests of `outrider fleet`: arrivals, one replica computed by hand, queues, routing, and the command line."""

import json
import random
import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest

from outrider import OutriderError
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.drafting.plan.speedup import expected_tau
from outrider.scale.estimate.equations import one_pass
from outrider.scale.estimate.machines import GPU, MachineOverrides, efficiencies, find_machine
from outrider.scale.estimate.models import Bits, find_model
from outrider.scale.estimate.pair import Acceptance
from outrider.scale.estimate.separate import mean_ttft
from outrider.scale.fleet.arrivals import Arrival, Lengths, bursts, parse_arrivals, poisson, read_trace
from outrider.scale.fleet.costs import ServerCosts, projected_costs, read_costs
from outrider.scale.fleet.replica import PUBLISH_SECONDS, ReplicaSettings
from outrider.scale.fleet.report import percentiles, summarize
from outrider.scale.fleet.simulation import Fleet
from outrider.scale.fleet.speculation import by_load, draw, fixed, off, parse_policy
from tests.helpers.commands import invoke

needs_simpy = pytest.mark.skipif(find_spec("simpy") is None, reason='SimPy is missing: pip install "outrider[fleet]"')

# A pass takes 1 s and 0.1 s for each token after the first. A draft pass takes 0.1 s.
TARGET = PassCost(tokens=(1, 11), seconds=(1.0, 2.0), entry=0.0, pair=0.0, fed=0.05)
DRAFT = PassCost(tokens=(1, 11), seconds=(0.1, 0.1), entry=0.0, pair=0.0, fed=0.0)
PLAIN = CostModel(target=TARGET, draft=None, host=0.0)
COSTS = CostModel(target=TARGET, draft=DRAFT, host=0.0)


def repeated(rates):
    """Return an acceptance whose last rate holds for all further positions."""
    return Acceptance(rates=rates, repeat_last=True)


SURE, NEVER = repeated((1.0,)), repeated((0.0,))


def settings(costs=PLAIN, acceptance=SURE, server=None, **changed):
    server = ServerCosts(costs=costs, **(server or {}))
    return ReplicaSettings(server=server, acceptance=acceptance, max_round_seconds=0.0, **changed)


def fleet(policy=off, *, replicas=1, routing="least-loaded", **changed):
    return Fleet(settings(**changed), policy, replicas=replicas, routing=routing)


def request(time=0.0, prompt=1, output=4, **changed):
    return Arrival(time=time, prompt=prompt, output=output, **changed)


# Arrivals


def test_poisson_rate_and_lengths():
    lengths = Lengths(prompt=100, output=20, prefixes=3, prefix_tokens=50)
    arrivals = list(poisson(10.0, 1000.0, lengths, seed=1))
    assert len(arrivals) == pytest.approx(10000, rel=0.03)
    gaps = [after.time - before.time for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # as for exponential gaps
    assert sum(each.output for each in arrivals) / len(arrivals) == pytest.approx(20.5, rel=0.05)
    assert {each.prefix for each in arrivals} == {"prefix 0", "prefix 1", "prefix 2"}
    assert min(each.prompt for each in arrivals) > 50
    assert arrivals == list(poisson(10.0, 1000.0, lengths, seed=1))


def test_bursts_have_the_mean_rate_and_the_peak():
    arrivals = list(bursts(10.0, 3.0, 1000.0, Lengths(), period=10.0, seed=1))
    in_burst = [each for each in arrivals if each.time % 10 < 2]
    assert len(arrivals) == pytest.approx(10000, rel=0.05)
    assert len(in_burst) / 200 == pytest.approx(30, rel=0.05)
    only = bursts(10.0, 5.0, 100.0, Lengths(), period=10.0, seed=1)
    assert all(each.time % 10 < 2 for each in only)


def test_traces(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"time": 2, "prompt_tokens": 5, "output_tokens": 6},
        {"time": 1, "prompt_tokens": 9, "output_tokens": 3, "prefix": "a", "prefix_tokens": 4},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_trace(str(file))
    assert (first.time, first.prefix, first.prefix_tokens) == (1, "a", 4)
    assert (second.prompt, second.output) == (5, 6)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 1 of .* is not a request \\(there is no time\\)"),
        ("[]", "is not a request"),
        ("no", "is not a request"),
        ('{"time": -1, "prompt_tokens": 1, "output_tokens": 1}', "use seconds of at least 0"),
        ('{"time": 0, "prompt_tokens": 0, "output_tokens": 1}', "0 prompt tokens"),
        ('{"time": 0, "prompt_tokens": 2, "output_tokens": 1, "prefix_tokens": 2}', "shorter than the prompt"),
        ("", "has no requests"),
    ],
)
def test_damaged_traces(tmp_path, line, message):
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(OutriderError, match=message):
        read_trace(str(file))


@pytest.mark.parametrize("text", ["poisson:", "poisson:0", "poisson:1:2", "bursts:1:9:4", "bursts:1:2", "/no/trace"])
def test_impossible_arrivals(text):
    with pytest.raises(OutriderError):
        parse_arrivals(text, seconds=1.0, lengths=Lengths(), seed=0)


# One replica, by hand


@needs_simpy
def test_one_request():
    """The first round scores the prompt, and each of the 4 rounds emits a token."""
    result = fleet().run_open([request(time=2.0)])
    (job,) = result.jobs
    assert (job.first_token, job.finished) == (pytest.approx(3.0), pytest.approx(6.0))
    (counts,) = result.counts
    assert (counts.rounds, counts.tokens, counts.passes, counts.requests) == (4, 4, 4, 1)
    assert counts.busy_seconds == pytest.approx(4.0)


@needs_simpy
def test_prompts_are_split_over_rounds():
    """21 tokens in chunks of 10: 20 without logits take 0.05 s each, and the last one is scored."""
    result = fleet(max_num_batched_tokens=10).run_open([request(prompt=21, output=1)])
    assert result.counts[0].rounds == 3
    assert result.counts[0].prompt_tokens == 20
    assert result.seconds == pytest.approx(3 * 1.0 + 20 * 0.05)


@needs_simpy
def test_sequences_share_rounds_up_to_the_slots():
    """Two slots. The first round has one request, the next three have two, then one, and so on."""
    result = fleet(max_num_seqs=2).run_open([request()] * 3)
    assert [job.finished for job in result.jobs] == [
        pytest.approx(seconds) for seconds in (1 + 3 * 1.1, 1 + 4 * 1.1, 1 + 4 * 1.1 + 3)
    ]


@needs_simpy
def test_drafts_save_rounds():
    """All drafts are accepted: 3 + 1 tokens in one round of 3 draft passes and 4 scored tokens."""
    sure = fleet(fixed(3), costs=COSTS).run_open([request(output=8)])
    assert sure.counts[0].rounds == 2
    assert sure.seconds == pytest.approx(2 * (0.3 + 1.3))
    never = fleet(fixed(3), costs=COSTS, acceptance=NEVER).run_open([request(output=3)])
    # The last rounds draft only what the output can still use.
    assert never.counts[0].drafted == 2 + 1 + 0
    assert never.seconds == pytest.approx((0.2 + 1.2) + (0.1 + 1.1) + 1.0)


@needs_simpy
def test_drafting_emits_the_expected_tau():
    rates = (0.8, 0.6, 0.5)
    requests = [request(output=2000)]
    result = fleet(fixed(3), costs=COSTS, acceptance=repeated(rates)).run_open(requests)
    assert result.counts[0].tokens / result.counts[0].passes == pytest.approx(expected_tau(rates), rel=0.05)


@needs_simpy
def test_work_of_the_server_and_chunks():
    """One chunk for the first and the last token, and one for each round that is long enough."""
    result = fleet(server={"chunk_seconds": 0.5, "request_seconds": 0.25}, publish_seconds=0.0).run_open(
        [request(output=3)]
    )
    # The chunk of a round is sent during the next one.
    assert result.seconds == pytest.approx(3 * 1.0 + 0.25 + 2 * 0.5)
    assert result.counts[0].chunks == 3
    rare = fleet(publish_seconds=100.0).run_open([request(output=30)])
    assert rare.counts[0].chunks == 2


def test_publish_interval_is_that_of_the_server():
    stream = pytest.importorskip("outrider.serve.stream.request_stream")
    assert stream.PUBLISH_INTERVAL == PUBLISH_SECONDS


@needs_simpy
def test_a_long_prompt_does_not_delay_decoding_for_long():
    limited = Fleet(
        ReplicaSettings(server=ServerCosts(costs=PLAIN), acceptance=SURE, max_round_seconds=2.0),
        off,
        replicas=1,
        routing="round-robin",
    )
    result = limited.run_open([request(output=100), request(time=0.5, prompt=200, output=1)])
    # A decoding round takes 1 s, so 1 s is left for 20 prompt tokens of 0.05 s.
    assert result.jobs[1].finished == pytest.approx(1 + 10 * 2.0, abs=2.1)


@needs_simpy
def test_closed_loop_keeps_the_concurrency():
    result = fleet(max_num_seqs=8).run_closed([request()] * 9, concurrency=3)
    assert result.seconds == pytest.approx(3 * 4 * 1.2)
    assert result.tokens_per_s == pytest.approx(36 / 14.4)


# Queues and routing


@needs_simpy
def test_waiting_time_equals_the_queue_of_mdone():
    """One slot and equal requests: an M/D/1 queue (DistServe, eq. 1)."""
    arrivals = [request(time=each.time, output=1) for each in poisson(0.6, 10000.0, Lengths(), seed=4)]
    result = fleet(max_num_seqs=1).run_open(arrivals)
    mean = sum(job.finished - job.arrived for job in result.jobs) / len(result.jobs)
    assert mean == pytest.approx(mean_ttft(1.0, 0.6), rel=0.08)


@needs_simpy
@pytest.mark.parametrize("routing", ["round-robin", "least-loaded", "prefix"])
def test_every_request_ends_once(routing):
    arrivals = list(poisson(2.0, 60.0, Lengths(prompt=5, output=5, prefixes=2, prefix_tokens=3), seed=5))
    result = fleet(replicas=3, routing=routing).run_open(arrivals)
    assert len(result.jobs) == len(arrivals)
    assert all(job.emitted == job.arrival.output for job in result.jobs)
    assert sum(counts.requests for counts in result.counts) == len(arrivals)


@needs_simpy
def test_least_loaded_beats_round_robin_with_uneven_requests():
    """Every second request is long. Round robin sends all of these to the same replica."""
    arrivals = [request(time=float(i), output=20 if i % 2 else 1) for i in range(60)]
    waits = {}
    for routing in ("round-robin", "least-loaded"):
        result = fleet(replicas=2, routing=routing, max_num_seqs=2).run_open(arrivals)
        waits[routing] = sum(job.finished - job.arrived for job in result.jobs)
    assert waits["least-loaded"] < 0.9 * waits["round-robin"]


@needs_simpy
def test_prefix_routing_finds_more_cached_tokens():
    arrivals = list(poisson(1.0, 300.0, Lengths(prompt=5, output=3, prefixes=8, prefix_tokens=100), seed=6))
    hits = {}
    for routing in ("round-robin", "prefix"):
        result = fleet(replicas=4, routing=routing, prefix_cache_tokens=250).run_open(arrivals)
        hits[routing] = summarize(result)["prefix_hits"]
    assert hits["prefix"] > 1.5 * hits["round-robin"] > 0


@needs_simpy
def test_prefix_cache_is_limited():
    arrivals = [request(time=100.0 * i, prompt=11, prefix=name, prefix_tokens=10) for i, name in enumerate("abab")]
    assert fleet(prefix_cache_tokens=20).run_open(arrivals).counts[0].hit_tokens == 20
    assert fleet(prefix_cache_tokens=10).run_open(arrivals).counts[0].hit_tokens == 0


# Speculation by load


def test_speculation_by_load_is_the_best_k():
    costs = CostModel(target=PassCost(tokens=(1, 8, 64), seconds=(1.0, 1.1, 8.0), entry=0.0, pair=0.0), draft=DRAFT)
    rates = repeated((0.8,))
    policy = by_load(costs, rates)
    assert policy(1, 0.0) >= 3
    assert policy(64, 0.0) == 0
    for seqs in (1, 2, 4, 16, 64):
        speeds = [
            expected_tau(rates.first(k)) / (costs.propose(seqs, k, cached=0) + costs.verify(seqs, k, cached=0))
            for k in range(9)
        ]
        assert speeds[policy(seqs, 0.0)] == max(speeds)


def test_names_of_policies():
    assert parse_policy("off", PLAIN, SURE)(1, 0.0) == 0
    assert parse_policy("fixed:5", PLAIN, SURE)(1, 0.0) == 5
    assert parse_policy("load", PLAIN, SURE)(1, 0.0) > 0
    for text in ("fixed", "fixed:0", "fixed:x", "on"):
        with pytest.raises(OutriderError, match="use off, load, or fixed:K"):
            parse_policy(text, PLAIN, SURE)
    with pytest.raises(OutriderError, match="no acceptance rate"):
        repeated(())


def test_draws_of_acceptance():
    rng = random.Random(7)
    rates = repeated((0.9, 0.5))
    draws = [draw(rates, 3, rng) for _ in range(20000)]
    assert sum(draws) / len(draws) == pytest.approx(expected_tau((0.9, 0.5, 0.5)) - 1, rel=0.02)


# Costs


def test_projected_costs_equal_the_equations():
    costs = projected_costs("8B", "1B", "H100", MachineOverrides()).costs
    machine, _ = find_machine("H100", MachineOverrides())
    case = efficiencies(GPU, {})[1]
    for tokens in (1, 16, 512):
        expected = one_pass(find_model("8B", Bits()), machine, case, tokens=tokens, seqs=tokens, context=0).seconds
        assert costs.target(tokens, seqs=tokens, cached=0) == pytest.approx(expected)
    deep = one_pass(find_model("8B", Bits()), machine, case, tokens=8, seqs=8, context=4096).seconds
    assert costs.target(8, seqs=8, cached=4096) == pytest.approx(deep, rel=0.05)


def test_costs_from_a_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(ServerCosts(costs=COSTS, chunk_seconds=1.0, request_seconds=2.0).dumps())
    assert read_costs(str(file)) == ServerCosts(costs=COSTS, chunk_seconds=1.0, request_seconds=2.0)
    file.write_text(COSTS.dumps())
    assert read_costs(str(file)) == ServerCosts(costs=COSTS)
    for text in ("{}", "[]", "no"):
        file.write_text(text)
        with pytest.raises(OutriderError, match="has no cost model"):
            read_costs(str(file))


def test_percentiles():
    assert percentiles([]) == {}
    assert percentiles(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99}


# The command line


def run(*words):
    return invoke("fleet", *words)


@needs_simpy
def test_document_and_table():
    words = "--target 8B --draft 1B --machine H100 --replicas 1,2 --seconds 5 --speculation off,load --routing prefix"
    result = run(*words.split())
    assert result.exit_code == 0, result.output
    assert "a simulation with a cost model; no server ran" in result.stdout
    document = json.loads(result.stdout.splitlines()[-1])
    runs = document["results"]
    assert [(each["replicas"], each["speculation"]) for each in runs] == [
        (1, "off"),
        (1, "load"),
        (2, "off"),
        (2, "load"),
    ]
    assert runs[0]["k"] == 0 < runs[1]["k"]
    assert runs[2]["requests"] > runs[0]["requests"]
    assert json.loads(run(*words.split()).stdout.splitlines()[-1])["results"] == runs  # the seed decides


@needs_simpy
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--machine H100", "no costs are given"),
        ("--target 8B --machine none", "is unknown"),
        ("--target 8B --machine H100 --replicas 0", "--replicas is 0"),
        ("--target 8B --machine H100 --routing random", "use round-robin, least-loaded or prefix"),
        ("--target 8B --machine H100 --speculation always", "use off, load, or fixed:K"),
        ("--target 8B --machine H100 --arrivals poisson:x", "write poisson:RATE"),
        ("--target 8B --machine H100 --seconds 0", "no request arrives"),
        ("--target 8B --machine H100 --alpha 2", "use a share from 0 to 1"),
        ("--costs /none --target 8B", "leave --target"),
        ("--costs /none", "has no cost model (No such file or directory)"),
        ("--target 8B --machine H100 --arrivals poisson:-1", "--arrivals is 'poisson:-1'; write poisson:RATE"),
        ("--target 8B --machine H100 --arrivals trace.jsonl --seconds 9", "--seconds is for random arrivals"),
        ("--target 8B --machine H100 --prefix-tokens 64", "give --prefixes as well"),
    ],
)
def test_impossible_inputs_get_one_line(words, message):
    result = run(*words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_missing_simpy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "simpy", None)
    with pytest.raises(OutriderError, match=r"pip install .outrider\[fleet\]"):
        fleet()
