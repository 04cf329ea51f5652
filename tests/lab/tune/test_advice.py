"""Tests of the recommendations of `outrider tune`, for made-up figures."""

import json
from dataclasses import replace

import pytest

from outrider.core.params import AUTO
from outrider.core.stats import Stats
from outrider.drafting.propose.expression import command_line_form, short
from outrider.drafting.propose.registry import parse
from outrider.lab.common.memory import MemoryUse
from outrider.lab.common.trial import Variant, split
from outrider.lab.tune.advice import advise
from outrider.lab.tune.engines import other_engines
from outrider.lab.tune.figures import AcceptanceSummary, Estimate, RoundMs, figures, ratio
from outrider.lab.tune.wording import summary
from outrider.models.loader.embedded import embedded
from tests.helpers.heads import cases, write_random_head
from tests.lab.tune.trials import make_trials, make_variant, trial

MEMORY = MemoryUse(sequences=1, context=64, target_weight_bytes=50, target_cache_bytes=10)


def advise_for(speeds, **options):
    return advise(*figures(make_trials(speeds, **options), seed=0))


def summary_text(advice, memory=MEMORY):
    return " ".join(summary(advice, {advice.best.label: memory}))


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
    assert [(each.proposer, each.temperature) for each in advice.cases] == [("suffix", 0.0), ("suffix", 1.0)]
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
    trials = [replace(trial(replace(mixed, proposer="", k=0)), categories=both), replace(trial(mixed), categories=both)]
    _, (case,) = figures(trials, seed=0)
    assert [each.speedup for each in case.categories.values()] == [None, None]
    assert case.categories["code"] == AcceptanceSummary(tau=3.0, acceptance=(1.0, 1.0))


def test_summary_of_the_memory_of_a_draft():
    advice = advise_for({make_variant("draft:/some/where/small", 4): 2.0})
    memory = replace(MEMORY, draft_weight_bytes=40_000_000, draft_cache_bytes=10_000_000, target_cache_bytes=10_000_000)
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
    assert Estimate(value=1.2, low=1.1, high=1.3).is_faster
    assert not Estimate(value=1.2).is_faster


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


def test_settings_of_other_engines_for_heads(tmp_path):
    eagle3 = settings_by_engine(f"draft:{embedded('eagle31')}")
    assert '"method": "eagle3"' in eagle3["vLLM"].settings
    assert "EAGLE3" in eagle3["SGLang"].settings
    assert "draft-eagle3" in eagle3["llama.cpp"].settings
    assert "outrider export" in eagle3["vLLM"].note
    medusa = settings_by_engine(f"draft:{write_random_head(tmp_path / 'head', 'medusa')}")
    assert {each.settings for each in medusa.values()} == {None}
    assert "0.33 has removed Medusa" in medusa["vLLM"].note


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_other_engines_use_the_whole_block_of_a_head(kind, tmp_path):
    _, description = cases()[kind]
    block = description.block.draft_tokens
    settings = settings_by_engine(f"draft:{write_random_head(tmp_path / 'head', kind)}", k=2)
    assert f'"num_speculative_tokens": {block}' in settings["vLLM"].settings
    assert f"--speculative-num-draft-tokens {block + 1}" in settings["SGLang"].settings
    assert f"--spec-draft-n-max {block}" in settings["llama.cpp"].settings
    for engine, each in settings.items():
        starts = (engine, kind) != ("SGLang", "dspark")
        assert (f"{engine} computes a shorter block and accepts less" in each.note) is starts
        assert ("SGLang does not start" in each.note) is not starts
        assert f"--k {block} --out DIR" in each.note


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


def test_weights_of_the_draft_are_a_part_of_the_answer():
    stored = make_variant("draft:/x/small", 4)
    advice = advise_for(
        {
            stored: 1.3,
            replace(stored, draft_quantize="int8"): 1.5,
            replace(stored, draft_quantize="int8", k=AUTO): 1.49,
            replace(stored, draft_quantize="int4", k=8): 1.4,
        }
    )
    assert (advice.proposer, advice.draft_quantize, advice.k, advice.fixed_k) == ("draft:/x/small", "int8", AUTO, 4)
    assert advice.runner_up is None  # it is the same proposer
    assert advice.batches.speedups == ((1, advice.choice.overall.value),)
    assert "Use draft:/x/small with k auto and --draft-quantize int8." in summary_text(advice)
    assert "draft:small in int4 with k 4" in summary_text(advise_for({replace(stored, draft_quantize="int4"): 0.9}))
    assert advise_for({replace(stored, draft_quantize="int4"): 0.9}).draft_quantize is None
