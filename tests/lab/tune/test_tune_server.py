"""Tests of `outrider tune --server`: the metrics that are read, the advice, and what is refused."""

import json
from dataclasses import replace

import pytest

from outrider.errors import OutriderError
from outrider.lab.client.metrics import Speculation, read_speculation
from outrider.lab.client.server import base_url
from outrider.lab.tune.server.advice import Load, advise, best_k
from outrider.lab.tune.server.settings import check_given
from tests.helpers.commands import invoke
from tests.helpers.metrics_server import recorded, serving, vllm_metrics

OURS = """outrider_drafts_total 10.0
outrider_draft_tokens_total 40.0
outrider_accepted_tokens_total 16.0
outrider_accepted_by_position_total{position="0"} 9.0
outrider_accepted_by_position_total{position="1"} 7.0
outrider_output_tokens_total 30.0
"""
SPECULATION = Speculation(
    engine="vLLM",
    drafts=100,
    draft_tokens=400,
    accepted_tokens=150,
    accepted_by_position=(80, 50, 15, 5),
    output_tokens=250,
    accept_length=None,
)


def tune(*arguments):
    """Run the command and return its result and its document."""
    result = invoke("tune", "--max-tokens", "4", "--json", *arguments)
    document = json.loads(result.stdout.splitlines()[-1]) if result.exit_code == 0 else None
    return result, document


def test_metrics_of_engines():
    vllm = read_speculation(vllm_metrics(1))
    assert (vllm.engine, vllm.drafts, vllm.accepted_tokens, vllm.accepted_by_position) == ("vLLM", 10, 13, (8, 5))
    assert vllm.tau == pytest.approx(2.3)
    assert vllm.acceptance == pytest.approx(0.65)
    assert vllm.reach == (0.8, 0.5)
    ours = read_speculation(OURS)
    assert (ours.engine, ours.tau, ours.reach) == ("Outrider", 2.6, (0.9, 0.7))
    llama = read_speculation(vllm_metrics(1).replace("vllm:generation", "llamacpp:x").replace("vllm:", "llamacpp:"))
    assert (llama.engine, llama.reach) == ("llama.cpp", (0.8, 0.5))
    sglang = read_speculation("sglang:spec_accept_length 2.5\nsglang:generation_tokens_total 9\n")
    assert (sglang.engine, sglang.tau, sglang.on, sglang.output_tokens) == ("SGLang", 2.5, True, 9)
    assert read_speculation("vllm:generation_tokens_total 9\n").known is False
    assert vllm.since(read_speculation(vllm_metrics(0))).drafts == 10
    with pytest.raises(OutriderError, match="not in the Prometheus text format"):
        read_speculation("<html>")


def test_recorded_metrics_of_vllm():
    speculation = read_speculation(recorded("vllm-0.32.txt"))
    assert speculation == Speculation(
        engine="vLLM",
        drafts=61,
        draft_tokens=244,
        accepted_tokens=151,
        accepted_by_position=(48, 42, 34, 27),
        output_tokens=200,
        accept_length=None,
    )
    plain = read_speculation(recorded("vllm-0.32-plain.txt"))
    assert (plain.engine, plain.known, plain.output_tokens) == ("vLLM", False, 224)
    without_stats = read_speculation(recorded("vllm-0.32-no-stats.txt"))
    assert (without_stats.engine, without_stats.known, without_stats.output_tokens) == ("", False, None)


def test_recorded_metrics_of_llamacpp():
    speculation = read_speculation(recorded("llama.cpp-b11434.txt"))
    assert speculation == Speculation(
        engine="llama.cpp",
        drafts=75,
        draft_tokens=287,
        accepted_tokens=178,
        accepted_by_position=(60, 49, 39, 30),
        output_tokens=264,
        accept_length=None,
    )
    plain = read_speculation(recorded("llama.cpp-b11434-plain.txt"))
    assert (plain.engine, plain.known, plain.on, plain.drafts) == ("llama.cpp", True, False, 0)


def test_the_best_k_weighs_gain_against_cost():
    load = Load(concurrency=1, tokens_per_s=200, plain_tokens_per_s=100, speculation=SPECULATION)
    # tau is 2.5, so that a round takes 1.25 times as long, and each of 4 draft tokens 0.0625 of a plain round.
    speedups = [1, 1.8 / 1.0625, 2.3 / 1.125, 2.45 / 1.1875, 2.5 / 1.25]
    assert best_k(load) == max(range(5), key=speedups.__getitem__) == 3
    assert best_k(replace(load, plain_tokens_per_s=400)) == 0
    assert best_k(replace(load, plain_tokens_per_s=None)) is None


def test_advice():
    fast = Load(concurrency=1, tokens_per_s=200, plain_tokens_per_s=100, speculation=SPECULATION)
    slow = Load(concurrency=16, tokens_per_s=300, plain_tokens_per_s=400, speculation=SPECULATION)
    text = " ".join(advise([fast, slow], "vLLM"))
    assert "Speculation is on" in text
    assert "A pass emits 2.50 tokens." in text
    assert "80%, 50%, 15%, 5%" in text
    assert "2.00 at 1, 0.75 at 16" in text
    assert "Set 3 draft tokens in place of 4" in text
    assert "DFlash or DSpark head is an exception: keep the k of its whole block" in text
    assert "[[1, 15, 3], [16, 512, 0]]" in text
    assert "Speculation loses at these requests at a time: 16 (0.75 of the tokens/s without it)" in text
    slowest = replace(slow, tokens_per_s=100)
    assert "slows every measured load down: switch it off" in advise([slowest], "vLLM")[-1]
    sglang = replace(SPECULATION, engine="SGLang", accepted_by_position=())
    even = [replace(slow, tokens_per_s=tokens_per_s, speculation=sglang) for tokens_per_s in (300, 390)]
    assert "no clear gain at any measured load. Measure more" in advise(even, "SGLang")[-1]
    idle = [replace(fast, speculation=replace(SPECULATION, drafts=0, draft_tokens=0))]
    assert advise(idle, "vLLM", configured=True)[0].startswith("Speculation is on in vLLM, but")
    assert advise(idle, "vLLM", configured=False)[0].startswith("Speculation is off in vLLM; set it with --spec")
    assert "speculation is off, or the drafter proposes nothing here; set it with" in advise(idle, "SGLang")[0]
    unmeasured = advise([replace(fast, speculation=None)], "")
    assert "acceptance is unknown" in unmeasured[0]
    assert "2.00 at 1 requests" in unmeasured[1]
    wrong = replace(SPECULATION, accepted_by_position=(2, 0))
    assert "does not belong to this target" in " ".join(advise([replace(fast, speculation=wrong)], ""))
    unknown = advise([replace(fast, plain_tokens_per_s=None)], "SGLang")
    assert "--baseline" in unknown[-1]


def test_a_loss_at_one_request_is_said():
    """Found on a server with 0.72 times the tokens/s at one request, and a gain at four."""
    slow = Load(concurrency=1, tokens_per_s=72, plain_tokens_per_s=100, speculation=SPECULATION)
    fast = Load(concurrency=4, tokens_per_s=300, plain_tokens_per_s=200, speculation=SPECULATION)
    loss = "Speculation loses at these requests at a time: 1 (0.72 of the tokens/s without it)"
    text = " ".join(advise([slow, fast], "llama.cpp"))
    assert f"{loss}: send such loads to a server without speculation." in text
    assert "[[1, 3, 0], [4, 512, 2]]" in " ".join(advise([fast, slow], "vLLM"))
    assert f"{loss}: use --k auto" in " ".join(advise([slow, fast], "Outrider"))


def test_a_shorter_draft_that_is_estimated_to_gain_is_named():
    load = Load(concurrency=1, tokens_per_s=72, plain_tokens_per_s=100, speculation=SPECULATION)
    loss, shorter = advise([load], "Outrider")[-2:]
    assert loss == "Speculation loses at these requests at a time: 1 (0.72 of the tokens/s without it)."
    # A round takes 2.5 / 0.72 times as long as a plain one: 0.618 of a plain round for each of 4 draft tokens.
    assert shorter.startswith("Set 1 draft token in place of 4")
    assert f"Estimated: {1.8 / 1.618:.2f} times the tokens/s at 1 requests at a time" in shorter
    assert "switch speculation off if it still loses" in shorter


def test_command_with_a_baseline():
    with serving(vllm_metrics, fields=("ignore_eos",)) as (url, bodies), serving(None) as (plain, plain_bodies):
        result, document = tune("--server", url, "--baseline", plain, "--batch", "1,3", "--num-requests", "6")
    assert result.exit_code == 0, result.output
    assert document["engine"] == "vLLM"
    first, second = document["loads"]
    assert (first["concurrency"], second["concurrency"]) == (1, 3)
    assert first["tau"] == pytest.approx(2.3)
    assert first["accepted_by_position"] == [0.8, 0.5]
    assert first["counters"]["drafts"] == 60  # of 6 requests
    assert first["speedup"] == pytest.approx(first["tokens_per_s"] / first["plain_tokens_per_s"])
    assert len(bodies) == len(plain_bodies) == 1 + 6 + 6
    assert all("ignore_eos" not in body for body in bodies)
    assert all(body["ignore_eos"] for body in plain_bodies)


@pytest.mark.parametrize(
    ("file", "slots", "advice"),
    [
        ("llama.cpp-b11434-plain.txt", [{"speculative": False}], "Speculation is off in llama.cpp; set it with"),
        ("llama.cpp-b11434-plain.txt", [{"speculative": True}], "Speculation is on in llama.cpp, but it verified no"),
        ("llama.cpp-b11434-plain.txt", None, "llama.cpp verified no draft token: speculation is off, or"),
        ("vllm-0.32-plain.txt", None, "Speculation is off in vLLM; set it with --speculative-config"),
        ("vllm-0.32.txt", None, "Speculation is on in vLLM, but it verified no"),  # the counters stay
    ],
)
def test_a_server_that_verifies_nothing(file, slots, advice):
    with serving(lambda _: recorded(file), slots=slots) as (url, _):
        result, document = tune("--server", url, "--batch", "1", "--num-requests", "1")
    assert result.exit_code == 0, result.output
    assert document["advice"][0].startswith(advice)
    assert len(document["advice"]) == 1


def test_a_baseline_replaces_metrics():
    without_stats = recorded("vllm-0.32-no-stats.txt")
    with serving(lambda _: without_stats) as (url, _), serving(None) as (plain, _):
        result, document = tune("--server", url, "--baseline", plain, "--batch", "1", "--num-requests", "1")
        refused, _ = tune("--server", url)
    assert result.exit_code == 0, result.output
    assert document["engine"] is None
    assert document["loads"][0]["counters"] is None
    assert document["advice"][0].startswith("The server has no metrics of a known engine")
    assert document["advice"][1].startswith("Tokens/s over those without speculation")
    assert refused.exit_code == 2
    assert "without --disable-log-stats" in refused.output


def test_our_server_switches_speculation_off_for_a_request():
    with serving(lambda _: OURS) as (url, bodies):
        result, document = tune("--server", url + "/v1", "--batch", "2")
    assert result.exit_code == 0, result.output
    assert document["loads"][0]["plain_tokens_per_s"] > 0
    assert {body.get("k") for body in bodies} == {None, 0}


def test_mistakes_have_one_line():
    with serving(None) as (url, _):
        result, _ = tune("--server", url)
        assert result.exit_code == 2
        assert "has no /metrics of a known engine; start the server with them" in result.output
    with serving(vllm_metrics, models=()) as (url, _):
        result, _ = tune("--server", url)
        assert "lists no model" in result.output
    result, _ = tune("--server", "http://127.0.0.1:9")
    assert "cannot be reached" in result.output
    for option, value, message in (
        ("--temperature", "0,1", "--temperature is 0,1, and --server measures one temperature; give one"),
        ("--temperature", "-1", "temperature is -1.0"),
        ("--batch", "0,2", "batch is 0; use at least 1"),
        ("--max-tokens", "0", "max_tokens is 0"),
    ):
        result, _ = tune("--server", "http://127.0.0.1:9", option, value)
        assert result.exit_code == 2
        assert message in result.output
    with pytest.raises(OutriderError, match="is not the URL of a server"):
        base_url("127.0.0.1:8000")
    assert base_url("http://a:1/") == "http://a:1/v1"
    assert base_url("http://a/api/v1/") == "http://a/api/v1"
    for server, given, message in (
        ("http://a", {"server", "target"}, "--target does not go with --server"),
        ("http://a", {"server", "out"}, "--out writes settings of this program"),
        (None, {"baseline"}, "--baseline needs --server"),
    ):
        with pytest.raises(OutriderError, match=message):
            check_given(server, given)
