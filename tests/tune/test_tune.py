"""The advisor: what it makes of made-up figures, and all of it end to end; plans and advice as files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider import LLM, OutriderError, SamplingParams
from outrider.bench.memory import MemoryUse
from outrider.cli.app import app
from outrider.cli.options import EngineOptions, ModelOptions
from outrider.core.config import EngineConfig
from outrider.core.params import AUTO
from outrider.core.stats import Stats
from outrider.loader.embedded import embedded
from outrider.measure.clock import DecodeSpeed
from outrider.plan.cost_planner import CostPlanner
from outrider.plan.pass_cost import PassCost
from outrider.plan.planner import FixedPlanner
from outrider.plan.store import PlanFile, model_print, proposer_name, restored
from outrider.propose.expression import pasted, short
from outrider.propose.registry import default_proposer, parse
from outrider.system.atomic_files import check_writable, write_whole
from outrider.tune.advice import advise
from outrider.tune.config import configured, settings_dict
from outrider.tune.engines import other_engines
from outrider.tune.figures import AcceptanceSummary, Estimate, RoundMs, figures, ratio
from outrider.tune.measure import is_forgetful, measure
from outrider.tune.settings import Settings, read_ks, read_proposers
from outrider.tune.trial import Trial, Variant, split
from outrider.tune.wording import summary
from tests.plan.test_plan import costs, live

PROMPTS = [
    {"category": "code", "prompt": "<|endoftext|>import os\nimport sys\n"},
    {"category": "code", "prompt": "<|endoftext|>def add(a, b):\n    return"},
    {"category": "prose", "prompt": "<|endoftext|>Once upon a time there was"},
]
FLAT = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)
FIFTH = PassCost(tokens=(1, 2), seconds=(0.2, 0.2), entry=0.0, pair=0.0)
HELD = MemoryUse(sequences=1, context=64, target_weights=50, target_cache=10)


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Costs and rates as if they had been measured: here nobody looks at speeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.engine.build.known_costs", lambda target, draft: costs(FLAT, draft and FIFTH))
        patch.setattr("outrider.bench.rates._BUFFER", 1 << 20)
        patch.setattr("outrider.bench.rates._MATRIX", (64, 64))
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("tune") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return str(file)


def invoke(*words):
    return CliRunner().invoke(app, [*map(str, words), "--threads", "1", "--dtype", "float32"])


def tune(*words):
    result = invoke("tune", "--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, *words)
    assert result.exit_code == 0, result.output
    return result


def document(result):
    return json.loads(result.stdout.splitlines()[-1])


# Made-up trials: seconds a token of prompts and of decoding.


def trial(way, heat=0, *, seconds=1.0, prefill=0.1, tokens=10, category="code", accepted=(2, 1)):
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
        variant=way,
        repeat=heat,
        tokens=tokens,
        seconds=seconds,
        prefill_seconds=prefill,
        pace=DecodeSpeed(tokens=tokens - 1, seconds=seconds - prefill),
        stats=stats,
        categories={category: stats},
        output_thirds=(stats, stats, stats),
        exact=True,
    )


def way(proposer="", k=0, batch=1, temperature=0.0):
    return Variant(proposer=proposer, k=k, batch=batch, temperature=temperature)


def measured(speeds, *, prefill=0.1, spread=0.0, heats=4):
    """Trials in which a way decodes so many times as fast as plain decoding; `spread` is how much heats differ."""
    trials = []
    for place in dict.fromkeys((each.batch, each.temperature) for each in speeds):
        here = {way(batch=place[0], temperature=place[1]): 1.0} | {
            each: speed for each, speed in speeds.items() if (each.batch, each.temperature) == place
        }
        for heat in range(heats):
            for each, speed in here.items():
                speed += 0 if each.plain else spread * (heat - (heats - 1) / 2)
                trials.append(trial(each, heat, prefill=prefill, seconds=prefill + 1 / speed))
    return trials


def answer(speeds, **how):
    return advise(*figures(measured(speeds, **how), seed=0))


def words(advice, held=HELD):
    return " ".join(summary(advice, {advice.best.variant.proposer: held}))


def test_the_fastest_is_advised():
    advice = answer({way("ngram", 2): 1.2, way("ngram", 4): 1.5, way("draft:x", 4): 1.3})
    assert (advice.proposer, advice.k, advice.fixed_k, advice.worth) == ("ngram", 4, 4, True)
    assert advice.runner_up.variant == way("draft:x", 4)
    assert not advice.close
    assert advice.best.overall.low == pytest.approx(advice.best.overall.high)
    assert advice.best.speedup.value == pytest.approx(1.5)
    assert advice.best.overall.value == pytest.approx(1.1 / (0.1 + 1 / 1.5))
    assert advice.break_even_tau == pytest.approx(1 / 1.5)  # a round as long as a plain one over 1.5, by these figures
    for part in ("Decoding is the bottleneck", "Use ngram with k 4.", "vLLM: --speculative-config", "SGLang: --spec"):
        assert part in words(advice)


def test_auto_is_preferred_where_it_is_nearly_as_fast():
    advice = answer({way("ngram", 4): 1.5, way("ngram", AUTO): 1.49, way("suffix", AUTO): 1.0})
    assert (advice.k, advice.fixed_k, advice.adaptive) == (AUTO, 4, True)
    assert "It was a little slower than a fixed k" in words(advice)
    assert '"num_speculative_tokens": 4' in words(advice)
    advice = answer({way("ngram", 4): 1.5, way("ngram", AUTO): 1.2})
    assert (advice.k, advice.adaptive) == (4, False)
    assert answer({way("ngram", AUTO): 1.5}).fixed_k == 2  # as many guesses as its passes had


def test_without_a_gain_plain_decoding_is_advised():
    advice = answer({way("ngram", 4): 0.9, way("suffix", 4): 1.01})
    assert (advice.proposer, advice.k, advice.worth) == ("none", 0, False)
    assert "Use plain decoding: the fastest proposer, suffix with k 4" in words(advice)
    assert "--speculative" not in words(advice)


def test_a_gain_that_may_be_chance_is_no_gain():
    advice = answer({way("ngram", 4): 1.2}, spread=0.35)
    assert advice.best.overall.low < 1 < 1.02 < advice.best.overall.value
    assert not advice.worth
    assert "which may be chance" in words(advice)
    alone = answer({way("ngram", 4): 1.2}, heats=1)
    assert alone.worth
    assert alone.best.overall.low is None
    assert "there is no interval" in words(alone)


def test_the_reading_of_prompts_limits_what_can_be_gained():
    advice = answer({way("ngram", 4): 4.0}, prefill=3.0)
    assert not advice.decoding
    assert advice.max_speedup == pytest.approx(4 / 3)
    assert advice.best.overall.value == pytest.approx(4 / 3.25)
    assert "Prefill is the bottleneck: 75%" in words(advice)
    assert "at most a factor of 1.3 overall" in words(advice)


def test_the_batch_from_which_it_stops_paying():
    speeds = {
        way("ngram", 4, batch=batch): speed for batch, speed in {1: 1.6, 8: 0.9, 16: 1.1, 32: 1.0, 64: 0.8}.items()
    }
    advice = answer(speeds)
    assert advice.batches.stops_paying_at_batch == 32  # at 8 it was chance or not, and at 16 it pays again
    assert "It does not pay from batch 32 on" in words(advice)
    assert "[[1, 31, 4], [32, 512, 0]]" in words(advice)
    assert answer({way("ngram", 4, batch=batch): 1.5 for batch in (8, 1)}).batches.stops_paying_at_batch is None
    assert "Only batch 1 was measured" in words(answer({way("ngram", 4): 1.5}))


def test_what_would_change_the_answer():
    speeds = {
        way("ngram", 4): 1.5,
        way("suffix", 4): 1.49,
        way("ngram", 4, temperature=1.0): 0.9,
        way("suffix", 4, temperature=1.0): 1.2,
        way("ngram", 4, batch=8): 0.8,
        way("suffix", 4, batch=8): 0.9,
    }
    said = words(answer(speeds, spread=0.02))
    assert "suffix with k 4 is too close to decide" in said
    assert "At batch 1 and temperature 1 the fastest is suffix with k 4" in said
    assert "At batch 8 and temperature 0 no proposer pays" in said


def test_categories_and_thirds_are_named_where_they_differ():
    trials = [
        each
        for heat, (category, seconds) in enumerate([("code", 0.5), ("prose", 0.9)])
        for each in (
            trial(way(), heat, category=category),
            trial(way("ngram", 4), heat, category=category, seconds=seconds),
        )
    ]
    advice = advise(*figures(trials, seed=0))
    assert advice.best.categories["code"].speedup == pytest.approx(0.9 / 0.4)
    assert "gains most on code (2.25) and least on prose (1.12)" in words(advice)
    thirds = {
        name: AcceptanceSummary(tau=tau, acceptance=())
        for name, tau in [("first", 1.0), ("middle", 1.5), ("last", 2.0)]
    }
    changed = replace(advice, best=replace(advice.best, output_thirds=thirds))
    assert "1.00 tokens per pass in their first third, 1.50 in the middle, 2.00 in the last" in words(changed)


def test_mixed_batches_tell_no_speed_by_category():
    mixed = Variant(proposer="ngram", k=4, batch=2, temperature=0.0)
    both = {"code": Stats.of_passes([(2, 2, 3)]), "prose": Stats.of_passes([(2, 0, 1)])}
    trials = [
        replace(trial(replace(mixed, proposer="", k=0)), categories=both),
        replace(trial(mixed), categories=both),
    ]
    _, (case,) = figures(trials, seed=0)
    assert [kept.speedup for kept in case.categories.values()] == [None, None]
    assert case.categories["code"] == AcceptanceSummary(tau=3.0, acceptance=(1.0, 1.0))


def test_the_price_of_a_draft():
    advice = answer({way("draft:/some/where/small", 4): 2.0})
    heavy = replace(HELD, draft_weights=40_000_000, draft_cache=10_000_000, target_cache=10_000_000)
    said = words(advice, heavy)
    assert "50 MB" in said
    assert "the memory of 5.0 sequences of 64 tokens" in said
    assert "Use draft:/some/where/small with k 4" in said
    assert "it takes no memory from the KV cache" in words(answer({way("ngram", 4): 2.0}))


def test_intervals_are_those_of_prompts():
    pairs = [((10.0, 1.0), (10.0, 2.0)), ((10.0, 1.0), (10.0, 1.0))] * 8
    ours, theirs = zip(*pairs, strict=True)
    found = ratio(ours, theirs, seed=1)
    assert found.value == pytest.approx(1.5)
    assert 1 < found.low < 1.5 < found.high < 2
    assert found == ratio(ours, theirs, seed=1)
    assert ratio(ours[:1], theirs[:1], seed=1) == Estimate(value=2.0)
    assert ratio([(0.0, 0.0)], [(0.0, 0.0)], seed=1) is None
    assert Estimate(value=1.2, low=1.1, high=1.3).sure
    assert not Estimate(value=1.2).sure


def test_rounds_of_one_prompt_are_not_two_prompts():
    trials = measured({way("ngram", 4): 1.5}, heats=1) * 2
    _, (case,) = figures(trials, seed=0)
    assert case.overall.low is None
    assert RoundMs.of(Stats()).total == 0


def test_a_round_that_was_disturbed_says_nothing_of_times():
    guessing = way("ngram", 4)
    rounds = [trial(each, seconds=1.0) for each in (way(), guessing) for _ in range(2)]
    (plain,), (case,) = figures(
        [*rounds, trial(guessing, seconds=60.0), trial(way(), prefill=50.0, seconds=90.0)], seed=0
    )
    assert case.overall.value == case.speedup.value == 1
    assert plain.prefill_share == pytest.approx(0.1)
    assert case.parts.total == pytest.approx(900 / 5)
    assert case.total.tau == 2  # of all three


def test_thirds_of_an_output():
    passes = [(2, 1, 2), (2, 0, 1), (2, 2, 3), (0, 0, 1), (2, 1, 2)]
    assert list(split(passes)) == [passes[:2], passes[2:3], passes[3:]]
    assert list(split([(0, 0, 1)])) == [[(0, 0, 1)], [], []]


def test_who_remembers_texts_is_made_anew():
    assert all(is_forgetful(parse(spec)) for spec in ("ngram", "suffix", "draft:x", "merge(ngram,draft:x)"))
    assert not any(is_forgetful(parse(spec)) for spec in ("suffix:100", "recycle", "merge(ngram,suffix:9)", "a.b:C"))


def engine(spec, k=4, stops=None):
    return {each.engine: each for each in other_engines(spec, k, stops=stops)}


def test_settings_of_other_engines():
    draft = engine("draft:small")
    config = json.loads(draft["vLLM"].settings.removeprefix("--speculative-config '").removesuffix("'"))
    assert config == {"method": "draft_model", "model": "small", "num_speculative_tokens": 4}
    assert draft["SGLang"].settings == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path small --speculative-num-steps 4"
        " --speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )
    assert '"prompt_lookup_min": 2, "prompt_lookup_max": 3' in engine("ngram:2-3")["vLLM"].settings
    assert "NGRAM" in engine("suffix")["SGLang"].settings
    assert '"suffix_decoding_max_cached_requests": 0' in engine("suffix")["vLLM"].settings
    assert "cached_requests" not in engine("suffix:99")["vLLM"].settings
    assert "use_heterogeneous_vocab" in engine("draft-tokens:small")["vLLM"].settings
    assert engine("draft-tokens:small")["SGLang"].settings is None
    for spec in ("recycle", "merge(ngram,recycle)", "none"):
        assert {each.settings for each in other_engines(spec, 4, stops=None)} == {None}
    assert "vLLM has no merge" in engine("merge(ngram,recycle)")["vLLM"].note
    assert "[[1, 7, 4], [8, 512, 0]]" in engine("ngram", stops=8)["vLLM"].note


def test_names_without_folders():
    assert short("draft:/a/b/small") == "draft:small"
    assert short('merge(ngram:1-5,draft:"/a, b/small")') == "merge(ngram:1-5,draft:small)"


def test_embedded_models_are_named_as_they_are_asked_for():
    spec = f"merge(ngram,draft:{embedded('nano')})"
    assert short(spec) == pasted(spec) == "merge(ngram,draft:@nano)"
    assert parse(pasted(spec)) == parse(spec)
    assert pasted('draft:"/a, b/small"') == 'draft:"/a, b/small"'


def test_the_answer_can_be_pasted():
    folders = {f"draft:{embedded('nano')}": "draft:@nano", "draft:/a/small": "draft:/a/small"}
    for spec, said in (*folders.items(), ("merge(ngram,suffix)", "'merge(ngram,suffix)'")):
        assert f"Use {said} with k 4." in words(answer({way(spec, 4): 1.5}))


def test_lists():
    assert read_proposers("ngram; suffix:9 ;;ngram", None) == ("ngram", "suffix:9")
    assert read_proposers('draft:"a;b"', None) == ('draft:"a;b"',)
    assert read_proposers(None, "anything") == ("ngram", "suffix")
    assert read_proposers(None, None)[-1] == f"draft:{embedded('nano')}"
    assert read_ks("2,auto,4..6") == (2, 4, 5, 6, AUTO)
    assert read_ks("auto") == (AUTO,)


@pytest.mark.parametrize(
    ("wrong", "message"),
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
    ],
)
def test_settings_are_checked_before_anything_is_loaded(wrong, message):
    with pytest.raises(OutriderError, match=message):
        Settings(**{"proposers": ("ngram",), **wrong})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--k", "many"], "--k is 'many'; use numbers of guesses and auto"),
        (["--batch", "x"], "--batch is 'x'"),
        (["--proposers", ";"], "proposers names nothing"),
        (["--proposers", "nobody"], "proposer 'nobody' is unknown"),
        (["--target", "nowhere"], "nowhere is not a folder"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--out", "nowhere/at/all.json"], "nowhere/at/all.json cannot be written"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    result = invoke("tune", *words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.fixture(scope="module")
def advised(prompts, tmp_path_factory):
    """The document of a whole run, and the file."""
    file = tmp_path_factory.mktemp("advice") / "advice.json"
    words = ["--proposers", f"ngram;suffix:500;draft:{embedded('nano')}", "--k", "2,auto", "--batch", "1,2"]
    result = tune("--prompts", prompts, *words, "--temperature", "0,1", "--out", file)
    return document(result), file, result


def test_end_to_end(advised):
    found, file, result = advised
    assert found == json.loads(file.read_text())
    assert len(found["plain"]) == 4
    assert len(found["cases"]) == 3 * 2 * 4
    draft = next(each for each in found["cases"] if each["proposer"].startswith("draft"))
    assert (draft["k"], draft["batch"], draft["temperature"]) == (2, 1, 0.0)
    assert set(draft["categories"]) == {"code", "prose"}
    assert draft["categories"]["code"]["speedup"] > 0
    assert list(draft["output_thirds"]) == ["first", "middle", "last"]
    assert all(draft["parts"][part] > 0 for part in ("draft", "target", "host"))
    assert 1 <= draft["total"]["tau"] <= 3
    assert len(draft["total"]["acceptance"]) == 2
    assert draft["overall"]["low"] <= draft["overall"]["value"] <= draft["overall"]["high"]
    assert draft["exact"] is True
    assert found["memory"][draft["proposer"]]["draft_weight_bytes"] > 0
    assert found["memory"]["ngram"]["draft_weight_bytes"] == 0
    assert found["memory"]["ngram"]["sequences"] == 2
    assert all(0 < plain["prefill_share"] < 1 for plain in found["plain"])
    assert found["advice"]["bottleneck"] in ("decoding", "prefill")
    for sentence in found["summary"]:
        assert f"- {sentence}" in result.stdout
    assert "use it as --config" in result.stderr


def test_a_measurement_is_not_lost_with_its_file(prompts, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name, message in (("folder", "Is a directory"), ("none/a.json", "cannot be written")):
        result = invoke("tune", "--out", tmp_path / name)  # before anything is measured
        assert result.exit_code == 2
        assert message in result.stderr
    monkeypatch.setattr("outrider.cli.app.check_writable", lambda path: None)
    words = ["--proposers", "ngram", "--k", 2, "--batch", 1, "--limit", 1, "--out", tmp_path / "folder"]
    result = invoke("tune", "--prompts", prompts, "--max-tokens", 6, "--max-model-len", 96, "--repeats", 1, *words)
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert document(result)["settings"]["target"] is None


def test_histories_do_not_remember_the_answers(prompts):
    """A suffix tree of finished outputs knows nothing of a prompt that was only met as another contestant's."""
    found = document(tune("--prompts", prompts, "--proposers", "suffix;suffix:5000", "--k", "2,4", "--batch", "1"))
    by_way = {(case["proposer"], case["k"]): case["total"]["tau"] for case in found["cases"]}
    # The three texts have little in common: had plain decoding or k 2 left them, nearly every guess would be kept.
    assert by_way["suffix:5000", 4] < 2


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("names", [("eagle31", "medusa"), ("medusa", "eagle31")])
def test_drafts_that_look_at_different_layers(names, kernels, prompts):
    specs = [f"draft:{embedded(name)}" for name in names]
    words = ["--proposers", ";".join(specs), "--k", 2, "--batch", 1, "--limit", 1, "--kernels", kernels]
    found = document(tune("--prompts", prompts, *words))
    assert {case["proposer"] for case in found["cases"]} == set(specs)
    assert all(case["total"]["tau"] > 1 for case in found["cases"])


def advice_file(path, **settings):
    """A file with settings as if they had been found."""
    asked = Settings(proposers=("ngram",), target=settings.pop("target", None), dtype="float32")
    found = settings_dict(
        asked,
        proposer=settings.pop("proposer", "ngram"),
        k=settings.pop("k", 3),
        verifier=settings.pop("verifier", "walk"),
    )
    path.write_text(json.dumps({"benchmark": "outrider tune", "version": 1, "settings": found}))
    return path


def test_config_fills_in_what_is_not_given(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="merge(ngram,suffix:9)", k=AUTO))
    assert configured(ModelOptions(threads=3), file, given={"threads"}) == ModelOptions(
        proposer="merge(ngram,suffix:9)", k=AUTO, verifier="walk", dtype="float32", threads=3
    )
    given = EngineOptions(k=7, dtype="bfloat16")
    found = configured(given, file, given={"k", "dtype"})
    assert (found.k, found.dtype, found.proposer) == (7, "bfloat16", "merge(ngram,suffix:9)")
    # k and verifier were found for the file's proposer, not for this one.
    other = configured(EngineOptions(proposer="ngram"), file, given={"proposer"})
    assert (other.proposer, other.k, other.verifier, other.dtype) == ("ngram", EngineOptions().k, None, "float32")


def test_config_on_the_command_line(tmp_path, prompts):
    file = advice_file(tmp_path / "advice.json", proposer="ngram", k=3)
    command, default = CliRunner(), EngineOptions().k
    seen = []
    patch = pytest.MonkeyPatch()
    with patch.context() as changed:
        changed.setattr("outrider.cli.run.load", lambda models, **_: seen.append(models))
        changed.setattr("outrider.cli.run.converse", lambda llm, params, **how: True)
        changed.setattr("outrider.cli.output.Output", lambda llm, **how: None)
        for words in ([], ["--k", str(default)], ["--proposer", "suffix"]):  # a default that is given stays
            assert command.invoke(app, ["run", "x", "--config", str(file), *words]).exit_code == 0
    assert [(models.proposer, models.k) for models in seen] == [("ngram", 3), ("ngram", default), ("suffix", default)]
    words = ["--prompts", prompts, "--limit", "1", "--repeats", "1", "--max-tokens", "4", "--threads", "1"]
    result = command.invoke(app, ["bench", "--config", str(file), *words])
    assert result.exit_code == 0, result.output
    arguments = document(result)["arguments"]
    assert (arguments["proposer"], arguments["k"], arguments["verifier"]) == ("ngram", 3, "walk")
    assert arguments["dtype"] == "float32"


def advice(**settings):
    """A file's content, with settings of any kind."""
    found = dict.fromkeys(("target", "quantize")) | {"proposer": "ngram", "k": 3, "verifier": "walk", "models": {}}
    whole = found | {"dtype": "auto", "kernels": "auto"} | settings
    return json.dumps({"benchmark": "outrider tune", "version": 1, "settings": whole}).encode()


WRONG = (
    *((name, value) for name in ("target", "proposer", "verifier", "dtype", "quantize") for value in (5, ["x"])),
    *(("k", value) for value in (-1, "some", True, None, 1.5)),
    *(("models", value) for value in ([], None, {"x": 5})),
    ("proposer", None),
)


def test_config_of_plain_decoding(tmp_path):
    file = str(advice_file(tmp_path / "advice.json", proposer="none", k=0))
    assert configured(ModelOptions(), file, given=()).k == 0
    with pytest.raises(OutriderError, match="advises plain decoding, which leaves nothing to compare"):
        configured(EngineOptions(), file, given=(), least=1)
    with pytest.raises(OutriderError, match="advises plain decoding, and k was given"):
        configured(EngineOptions(k=8), file, given={"k"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "it is no text"),
        (b"{", "is no advice"),
        (b"[]", "is no advice"),
        (b'{"benchmark": "outrider bench"}', "is no advice"),
        (b'{"benchmark": "outrider tune", "version": 9}', "of version 9, and this program reads version 1"),
        (b'{"benchmark": "outrider tune", "version": 1}', "lacks settings"),
        *((advice(**{name: value}), f"has {name} ") for name, value in WRONG),
        (advice(proposer=f"draft:{embedded('nano')}"), "does not say what .*nano was"),
    ],
)
def test_config_that_is_none(tmp_path, content, message):
    file = tmp_path / "advice.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        configured(EngineOptions(), str(file), given=())


def test_config_whose_models_are_gone(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        shutil.copytree(embedded("nano"), folder)
    file = str(advice_file(tmp_path / "advice.json", target=str(target), proposer=f"draft:{draft}"))
    assert configured(EngineOptions(), file, given=()).proposer == f"draft:{draft}"
    shutil.rmtree(draft)
    with pytest.raises(OutriderError, match=r"draft, which .*advice.json is about, is gone; name its place"):
        configured(EngineOptions(), file, given=())
    assert configured(EngineOptions(proposer="ngram"), file, given={"proposer"}).target == str(target)
    (target / "config.json").write_text((target / "config.json").read_text() + "\n")
    with pytest.raises(OutriderError, match="target has changed since"):
        configured(EngineOptions(proposer="ngram"), file, given={"proposer"})
    assert configured(EngineOptions(target="x", proposer="ngram"), file, given={"proposer", "target"}).target == "x"


def test_config_is_read_from_anywhere(tmp_path, monkeypatch):
    shutil.copytree(embedded("nano"), tmp_path / "small, draft")
    monkeypatch.chdir(tmp_path)
    asked = Settings(proposers=("ngram",))
    found = settings_dict(asked, proposer='merge(ngram:1-3,draft:"small, draft")', k=2, verifier="walk")
    assert found["proposer"] == f'merge(ngram:1-3,draft:"{tmp_path}/small, draft")'
    assert list(found["models"]) == [f"{tmp_path}/small, draft"]


# What a planner has learned.


def disappointed():
    planner = CostPlanner(costs(FLAT, FIFTH), most=12)
    live(planner, 1, [0.0] * 12, 400, took=lambda k: (1.0, 0.2 * k))
    return planner


def test_a_restored_planner_goes_on_where_it_was():
    fresh = CostPlanner(costs(FLAT, FIFTH), most=12)
    again = CostPlanner(costs(FLAT, FIFTH), most=12)
    state = json.loads(json.dumps(disappointed().state()))
    state["proposers"][0]["idle_rounds"] = 0  # so that its next trial is not just due
    again.restore(state)
    taken = {"took": lambda k: (1.0, 0.2 * k)}
    assert again.proposers[0].acceptance == disappointed().proposers[0].acceptance
    hopeful, wary = (live(planner, 1, [0.0] * 12, 30, **taken) for planner in (fresh, again))
    assert hopeful[0] > wary[0] == 0
    assert sum(hopeful) > 2 * sum(wary)


@pytest.mark.parametrize(
    "spoil",
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
def test_a_damaged_plan_is_no_plan(tmp_path, spoil):
    file = PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram")
    planner = disappointed()
    file.save(planner)
    document = json.loads((tmp_path / "plan.json").read_text())
    spoil(document["planner"])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(OutriderError, match="is damaged; delete it"):
        file.restore(planner)


@pytest.mark.parametrize("name", ["token_cost", "tau", "nodes", "drafted", "seen"])
@pytest.mark.parametrize("value", [0.0, 1e-300, 1e14])
def test_what_a_plan_may_say_can_be_planned_with(name, value):
    planner = disappointed()
    state = planner.state()
    state["proposers"][0][name] = value
    planner.restore(state)
    live(planner, 2, [0.5] * 12, 200, took=lambda k: (1.0, 0.2 * k))
    assert json.dumps(planner.state(), allow_nan=False)


def test_a_plan_belongs_to_its_models(tmp_path):
    def plan(proposer="ngram", target="mini", **how):
        return PlanFile(tmp_path / "plan.json", target=embedded(target), proposer=proposer, **how)

    plan().restore(disappointed())  # there is none yet
    assert not list(tmp_path.iterdir())
    plan(" ngram ").save(disappointed())
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    plan().restore(disappointed())
    with pytest.raises(OutriderError, match="is of proposer ngram, not suffix; use another plan file"):
        plan("suffix").restore(disappointed())
    for other in (plan(target="nano"), plan(quantize="int8")):
        with pytest.raises(OutriderError, match="was learned with other models"):
            other.restore(disappointed())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "it is not UTF-8 text"),
        (b"{", "is not a plan file"),
        (b"[]", "is not a plan file"),
        (b"[" * 100_000, "is not a plan file"),
        (b'{"format": "outrider plan", "version": 0}', "has version 0, and this program reads version 1"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, message):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(OutriderError, match=message):
        PlanFile(tmp_path / "plan.json", target=embedded("mini"), proposer="ngram").restore(disappointed())


def test_files_are_written_whole_or_not(tmp_path):
    write_whole(tmp_path / "a.json", "one")
    write_whole(tmp_path / "a.json", "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]
    with pytest.raises(OutriderError, match=r"b.json cannot be written \(No such file or directory\)"):
        write_whole(tmp_path / "nowhere/b.json", "three")


def test_models_are_told_apart(tmp_path):
    assert model_print(embedded("mini")) != model_print(embedded("nano"))
    copy = tmp_path / "copy"
    shutil.copytree(embedded("nano"), copy)
    assert model_print(copy) == model_print(embedded("nano"))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(bytes(weights))
    assert model_print(copy) != model_print(embedded("nano"))
    assert proposer_name(FixedPlanner) == "outrider.plan.planner:FixedPlanner"


def test_one_proposer_has_one_name(tmp_path, monkeypatch):
    nano = embedded("nano")
    other = tmp_path / "link"
    other.symlink_to(nano)
    monkeypatch.chdir(nano.parent)
    names = [f"draft:{nano}", "draft:@nano", "draft:nano", "draft: ./nano/", f"draft:{other}", default_proposer(None)]
    assert {proposer_name(name) for name in names} == {"draft:nano"}
    assert proposer_name(f' merge( ngram , tree:"{nano}" )') == "merge(ngram,tree:nano)"
    assert proposer_name(f"retrieval:{nano}:3") == "retrieval:nano:3"
    assert proposer_name("ngram:1-3") == "ngram:1-3" != proposer_name("ngram")
    assert proposer_name("draft:elsewhere/nano") == "draft:elsewhere/nano"


def test_a_plan_goes_on_whatever_its_draft_is_called(tmp_path):
    plan = tmp_path / "plan.json"
    for name in (None, "draft:@nano", f"draft:{embedded('nano')}"):
        restored(plan, disappointed(), target=None, proposer=name, quantize=None).save(disappointed())


def test_a_plan_that_could_not_be_written_is_refused_before_there_is_one(tmp_path):
    with pytest.raises(OutriderError, match=r"plan.json cannot be written \(No such file .*\); name a file in"):
        llm(plan=tmp_path / "nowhere" / "plan.json")
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


def llm(**how):
    return LLM(None, max_num_seqs=2, max_model_len=96, dtype="float32", threads=1, **{"k": AUTO, **how})


def test_the_text_is_the_same_with_a_plan(tmp_path):
    prompts, params = [prompt["prompt"] for prompt in PROMPTS], SamplingParams(max_tokens=16)
    plan = tmp_path / "plan.json"
    written = [
        [completion.token_ids for completion in llm(**how).generate(prompts, params)]
        for how in ({"k": 0}, {}, {"plan": plan}, {"plan": plan})
    ]
    assert written[0] == written[1] == written[2] == written[3]
    before = json.loads(plan.read_text())
    again = llm(plan=plan)
    assert again.parts.planner.state() == before["planner"]
    for _ in again.stream(PROMPTS[0]["prompt"], params):
        pass
    assert json.loads(plan.read_text()) != before


def test_a_plan_is_for_auto_alone(tmp_path):
    with pytest.raises(OutriderError, match="is what k auto has learned, and k is 4; use k auto, or no plan"):
        llm(plan=tmp_path / "plan.json", k=4)
    with pytest.raises(OutriderError, match="needs the planner of k auto, and another planner was given"):
        llm(plan=tmp_path / "plan.json", planner=FixedPlanner(2))


def test_plans_on_the_command_line(tmp_path, prompts):
    plan = tmp_path / "plan.json"
    words = ["--k", "auto", "--plan", plan, "--proposer", "ngram", "--max-tokens", "6"]
    first = invoke("run", *words, PROMPTS[0]["prompt"])
    assert first.exit_code == 0, first.output
    learned = json.loads(plan.read_text())
    bench = ["--prompts", prompts, "--limit", "1", "--repeats", "1"]
    assert invoke("bench", *words, *bench).exit_code == 0
    assert json.loads(plan.read_text())["planner"] != learned["planner"]
    for verb, rest in (("run", ["x"]), ("bench", bench)):
        result = invoke(verb, "--plan", plan, "--k", "4", *rest)
        assert result.exit_code == 2
        assert "use k auto, or no plan" in result.stderr
    result = invoke("run", "--k", "auto", "--plan", plan, "--proposer", "suffix", "x")
    assert result.exit_code == 2
    assert "is of proposer ngram, not suffix" in result.stderr


def test_every_learned_field_is_kept():
    """What `ProposerStats` comes to learn later must come back, too."""
    planner = disappointed()
    (arm,) = planner.proposers
    fixed = {"costs", "max_draft_tokens", "trial_passes_left", "trial_seqs", "recent", "means", "saved_seconds"}
    means = {field.name for field in dataclasses.fields(arm._means)}
    assert {name.strip("_") for name in vars(arm)} - fixed | means == set(arm.state())


def test_options_of_loading_are_those_of_the_front_door():
    names = {field.name for field in dataclasses.fields(ModelOptions)}
    assert names <= {field.name for field in dataclasses.fields(EngineConfig)}


def test_time_limit_leaves_out_prompts_for_all_proposers_alike(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"<|endoftext|>def f{i}():"}) for i in range(4)))
    settings = Settings(
        target=str(embedded("nano")),
        proposers=("ngram",),
        ks=(2,),
        batches=(1,),
        prompts=str(file),
        repeats=2,
        max_tokens=4,
        threads=1,
        dtype="float32",
    )
    measured = measure(settings, Console(quiet=True), max_seconds=0.0)
    assert [trial.variant.proposer for trial in measured.trials] == ["", "ngram", "ngram", ""]
    assert sorted(trial.repeat for trial in measured.trials) == [0, 0, 1, 1]
