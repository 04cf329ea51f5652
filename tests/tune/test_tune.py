"""Tests of `outrider tune`: recommendations for made-up figures, whole runs, and files of advice and plans."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, OutriderError, SamplingParams
from outrider.benchmarking.memory import MemoryUse
from outrider.cli.app import app
from outrider.cli.options import EngineOptions, ModelOptions
from outrider.core.config import EngineConfig
from outrider.core.params import AUTO
from outrider.core.stats import Stats
from outrider.engine.default_proposer import default_proposer
from outrider.loader.embedded import embedded
from outrider.measure.clock import DecodeSpeed
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.pass_cost import PassCost
from outrider.plan.planner import FixedPlanner
from outrider.plan.store import PlanFile, model_fingerprint, proposer_name, restored
from outrider.propose.draft_model.window import WindowedTarget
from outrider.propose.expression import command_line_form, short
from outrider.propose.registry import parse
from outrider.system.atomic_files import check_writable, write_whole
from outrider.tune import measure as tune_measure
from outrider.tune.advice import advise
from outrider.tune.config import configured, settings_dict
from outrider.tune.engines import other_engines
from outrider.tune.figures import AcceptanceSummary, Estimate, RoundMs, figures, ratio
from outrider.tune.measure import VariantEngines, is_forgetful, measure
from outrider.tune.settings import Settings, default_proposers, read_ks, read_proposers
from outrider.tune.trial import Trial, Variant, split
from outrider.tune.wording import summary
from tests.helpers import tiny
from tests.plan.test_plan import costs, simulate

PROMPTS = [
    {"category": "code", "prompt": "<|endoftext|>import os\nimport sys\n"},
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n    return"},
    {"category": "prose", "prompt": "<|endoftext|>Once upon a time there was"},
]
CONSTANT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)
FIFTH = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0.0, pair=0.0)
MEMORY = MemoryUse(sequences=1, context=64, target_weights=50, target_cache=10)


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Replace measured costs and rates, because these tests do not check speeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.build.known_costs", lambda target, draft: costs(CONSTANT, draft and FIFTH))
        patch.setattr("outrider.bench.rates._BUFFER", 1 << 20)
        patch.setattr("outrider.bench.rates._MATRIX", (64, 64))
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("tune") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(file)


def invoke(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--threads", "1", "--dtype", "float32"])


def tune(*arguments):
    result = invoke("tune", "--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, *arguments)
    assert result.exit_code == 0, result.output
    return result


def document(result):
    return json.loads(result.stdout.splitlines()[-1])


# Recommendations for made-up trials.


def trial(variant, batch_number=0, *, seconds=1.0, prefill=0.1, tokens=10, category="code", accepted=(2, 1)):
    stats = Stats(
        rounds=5,
        passes=5,
        output_tokens=tokens,
        draft_tokens=10,
        offered=(5, 5),
        reached=(5, accepted[0]),
        accepted=accepted,
        target_seconds=seconds - prefill,
    )
    return Trial(
        variant=variant,
        batch_number=batch_number,
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=prefill,
        speed=DecodeSpeed(tokens=tokens - 1, seconds=seconds - prefill),
        stats=stats,
        categories={category: stats},
        output_thirds=(stats, stats, stats),
        exact=True,
    )


def make_variant(proposer="", k=0, batch=1, temperature=0.0):
    return Variant(proposer=proposer, k=k, batch=batch, temperature=temperature)


def make_trials(speeds, *, prefill=0.1, spread=0.0, batches=4):
    """Return trials of variants with these decoding speeds, relative to plain decoding.

    `spread` is the difference in speed between consecutive batches of prompts.
    """
    trials = []
    for batch, temperature in dict.fromkeys((each.batch, each.temperature) for each in speeds):
        condition_speeds = {make_variant(batch=batch, temperature=temperature): 1.0}
        for variant, speed in speeds.items():
            if (variant.batch, variant.temperature) == (batch, temperature):
                condition_speeds[variant] = speed
        for number in range(batches):
            for variant, speed in condition_speeds.items():
                speed += 0 if variant.plain else spread * (number - (batches - 1) / 2)
                trials.append(trial(variant, number, prefill=prefill, seconds=prefill + 1 / speed))
    return trials


def advise_for(speeds, **options):
    return advise(*figures(make_trials(speeds, **options), seed=0))


def summary_text(advice, memory=MEMORY):
    return " ".join(summary(advice, {advice.best.variant.proposer: memory}))


def test_fastest_proposer_is_recommended():
    advice = advise_for({make_variant("ngram", 2): 1.2, make_variant("ngram", 4): 1.5, make_variant("draft:x", 4): 1.3})
    assert (advice.proposer, advice.k, advice.fixed_k, advice.worth) == ("ngram", 4, 4, True)
    assert (advice.runner_up.proposer, advice.runner_up.k) == ("draft:x", 4)
    assert not advice.close
    assert advice.best.overall.low == pytest.approx(advice.best.overall.high)
    assert advice.best.speedup.value == pytest.approx(1.5)
    assert advice.best.overall.value == pytest.approx(1.1 / (0.1 + 1 / 1.5))
    assert advice.break_even_tau == pytest.approx(1 / 1.5)  # the time of a plain round over 1.5
    for part in ("Decoding is the bottleneck", "Use ngram with k 4.", "vLLM: --speculative-config", "SGLang: --spec"):
        assert part in summary_text(advice)


def test_auto_is_preferred_if_it_is_nearly_as_fast():
    advice = advise_for(
        {make_variant("ngram", 4): 1.5, make_variant("ngram", AUTO): 1.49, make_variant("suffix", AUTO): 1.0}
    )
    assert (advice.k, advice.fixed_k, advice.adaptive) == (AUTO, 4, True)
    assert "It was a little slower than a fixed k" in summary_text(advice)
    assert '"num_speculative_tokens": 4' in summary_text(advice)
    advice = advise_for({make_variant("ngram", 4): 1.5, make_variant("ngram", AUTO): 1.2})
    assert (advice.k, advice.adaptive) == (4, False)
    assert advise_for({make_variant("ngram", AUTO): 1.5}).fixed_k == 2  # the mean draft length of its passes


def test_plain_decoding_is_recommended_without_a_gain():
    advice = advise_for({make_variant("ngram", 4): 0.9, make_variant("suffix", 4): 1.01})
    assert (advice.proposer, advice.k, advice.worth) == ("none", 0, False)
    assert "Use plain decoding: the fastest proposer, suffix with k 4" in summary_text(advice)
    assert "--speculative" not in summary_text(advice)


def test_insignificant_gain_is_not_recommended():
    advice = advise_for({make_variant("ngram", 4): 1.2}, spread=0.35)
    assert advice.best.overall.low < 1 < 1.02 < advice.best.overall.value
    assert not advice.worth
    assert "which may be chance" in summary_text(advice)
    single_batch = advise_for({make_variant("ngram", 4): 1.2}, batches=1)
    assert single_batch.worth
    assert single_batch.best.overall.low is None
    assert "there is no interval" in summary_text(single_batch)


def test_prefill_limits_the_gain():
    advice = advise_for({make_variant("ngram", 4): 4.0}, prefill=3.0)
    assert not advice.decoding
    assert advice.max_speedup == pytest.approx(4 / 3)
    assert advice.best.overall.value == pytest.approx(4 / 3.25)
    assert "Prefill is the bottleneck: 75%" in summary_text(advice)
    assert "at most a factor of 1.3 overall" in summary_text(advice)


def test_batch_from_which_speculation_stops_paying():
    speed_by_batch = {1: 1.6, 8: 0.9, 16: 1.1, 32: 1.0, 64: 0.8}
    advice = advise_for({make_variant("ngram", 4, batch=batch): speed for batch, speed in speed_by_batch.items()})
    assert advice.batches.stops_paying_at_batch == 32  # not 8, because it pays again at 16
    assert "It does not pay from batch 32 on" in summary_text(advice)
    assert "[[1, 31, 4], [32, 512, 0]]" in summary_text(advice)
    always_pays = advise_for({make_variant("ngram", 4, batch=batch): 1.5 for batch in (8, 1)})
    assert always_pays.batches.stops_paying_at_batch is None
    assert "Only batch 1 was measured" in summary_text(advise_for({make_variant("ngram", 4): 1.5}))


def both_temperatures(speeds, **options):
    """Return the advice for temperatures 0 and 1 together. `speeds` are of each proposer, at 0 and at 1."""
    at_both = {}
    for (name, k), pair in speeds.items():
        for temperature, speed in zip((0.0, 1.0), pair, strict=True):
            at_both[make_variant(name, k, temperature=temperature)] = speed
    return advise(*figures(make_trials(at_both, **options), seed=0), every_temperature=True)


def test_one_proposer_for_all_temperatures():
    speeds = {("ngram", 4): (2.0, 1.1), ("suffix", 4): (1.7, 1.5)}
    advice = both_temperatures(speeds, prefill=0.0)
    assert (advice.proposer, advice.k, list(advice.choice.speedups)) == ("suffix", 4, [0.0, 1.0])
    assert advice.choice.overall.value == pytest.approx((1.7 * 1.5) ** 0.5)
    assert [case.variant for case in advice.cases] == [make_variant("suffix", 4, temperature=t) for t in (0.0, 1.0)]
    assert advice.others == ()
    text = summary_text(advice)
    assert "at batch 1 and temperature 0: 1.70 (1.70 to 1.70) overall" in text
    assert "at batch 1 and temperature 1: 1.50 (1.50 to 1.50) overall" in text


def test_proposer_that_loses_at_one_temperature_is_not_recommended():
    fragile, robust = ("ngram", 4), ("suffix", 4)
    advice = both_temperatures({fragile: (3.0, 0.9), robust: (1.2, 1.2)})
    assert (advice.proposer, advice.worth) == ("suffix", True)
    alone = both_temperatures({fragile: (3.0, 0.9), robust: (1.0, 0.9)})
    assert (alone.proposer, alone.k, alone.worth) == ("none", 0, False)
    assert alone.choice.loses_at == (1.0,)
    assert "times as fast overall, but 0.91 (0.91 to 0.91) at temperature 1" in summary_text(alone)
    unsure = both_temperatures({fragile: (3.0, 0.99)}, spread=0.1)
    assert unsure.worth  # 0.99 is within the chance of these prompts


def test_draft_length_is_chosen_for_all_temperatures():
    speeds = {("ngram", 8): (3.0, 0.8), ("ngram", 2): (1.5, 1.5), ("ngram", AUTO): (1.5, 1.49)}
    advice = both_temperatures(speeds)
    assert (advice.k, advice.adaptive) == (AUTO, True)


def test_summary_says_what_would_change_the_recommendation():
    speeds = {
        make_variant("ngram", 4): 1.5,
        make_variant("suffix", 4): 1.49,
        make_variant("ngram", 4, temperature=1.0): 0.9,
        make_variant("suffix", 4, temperature=1.0): 1.2,
        make_variant("ngram", 4, batch=8): 0.8,
        make_variant("suffix", 4, batch=8): 0.9,
    }
    text = summary_text(advise_for(speeds, spread=0.02))
    assert "suffix with k 4 is too close to decide" in text
    assert "At batch 1 and temperature 1 the fastest is suffix with k 4" in text
    assert "At batch 8 and temperature 0 no proposer pays" in text


def test_summary_names_categories_and_thirds_that_differ():
    trials = []
    for number, (category, seconds) in enumerate([("code", 0.5), ("prose", 0.9)]):
        trials.append(trial(make_variant(), number, category=category))
        trials.append(trial(make_variant("ngram", 4), number, category=category, seconds=seconds))
    advice = advise(*figures(trials, seed=0))
    assert advice.best.categories["code"].speedup == pytest.approx(0.9 / 0.4)
    assert "gains most on code (2.25) and least on prose (1.12)" in summary_text(advice)
    thirds = {
        name: AcceptanceSummary(tau=tau, acceptance=())
        for name, tau in [("first", 1.0), ("middle", 1.5), ("last", 2.0)]
    }
    changed = replace(advice, cases=(replace(advice.best, output_thirds=thirds),))
    sentence = "1.00 tokens per pass in the first third of an output, 1.50 in the middle, 2.00 in the last"
    assert sentence in summary_text(changed)


def test_mixed_batches_have_no_speedup_by_category():
    mixed = Variant(proposer="ngram", k=4, batch=2, temperature=0.0)
    both = {"code": Stats.of_passes([(2, 2, 3)]), "prose": Stats.of_passes([(2, 0, 1)])}
    trials = [
        replace(trial(replace(mixed, proposer="", k=0)), categories=both),
        replace(trial(mixed), categories=both),
    ]
    _, (case,) = figures(trials, seed=0)
    assert [each.speedup for each in case.categories.values()] == [None, None]
    assert case.categories["code"] == AcceptanceSummary(tau=3.0, acceptance=(1.0, 1.0))


def test_summary_of_the_memory_of_a_draft():
    advice = advise_for({make_variant("draft:/some/where/small", 4): 2.0})
    memory = replace(MEMORY, draft_weights=40_000_000, draft_cache=10_000_000, target_cache=10_000_000)
    text = summary_text(advice, memory)
    assert "50 MB" in text
    assert "the memory of 5.0 sequences of 64 tokens" in text
    assert "Use draft:/some/where/small with k 4" in text
    assert "it takes no memory from the KV cache" in summary_text(advise_for({make_variant("ngram", 4): 2.0}))


def test_interval_is_over_batches_of_prompts():
    pairs = [((10.0, 1.0), (10.0, 2.0)), ((10.0, 1.0), (10.0, 1.0))] * 8
    amounts, base = zip(*pairs, strict=True)
    estimate = ratio(amounts, base, seed=1)
    assert estimate.value == pytest.approx(1.5)
    assert 1 < estimate.low < 1.5 < estimate.high < 2
    assert estimate == ratio(amounts, base, seed=1)
    assert ratio(amounts[:1], base[:1], seed=1) == Estimate(value=2.0)
    assert ratio([(0.0, 0.0)], [(0.0, 0.0)], seed=1) is None
    assert Estimate(value=1.2, low=1.1, high=1.3).sure
    assert not Estimate(value=1.2).sure


def test_repeats_of_one_batch_have_no_interval():
    trials = make_trials({make_variant("ngram", 4): 1.5}, batches=1) * 2
    _, (case,) = figures(trials, seed=0)
    assert case.overall.low is None
    assert RoundMs.of(Stats()).total == 0


def test_disturbed_round_does_not_change_times():
    speculative = make_variant("ngram", 4)
    trials = [trial(variant, seconds=1.0) for variant in (make_variant(), speculative) for _ in range(2)]
    trials += [trial(speculative, seconds=60.0), trial(make_variant(), prefill=50.0, seconds=90.0)]
    (plain,), (case,) = figures(trials, seed=0)
    assert case.overall.value == case.speedup.value == 1
    assert plain.prefill_share == pytest.approx(0.1)
    assert case.parts.total == pytest.approx(900 / 5)
    assert case.total.tau == 2  # of all three trials


def test_split_into_output_thirds():
    passes = [(2, 1, 2), (2, 0, 1), (2, 2, 3), (0, 0, 1), (2, 1, 2)]
    assert list(split(passes)) == [passes[:2], passes[2:3], passes[3:]]
    assert list(split([(0, 0, 1)])) == [[(0, 0, 1)], [], []]


def test_proposers_that_remember_outputs():
    assert all(is_forgetful(parse(spec)) for spec in ("ngram", "suffix", "draft:x", "merge(ngram,draft:x)"))
    assert not any(is_forgetful(parse(spec)) for spec in ("suffix:100", "recycle", "merge(ngram,suffix:9)", "a.b:C"))


def settings_by_engine(spec, k=4, stops=None):
    return {each.engine: each for each in other_engines(spec, k, stops=stops)}


def test_settings_of_other_engines():
    draft = settings_by_engine("draft:small")
    config = json.loads(draft["vLLM"].settings.removeprefix("--speculative-config '").removesuffix("'"))
    assert config == {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    assert draft["SGLang"].settings == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path small --speculative-num-steps 4"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )
    assert '"prompt_lookup_min": 2, "prompt_lookup_max": 3' in settings_by_engine("ngram:2-3")["vLLM"].settings
    assert "NGRAM" in settings_by_engine("suffix")["SGLang"].settings
    assert "CUDA only" not in settings_by_engine("ngram")["SGLang"].note
    assert "verifies greedily" in settings_by_engine("ngram")["SGLang"].note
    assert draft["llama.cpp"].settings == "-md DRAFT.gguf --spec-type draft-simple --spec-draft-n-max 4"
    assert "ngram-mod" in settings_by_engine("ngram")["llama.cpp"].settings
    assert '"suffix_decoding_max_cached_requests": 0' in settings_by_engine("suffix")["vLLM"].settings
    assert "cached_requests" not in settings_by_engine("suffix:99")["vLLM"].settings
    assert "use_heterogeneous_vocab" in settings_by_engine("draft-tokens:small")["vLLM"].settings
    assert settings_by_engine("draft-tokens:small")["SGLang"].settings is None
    for spec in ("recycle", "merge(ngram,recycle)", "none"):
        assert {each.settings for each in other_engines(spec, 4, stops=None)} == {None}
    assert "vLLM has no merge" in settings_by_engine("merge(ngram,recycle)")["vLLM"].note
    assert "[[1, 7, 4], [8, 512, 0]]" in settings_by_engine("ngram", stops=8)["vLLM"].note


def test_settings_of_other_engines_for_heads():
    eagle3 = settings_by_engine(f"draft:{embedded('eagle31')}")
    assert '"method": "eagle3"' in eagle3["vLLM"].settings
    assert "EAGLE3" in eagle3["SGLang"].settings
    assert "draft-eagle3" in eagle3["llama.cpp"].settings
    assert "outrider export" in eagle3["vLLM"].note
    medusa = settings_by_engine(f"draft:{embedded('medusa')}")
    assert {each.settings for each in medusa.values()} == {None}
    assert "0.33 has removed Medusa" in medusa["vLLM"].note


def test_short_expressions_have_no_folders():
    assert short("draft:/a/b/small") == "draft:small"
    assert short('merge(ngram:1-5,draft:"/a, b/small")') == "merge(ngram:1-5,draft:small)"


def test_embedded_models_have_short_names():
    spec = f"merge(ngram,draft:{embedded('nano')})"
    assert short(spec) == command_line_form(spec) == "merge(ngram,draft:@nano)"
    assert parse(command_line_form(spec)) == parse(spec)
    assert command_line_form('draft:"/a, b/small"') == 'draft:"/a, b/small"'


def test_recommended_expression_can_be_pasted_into_a_shell():
    folders = {f"draft:{embedded('nano')}": "draft:@nano", "draft:/a/small": "draft:/a/small"}
    for spec, text in (*folders.items(), ("merge(ngram,suffix)", "'merge(ngram,suffix)'")):
        assert f"Use {text} with k 4." in summary_text(advise_for({make_variant(spec, 4): 1.5}))


def test_lists_of_proposers_and_draft_lengths():
    assert read_proposers("ngram; suffix:9 ;;ngram") == ("ngram", "suffix:9")
    assert read_proposers('draft:"a;b"') == ('draft:"a;b"',)
    backend = {"device": "cpu", "kernels": "auto", "quantize": None}
    assert default_proposers("anything", **backend) == ("ngram", "suffix")
    assert default_proposers(None, **backend)[-1] == f"draft:{embedded('nano')}"
    assert read_ks("2,auto,4..6") == (2, 4, 5, 6, AUTO)
    assert read_ks("auto") == (AUTO,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"proposers": ()}, "proposers names nothing to measure"),
        ({"proposers": ("none",)}, "plain decoding is always measured as well"),
        ({"proposers": ("merge(ngram",)}, "lacks its closing bracket"),
        ({"ks": (0,)}, "k is 0; use at least 1"),
        ({"batches": (0,)}, "batch is 0; use at least 1"),
        ({"repeats": 0}, "repeats is 0; use at least 1"),
        ({"limit": 0}, "limit is 0; use at least 1"),
        ({"max_tokens": 2}, "use at least 3"),
        ({"temperatures": (-1.0,)}, "temperature is -1"),
        ({"verifier": "nobody"}, "verifier 'nobody' is unknown"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"proposers": ("ngram", "draft:nowhere")}, "nowhere is not a folder"),
        ({"proposers": ("ngram:5-1",)}, "ngram:5-1 is no range"),
        ({"draft_window": 0}, "draft_window is 0; use at least 1"),
        ({"draft_window": 32}, "the proposer ngram has no draft that reads the text"),
        ({"draft_window": 32, "proposers": ("ngram", "suffix")}, "none of ngram, suffix has a draft that reads"),
        ({"draft_quantize": "int4"}, "draft_quantize is int4 and the proposer ngram has no draft"),
        ({"draft_quantize": "int3"}, "draft_quantize 'int3' is unknown"),
    ],
)
def test_invalid_settings(settings, message):
    with pytest.raises(OutriderError, match=message):
        Settings(**{"proposers": ("ngram",), **settings})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "many"], "--k is 'many'; use numbers of draft tokens and auto"),
        (["--batch", "x"], "--batch is 'x'"),
        (["--proposers", ";"], "proposers names nothing"),
        (["--proposers", "nobody"], "proposer 'nobody' is unknown"),
        (["--target", "nowhere"], "nowhere is not a folder"),
        (["--proposers", "ngram", "--draft-window", 32], "has no draft that reads the text"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--out", "nowhere/at/all.json"], "nowhere/at/all.json cannot be written"),
    ],
)
def test_command_errors_are_one_line(arguments, message):
    result = invoke("tune", *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.fixture(scope="module")
def tune_run(prompts, tmp_path_factory):
    """Return the document, the file and the result of a whole run."""
    file = tmp_path_factory.mktemp("advice") / "advice.json"
    arguments = ["--proposers", f"ngram;suffix:500;draft:{embedded('nano')}", "--k", "2,auto", "--batch", "1,2"]
    result = tune("--prompts", prompts, *arguments, "--temperature", "0,1", "--out", file)
    return document(result), file, result


def test_end_to_end(tune_run):
    advice, file, result = tune_run
    assert advice == json.loads(file.read_text())
    assert len(advice["plain"]) == 4
    assert len(advice["cases"]) == 3 * 2 * 4
    draft = next(each for each in advice["cases"] if each["proposer"].startswith("draft"))
    assert (draft["k"], draft["batch"], draft["temperature"]) == (2, 1, 0.0)
    assert set(draft["categories"]) == {"code", "prose"}
    assert draft["categories"]["code"]["speedup"] > 0
    assert list(draft["output_thirds"]) == ["first", "middle", "last"]
    assert all(draft["parts"][part] > 0 for part in ("draft", "target", "host"))
    assert 1 <= draft["total"]["tau"] <= 3
    assert len(draft["total"]["acceptance"]) == 2
    assert draft["overall"]["low"] <= draft["overall"]["value"] <= draft["overall"]["high"]
    assert draft["exact"] is True
    assert advice["memory"][draft["proposer"]]["draft_weight_bytes"] > 0
    assert advice["memory"]["ngram"]["draft_weight_bytes"] == 0
    assert advice["memory"]["ngram"]["sequences"] == 2
    assert all(0 < plain["prefill_share"] < 1 for plain in advice["plain"])
    assert advice["advice"]["bottleneck"] in ("decoding", "prefill")
    for sentence in advice["summary"]:
        assert f"- {sentence}" in result.stdout
    assert "use it as --config" in result.stderr


def test_file_is_checked_before_measuring_and_results_are_printed_if_writing_fails(prompts, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name, message in (("folder", "Is a directory"), ("none/a.json", "cannot be written")):
        result = invoke("tune", "--out", tmp_path / name)
        assert result.exit_code == 2
        assert message in result.stderr
    monkeypatch.setattr("outrider.cli.app.check_writable", lambda path: None)
    sizes = ["--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, "--batch", 1, "--limit", 1]
    options = ["--prompts", prompts, "--proposers", "ngram", "--k", 2, "--out", tmp_path / "folder"]
    result = invoke("tune", *options, *sizes)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert document(result)["settings"]["target"] is None


def test_proposer_does_not_remember_outputs_of_other_variants(prompts):
    """The suffix tree of one variant has no outputs of another variant for the same prompts."""
    advice = document(tune("--prompts", prompts, "--proposers", "suffix;suffix:5000", "--k", "2,4", "--batch", "1"))
    taus = {(case["proposer"], case["k"]): case["total"]["tau"] for case in advice["cases"]}
    # The outputs have little in common. With the outputs of plain decoding or of k 2 in its tree, it would accept
    # nearly every draft token.
    assert taus["suffix:5000", 4] < 2


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("names", [("eagle31", "medusa"), ("medusa", "eagle31")])
def test_draft_heads_with_different_layers(names, kernels, prompts):
    specs = [f"draft:{embedded(name)}" for name in names]
    arguments = ["--proposers", ";".join(specs), "--k", 2, "--batch", 1, "--limit", 1, "--kernels", kernels]
    advice = document(tune("--prompts", prompts, *arguments))
    assert {case["proposer"] for case in advice["cases"]} == set(specs)
    assert all(case["total"]["tau"] > 1 for case in advice["cases"])


def advice_file(path, **settings):
    """Write a file of `outrider tune` with these settings."""
    proposer = settings.pop("proposer", "ngram")
    tune_settings = Settings(
        proposers=("ngram" if proposer == "none" else proposer,),
        target=settings.pop("target", None),
        dtype="float32",
        draft_window=settings.pop("draft_window", None),
        draft_quantize=settings.pop("draft_quantize", None),
    )
    recommended = settings_dict(
        tune_settings,
        proposer=proposer,
        k=settings.pop("k", 3),
        verifier=settings.pop("verifier", "walk"),
    )
    path.write_text(json.dumps({"benchmark": "outrider tune", "version": 1, "settings": recommended}))
    return path


def test_config_replaces_defaults(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="merge(ngram,suffix:9)", k=AUTO))
    assert configured(ModelOptions(threads=3), file, given={"threads"}) == ModelOptions(
        proposer="merge(ngram,suffix:9)", k=AUTO, verifier="walk", dtype="float32", threads=3
    )
    options = configured(EngineOptions(k=7, dtype="bfloat16"), file, given={"k", "dtype"})
    assert (options.k, options.dtype, options.proposer) == (7, "bfloat16", "merge(ngram,suffix:9)")
    # The k and the verifier of the file are for its own proposer.
    other = configured(EngineOptions(proposer="ngram"), file, given={"proposer"})
    assert (other.proposer, other.k, other.verifier, other.dtype) == ("ngram", EngineOptions().k, None, "float32")


def test_draft_window_applies_to_proposers_with_a_draft(prompts):
    draft = f"draft:{embedded('nano')}"
    settings = Settings(
        proposers=("ngram", draft), prompts=prompts, draft_window=32, max_model_len=96, dtype="float32", threads=1
    )
    proposers = VariantEngines(settings).proposers
    model = proposers[draft].model
    assert isinstance(model, WindowedTarget)
    assert (model.inner.context, model.context) == (32, 96)
    window = {spec: settings_dict(settings, proposer=spec, k=2, verifier="walk")["draft_window"] for spec in proposers}
    assert window == {"ngram": None, draft: 32}


@pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
def test_draft_quantize_applies_to_proposers_with_a_draft(prompts):
    draft = f"draft:{embedded('nano')}"
    settings = Settings(
        proposers=("ngram", draft), prompts=prompts, draft_quantize="int8", max_model_len=96, dtype="float32", threads=1
    )
    proposers = VariantEngines(settings).proposers
    assert proposers[draft].model.kernels == "native int8"
    names = {spec: settings_dict(settings, proposer=spec, k=2, verifier="walk")["draft_quantize"] for spec in proposers}
    assert names == {"ngram": None, draft: "int8"}


@pytest.mark.parametrize(("name", "value", "other"), [("draft_window", 32, 48), ("draft_quantize", "int4", "int8")])
def test_draft_settings_of_a_file(tmp_path, name, value, other):
    file = str(advice_file(tmp_path / "advice.json", proposer=f"draft:{embedded('nano')}", **{name: value}))
    assert getattr(configured(ModelOptions(), file, given=()), name) == value
    assert getattr(configured(ModelOptions(**{name: other}), file, given={name}), name) == other
    # Those of the file are for its own proposer.
    assert getattr(configured(ModelOptions(proposer="ngram"), file, given={"proposer"}), name) is None
    without = tmp_path / "without.json"
    without.write_bytes(advice_bytes())  # as earlier releases wrote it
    assert getattr(configured(ModelOptions(), str(without), given=()), name) is None


def test_config_on_the_command_line(tmp_path, prompts):
    file = advice_file(tmp_path / "advice.json", proposer="ngram", k=3)
    runner = CliRunner()
    default = EngineOptions().k
    loaded = []

    def load(models, **_):
        loaded.append(models)
        return SimpleNamespace(parts=SimpleNamespace(source_rules=None))

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr("outrider.cli.run.load", load)
        patch.setattr("outrider.cli.run.converse", lambda llm, params, **_: True)
        patch.setattr("outrider.cli.output.Output", lambda llm, **_: None)
        # An option on the command line takes precedence, even if it has the default value.
        for options in ([], ["--k", str(default)], ["--proposer", "suffix"]):
            assert runner.invoke(app, ["run", "x", "--config", str(file), *options]).exit_code == 0
    expected = [("ngram", 3), ("ngram", default), ("suffix", default)]
    assert [(models.proposer, models.k) for models in loaded] == expected
    options = ["--prompts", prompts, "--limit", "1", "--repeats", "1", "--max-tokens", "4", "--threads", "1"]
    result = runner.invoke(app, ["bench", "--config", str(file), *options])
    assert result.exit_code == 0, result.output
    arguments = document(result)["arguments"]
    assert (arguments["proposer"], arguments["k"], arguments["verifier"]) == ("ngram", 3, "walk")
    assert arguments["dtype"] == "float32"


def advice_bytes(**settings):
    """Return the content of a file with these settings, which may be invalid."""
    defaults = {"target": None, "proposer": "ngram", "k": 3, "verifier": "walk", "dtype": "auto", "kernels": "auto"}
    defaults |= {"quantize": None, "models": {}}
    return json.dumps({"benchmark": "outrider tune", "version": 1, "settings": defaults | settings}).encode()


INVALID_SETTINGS = (
    *((name, value) for name in ("target", "proposer", "verifier", "dtype", "quantize") for value in (5, ["x"])),
    *(("k", value) for value in (-1, "some", True, None, 1.5)),
    *(("draft_window", value) for value in (0, "some", True, 1.5)),
    *(("draft_quantize", value) for value in ("int3", 4, True)),
    *(("models", value) for value in ([], None, {"x": 5})),
    ("proposer", None),
)


def test_config_that_recommends_plain_decoding(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="none", k=0))
    assert configured(ModelOptions(), file, given=()).k == 0
    with pytest.raises(OutriderError, match="recommends plain decoding, so there is nothing to compare"):
        configured(EngineOptions(), file, given=(), min_k=1)
    with pytest.raises(OutriderError, match="recommends plain decoding, and k was given"):
        configured(EngineOptions(k=8), file, given={"k"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"{", "is not a JSON object with fields of EngineConfig, and not a file of outrider tune"),
        (b"[]", "not a file of outrider tune or outrider fit; write it with: outrider tune --out"),
        (b'{"benchmark": "outrider bench"}', "not a file of outrider tune"),
        (b'{"benchmark": "outrider tune", "version": 9}', "has version 9, and this program reads version 1"),
        (b'{"benchmark": "outrider tune", "version": 1}', "lacks settings"),
        *((advice_bytes(**{name: value}), f"has {name} ") for name, value in INVALID_SETTINGS),
        (advice_bytes(proposer=f"draft:{embedded('nano')}"), "has no hash of .*nano"),
    ],
)
def test_invalid_config_file(tmp_path, content, message):
    file = tmp_path / "advice.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        configured(EngineOptions(), str(file), given=())


def test_config_with_missing_or_changed_models(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        shutil.copytree(embedded("nano"), folder)
    file = str(advice_file(tmp_path / "advice.json", target=str(target), proposer=f"draft:{draft}"))
    assert configured(EngineOptions(), file, given=()).proposer == f"draft:{draft}"
    shutil.rmtree(draft)
    with pytest.raises(OutriderError, match=r"draft, a model of .*advice.json, is missing; give the model"):
        configured(EngineOptions(), file, given=())
    assert configured(EngineOptions(proposer="ngram"), file, given={"proposer"}).target == str(target)
    (target / "config.json").write_text((target / "config.json").read_text() + "\n")
    with pytest.raises(OutriderError, match="target has changed since"):
        configured(EngineOptions(proposer="ngram"), file, given={"proposer"})
    assert configured(EngineOptions(target="x", proposer="ngram"), file, given={"proposer", "target"}).target == "x"


def test_config_with_gguf_files(tmp_path):
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for file in (target, draft):
        file.write_bytes(b"GGUF of " + file.name.encode())  # its content is hashed, and not read
    advice = str(advice_file(tmp_path / "advice.json", target=str(target), proposer=f"draft:{draft}"))
    options = configured(EngineOptions(), advice, given=())
    assert (options.target, options.proposer) == (str(target), f"draft:{draft}")
    draft.write_bytes(b"GGUF of another model")
    with pytest.raises(OutriderError, match=r"draft.gguf has changed since"):
        configured(EngineOptions(), advice, given=())
    target.unlink()
    with pytest.raises(OutriderError, match=r"target.gguf, a model of .*, is missing; give the model with --target"):
        configured(EngineOptions(), advice, given=())


def test_config_has_absolute_folders(tmp_path, monkeypatch):
    shutil.copytree(embedded("nano"), tmp_path / "small, draft")
    monkeypatch.chdir(tmp_path)
    expression = 'merge(ngram:1-3,draft:"small, draft")'
    settings = settings_dict(Settings(proposers=("ngram",)), proposer=expression, k=2, verifier="walk")
    assert settings["proposer"] == f'merge(ngram:1-3,draft:"{tmp_path}/small, draft")'
    assert list(settings["models"]) == [f"{tmp_path}/small, draft"]


# Plan files.


def unsuccessful_planner():
    """Return a planner whose draft tokens were all rejected."""
    planner = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    simulate(planner, 1, [0.0] * 12, 400, took=lambda k: (1.0, 0.2 * k))
    return planner


def test_restored_planner_continues_where_it_stopped():
    fresh = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    restored_planner = CostPlanner(costs(CONSTANT, FIFTH), max_draft_tokens=12)
    state = json.loads(json.dumps(unsuccessful_planner().state()))
    state["proposers"][0]["idle_rounds"] = 0  # so that no trial is due now
    restored_planner.restore(state)
    seconds = {"took": lambda k: (1.0, 0.2 * k)}
    assert restored_planner.proposers[0].acceptance == unsuccessful_planner().proposers[0].acceptance
    fresh_ks = simulate(fresh, 1, [0.0] * 12, 30, **seconds)
    restored_ks = simulate(restored_planner, 1, [0.0] * 12, 30, **seconds)
    assert fresh_ks[0] > restored_ks[0] == 0
    assert sum(fresh_ks) > 2 * sum(restored_ks)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("proposers"),
        lambda state: state["proposers"].append(state["proposers"][0]),
        lambda state: state["proposers"][0].pop("tau"),
        lambda state: state["proposers"][0]["reached"].pop(),
        lambda state: state["proposers"][0].update(tau=float("nan")),
        lambda state: state["proposers"][0].update(accepted=[-1.0] * 12),
        lambda state: state["proposers"][0].update(reached=[0.0] * 12, accepted=[0.0] * 12),
        *(
            lambda state, name=name, value=value: state["proposers"][0].update({name: value})
            for name, values in {
                "idle_rounds": [float("inf"), float("nan"), 1e308, 10**400, "5", None, [], True, 1.5, -1],
                "estimates_acceptance": ["no", 0, None, []],
                "reached": ["abcdefghijkl", None, 4.0, [[4.0]] * 12, ["4"] * 12, [1e308] * 12, [True] * 12],
                "accepted": [[float("inf")] * 12, {"0": 1}],
                "token_cost": [float("inf"), 1e308, "1", None, [1.0]],
                "tau": [1e308, float("inf"), "2", None, True, 10**400],
                "drafted": [float("-inf"), 1e308],
            }.items()
            for value in values
        ),
    ],
)
def test_damaged_plan_is_an_error(tmp_path, damage):
    file = PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram")
    planner = unsuccessful_planner()
    file.save(planner)
    document = json.loads((tmp_path / "plan.json").read_text())
    damage(document["planner"])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(OutriderError, match="is damaged; delete it"):
        file.restore(planner)


@pytest.mark.parametrize("name", ["token_cost", "tau", "nodes", "drafted", "seen"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e14])
def test_extreme_values_of_a_plan_can_be_used(name, value):
    planner = unsuccessful_planner()
    state = planner.state()
    state["proposers"][0][name] = value
    planner.restore(state)
    simulate(planner, 2, [0.5] * 12, 200, took=lambda k: (1.0, 0.2 * k))
    assert json.dumps(planner.state(), allow_nan=False)


def test_plan_is_only_for_its_models(tmp_path):
    def plan(proposer="ngram", target="mini", **options):
        return PlanFile(tmp_path / "plan.json", target=embedded(target), proposer=proposer, **options)

    plan().restore(unsuccessful_planner())  # no effect without a file
    assert not list(tmp_path.iterdir())
    plan(" ngram ").save(unsuccessful_planner())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    plan().restore(unsuccessful_planner())
    with pytest.raises(OutriderError, match="belongs to proposer ngram, not suffix; use another plan file"):
        plan("suffix").restore(unsuccessful_planner())
    for other in (plan(target="nano"), plan(quantize="int8")):
        with pytest.raises(OutriderError, match="was learned with other models"):
            other.restore(unsuccessful_planner())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "it is not UTF-8 text"),
        (b"{", "is not a plan file"),
        (b"[]", "is not a plan file"),
        (b"[" * 100_000, "is not a plan file"),
        (b'{"format": "outrider plan", "version": 0}', "has version 0, and this program reads version 2"),
    ],
)
def test_file_that_is_not_a_plan(tmp_path, content, message):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram").restore(unsuccessful_planner())


def test_files_are_written_atomically(tmp_path):
    write_whole(tmp_path / "a.json", "one")
    write_whole(tmp_path / "a.json", "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]
    with pytest.raises(OutriderError, match=r"b.json cannot be written \(No such file or directory\)"):
        write_whole(tmp_path / "nowhere/b.json", "three")


def test_model_hash_depends_on_the_weights(tmp_path):
    assert model_fingerprint(embedded("mini")) != model_fingerprint(embedded("nano"))
    copy = tmp_path / "copy"
    shutil.copytree(embedded("nano"), copy)
    assert model_fingerprint(copy) == model_fingerprint(embedded("nano"))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(weights))
    assert model_fingerprint(copy) != model_fingerprint(embedded("nano"))
    assert proposer_name(FixedPlanner) == "outrider.plan.planner:FixedPlanner"


def test_proposer_name_does_not_depend_on_the_path(tmp_path, monkeypatch):
    nano = embedded("nano")
    link = tmp_path / "link"
    link.symlink_to(nano)
    monkeypatch.chdir(nano.parent)
    names = [f"draft:{nano}", "draft:@nano", "draft:nano", "draft: ./nano/", f"draft:{link}", default_proposer(None)]
    assert {proposer_name(name) for name in names} == {"draft:nano"}
    assert proposer_name(f' merge( ngram , tree:"{nano}" )') == "merge(ngram,tree:nano)"
    assert proposer_name(f"retrieval:{nano}:3") == "retrieval:nano:3"
    assert proposer_name("ngram:1-3") == "ngram:1-3" != proposer_name("ngram")
    assert proposer_name("draft:elsewhere/nano") == "draft:elsewhere/nano"


def test_plan_works_with_every_name_of_its_draft(tmp_path):
    plan = tmp_path / "plan.json"
    for name in (default_proposer(None), "draft:@nano", f"draft:{embedded('nano')}"):
        restored(plan, unsuccessful_planner(), target=None, proposer=name, quantize=None).save(unsuccessful_planner())


def test_plan_path_is_checked_before_loading(tmp_path):
    with pytest.raises(OutriderError, match=r"plan.json cannot be written \(No such file .*\); name a file in"):
        make_llm(plan=tmp_path / "nowhere" / "plan.json")
    with pytest.raises(OutriderError, match=r"cannot be written \(Is a directory\)"):
        check_writable(tmp_path)
    with pytest.raises(OutriderError, match=r"cannot be written \(File name too long\)"):
        check_writable(tmp_path / ("x" * 1000))
    (tmp_path / "file").touch()
    with pytest.raises(OutriderError, match=r"cannot be written \(Not a directory\)"):
        check_writable(str(tmp_path / "file" / "plan.json"))
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "plan.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def make_llm(**options):
    return LLM(None, max_num_seqs=2, max_model_len=96, dtype="float32", threads=1, **{"k": AUTO, **options})


def test_output_is_the_same_with_a_plan(tmp_path):
    prompts = [prompt["prompt"] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=16)
    plan = tmp_path / "plan.json"
    plain = [completion.token_ids for completion in make_llm(k=0).generate(prompts, params)]
    for options in ({}, {"plan": plan}, {"plan": plan}):
        assert [completion.token_ids for completion in make_llm(**options).generate(prompts, params)] == plain
    before = json.loads(plan.read_text())
    llm = make_llm(plan=plan)
    assert llm.parts.planner.state() == before["planner"]
    for _ in llm.stream(PROMPTS[0]["prompt"], params):
        pass
    assert json.loads(plan.read_text()) != before


def test_plan_needs_k_auto(tmp_path):
    with pytest.raises(OutriderError, match="needs k auto, and k is 4; use k auto, or no plan"):
        make_llm(plan=tmp_path / "plan.json", k=4)
    with pytest.raises(OutriderError, match="needs the planner of k auto, and another planner was given"):
        make_llm(plan=tmp_path / "plan.json", planner=FixedPlanner(2))


def test_plans_on_the_command_line(tmp_path, prompts):
    plan = tmp_path / "plan.json"
    options = ["--k", "auto", "--plan", plan, "--proposer", "ngram", "--max-tokens", "6"]
    result = invoke("run", *options, PROMPTS[0]["prompt"])
    assert result.exit_code == 0, result.output
    saved = json.loads(plan.read_text())
    bench_options = ["--prompts", prompts, "--limit", "1", "--repeats", "1"]
    assert invoke("bench", *options, *bench_options).exit_code == 0
    assert json.loads(plan.read_text())["planner"] != saved["planner"]
    for command, arguments in (("run", ["x"]), ("bench", bench_options)):
        result = invoke(command, "--plan", plan, "--k", "4", *arguments)
        assert result.exit_code == 2
        assert "use k auto, or no plan" in result.stderr
    result = invoke("run", "--k", "auto", "--plan", plan, "--proposer", "suffix", "x")
    assert result.exit_code == 2
    assert "belongs to proposer ngram, not suffix" in result.stderr


def test_state_has_every_learned_field():
    """This fails if a new field of `ProposerStats` is missing from its state."""
    planner = unsuccessful_planner()
    (stats,) = planner.proposers
    fixed = {
        "costs",
        "max_draft_tokens",
        "trial_passes_left",
        "trial_seqs",
        "recent",
        "means",
        "saved_seconds",
        "spent_seconds",
        "plain_seconds",
        "passes",
        "observations",
        "draft_cost",
    }
    means = {field.name for field in dataclasses.fields(stats._means)}
    assert {name.strip("_") for name in vars(stats)} - fixed | means | {"round_cost", "token_cost"} == set(
        stats.state()
    )


def test_model_options_are_fields_of_the_engine_config():
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    assert names <= {field.name for field in dataclasses.fields(EngineConfig)}


def four_prompts(folder, **other):
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"<|endoftext|>def f{i}():"}) for i in range(4)))
    given = {"proposers": ("ngram",), "ks": (2,), "batches": (1,), "max_tokens": 4, "threads": 1, "dtype": "float32"}
    return Settings(target=str(embedded("nano")), prompts=str(file), **given, **other)


def test_time_limit_leaves_out_prompts_for_all_proposers_alike(tmp_path):
    settings = four_prompts(tmp_path, repeats=2)
    measured = measure(settings, Console(quiet=True), max_seconds=0.0)
    assert [trial.variant.proposer for trial in measured.trials] == ["", "ngram", "ngram", ""]
    assert sorted(trial.batch_number for trial in measured.trials) == [0, 0, 1, 1]


def test_temperatures_share_the_time_limit(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    unchanged = tune_measure.run

    def run_for_a_second(*words):
        clock.now += 1
        return unchanged(*words)

    monkeypatch.setattr(tune_measure, "run", run_for_a_second)
    monkeypatch.setattr(tune_measure, "perf_counter", lambda: clock.now)
    settings = four_prompts(tmp_path, repeats=1, temperatures=(0.0, 1.0))
    # A warm-up takes two seconds, and each prompt two. Temperature 0 has seven of the seconds.
    measured = measure(settings, Console(quiet=True), max_seconds=14.0)
    plains, _ = figures(measured.trials, seed=0)
    assert [(plain.variant.temperature, plain.batches) for plain in plains] == [(0.0, 3), (1.0, 2)]
