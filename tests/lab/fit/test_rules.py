"""Decisions of a fit, on made-up figures."""

from dataclasses import replace

import pytest

from outrider.core.config import EngineConfig
from outrider.drafting.plan.pass_cost import CostModel, PassCost
from outrider.lab.common.records import from_json
from outrider.lab.fit.option import Option
from outrider.lab.fit.outcome import Outcome, duration
from outrider.lab.fit.rules import (
    TargetSize,
    draft_quantizes,
    expected_gain,
    finalists,
    head_kind,
    plan_training,
    ranked,
)
from outrider.lab.tune.figures import RoundMs
from outrider.runtime.report.console import bytes_text
from tests.lab.fit.made_up import TRAINED, case, certificate, measured


def outcome(first, final=None, **other):
    given = {"training": None, "certificate": None, "prompts": {"train": 8, "held_out": 4}, "out": "folder"}
    given |= {"engine": EngineConfig()} | other
    return Outcome(first=first, final=final, **given)


def words(found):
    return " ".join(found.sentences())


@pytest.mark.parametrize(
    ("hidden", "layers", "kind"),
    [(512, 12, "slim"), (1024, 4, "slim"), (1025, 4, "eagle31"), (4096, 32, "eagle31"), (4096, 3, "mtp")],
)
def test_kind_of_head_follows_from_size_of_target(hidden, layers, kind):
    assert head_kind(TargetSize(hidden=hidden, layers=layers, vocab=1000)) == kind


def plan(head="auto", *, vocab=1000, minutes=30.0, prompts=1000, tokens_per_s=200.0):
    size = TargetSize(hidden=64, layers=4, vocab=vocab)
    return plan_training(head, size, minutes=minutes, prompts=prompts, max_tokens=128, tokens_per_s=tokens_per_s)


def test_generation_cycle_is_shorter_for_slow_target_and_few_prompts():
    usual = plan()
    assert (usual.batch_size, usual.steps_per_generation) == (16, 8)
    slow = plan(tokens_per_s=20.0)  # 112 seconds of answers are 17 prompts
    assert (slow.batch_size, slow.steps_per_generation) == (16, 1)
    assert plan(tokens_per_s=0.1).batch_size == 8
    few = plan(prompts=5)
    assert (few.batch_size, few.steps_per_generation) == (5, 1)


def test_named_kind_and_large_vocabulary():
    assert (plan("medusa").kind, plan("medusa").draft_vocab_size) == ("medusa", 0)
    assert plan(vocab=150_000).draft_vocab_size == 32_000
    assert plan(vocab=49_152).draft_vocab_size == 16_384
    assert plan(vocab=32_000).draft_vocab_size == 0


def costs(draft_seconds):
    target = PassCost(tokens=(1, 64), seconds=(1.0, 1.0), entry=0.0, pair=0.0)
    draft = PassCost(tokens=(1, 64), seconds=(draft_seconds, draft_seconds), entry=0.0, pair=0.0)
    return CostModel(target=target, draft=draft, host=0.0)


def test_expected_gain_is_that_of_best_draft_length():
    gain = expected_gain(costs(0.1), [0.8, 0.5, 0.01], batch=1, cached=0)
    assert gain.k == 2
    assert gain.speedup == pytest.approx((1 + 0.8 + 0.4) / 1.2)


def test_expected_gain_is_none_where_no_length_pays():
    assert expected_gain(costs(0.9), [0.5, 0.5], batch=1, cached=0) == (1.0, 0)


def test_best_case_of_each_proposer():
    cases = [case("ngram", 2, 1.1), case("suffix", 2, 1.3), case("ngram", 4, 1.4), case("suffix", 4, 0.9)]
    assert [(each.proposer, each.k) for each in ranked(cases)] == [("ngram", 4), ("suffix", 2)]


def test_best_weights_of_a_draft_are_measured_again_and_named():
    draft = "draft:/x/small"
    fast = case(draft, 4, 1.5, draft_quantize="int8")
    first = measured(fast, case(draft, 4, 1.3), case("ngram", 4, 1.2))
    assert finalists(first.cases, None) == (draft, "ngram")
    assert draft_quantizes((draft, "draft:/x/head"), first.cases) == {draft: ("int8",)}
    found = outcome(first)
    assert [option.name for option in found.options] == ["plain decoding", "draft:small in int8, k 4", "ngram, k 4"]
    assert found.options[1].verdict == "chosen"
    assert found.options[1].by_temperature[0].speedup == 1.5
    assert found.options[1].memory_bytes == 1_000_000
    assert "Chosen: draft:/x/small in int8 with k 4" in words(found)


def test_draft_token_of_k_auto_that_drafts_nothing_takes_the_time_of_the_others():
    draft = "draft:/x/small"
    idle = replace(case(draft, "auto", 1.2), nodes=0.0, parts=RoundMs(draft=0.0, target=1.0, host=0.0))
    (figures,) = outcome(measured(idle, case(draft, 4, 1.1))).drafts
    assert (figures.k, figures.token_ms) == ("auto", 0.25)


def test_draft_models_are_listed_with_their_costs_and_the_command_of_the_fastest():
    draft = "draft:/x/a model"
    cases = [case("ngram", 4, 2.0), case("ngram", 4, 1.0, temperature=1.0)]
    for k, quantize, value, taus in ((2, None, 1.1, (2, 2)), (4, "int4", 1.5, (3, 2)), (4, None, 1.3, (2, 2))):
        for temperature, tau in enumerate(taus):
            cases.append(case(draft, k, value, tau=tau, temperature=float(temperature), draft_quantize=quantize))
    engine = EngineConfig(target="/x/large", quantize="int8")
    found = outcome(measured(*cases), engine=engine)
    fastest, stored = found.drafts
    assert (fastest.draft_quantize, fastest.k, fastest.tau, fastest.token_ms) == ("int4", 4, 2.5, 0.25)
    assert (stored.draft_quantize, stored.k, stored.acceptance) == (None, 4, 0.5)
    command = "outrider run --target /x/large --quantize int8 --proposer 'draft:/x/a model' --draft-quantize int4 --k 4"
    assert f"The fastest draft model of the first measurement: {command}" in words(found)


# On SmolLM2, as docs/explanation/results/training.md gives them: the head is as fast at temperature 0, and loses at 1.
HEAD, COPY = "best(suffix:100000,draft:/x/head)", "best(suffix:100000,quantized:int4)"
ROBUST = (
    case(COPY, "auto", 1.64, low=1.5, high=1.8, tau=4.71),
    case(COPY, "auto", 1.36, low=1.2, high=1.5, tau=4.3, temperature=1.0),
)
FRAGILE = (
    case(HEAD, "auto", 1.9, low=1.7, high=2.1, tau=2.89),
    case(HEAD, "auto", 0.97, low=0.96, high=0.98, tau=1.02, temperature=1.0),
)


def test_best_over_both_temperatures_is_ranked_first():
    assert [each.proposer for each in ranked((*FRAGILE, *ROBUST))] == [COPY, HEAD]
    assert ranked(ROBUST)[0].overall.value == pytest.approx((1.64 * 1.36) ** 0.5)
    lengths = [case("ngram", 8, 2.0), case("ngram", 8, 0.9, high=0.95, temperature=1.0)]
    lengths += [case("ngram", 2, 1.2), case("ngram", 2, 1.1, temperature=1.0)]
    assert ranked(lengths)[0].k == 2  # k 8 has the higher mean, and is slower at temperature 1


def test_speedups_at_both_temperatures_are_shown():
    found = outcome(measured(*ROBUST, *FRAGILE), measured(*ROBUST, *FRAGILE))
    text = words(found)
    assert "On 4 held-out prompts it is 1.64 (1.50 to 1.80) times as fast as plain decoding at temperature 0," in text
    assert "temperature 0, 1.36 (1.20 to 1.50) at temperature 1, with 4.71 and 4.30 tokens per pass." in text
    assert [option.verdict for option in found.options] == ["the model itself", "chosen", "slower at temperature 1"]
    stored = found.as_dict()["options"][2]
    assert [each["speedup"] for each in stored["by_temperature"]] == [1.9, 0.97]
    assert from_json(Option, stored) == found.options[2]


def test_an_interval_around_1_is_no_sure_gain():
    cases = [
        case(HEAD, "auto", 1.02, low=0.95, high=1.1),
        case(HEAD, "auto", 0.95, low=0.9, high=1.06, temperature=1.0),
    ]
    found = outcome(measured(*ROBUST, *cases), measured(*ROBUST, *cases))
    assert found.options[2].verdict == "no sure gain"


def test_plain_decoding_if_every_proposer_loses_at_one_temperature():
    found = outcome(measured(*FRAGILE), measured(*FRAGILE))
    assert "on 4 held-out prompts without being slower at one of the temperatures" in words(found)


def test_prompts_without_time_are_reported():
    found = outcome(measured(*ROBUST), measured(*ROBUST, batches=3))
    assert "On held-out prompts (3 of 4 at temperature 0 and 3 of 4 at temperature 1) it is 1.64" in words(found)


def test_second_measurement_has_three_proposers_and_head():
    cases = [case("merge(suffix,recycle)", 2, 1.5), case("recycle", 2, 1.4), case("ngram", 2, 1.1)]
    cases.append(case("suffix", 2, 1.0))
    untrained = ("merge(suffix,recycle)", "recycle", "ngram")
    assert finalists(cases, None) == untrained
    assert finalists(cases, "/x/head") == (*untrained, "draft:/x/head", "best(recycle,draft:/x/head)")
    assert finalists(cases, "/x,y/head")[3] == 'draft:"/x,y/head"'


def test_second_measurement_has_a_proposer_with_a_model():
    cases = [case(name, 2, 1.5 - 0.1 * i) for i, name in enumerate(("suffix", "ngram", "recycle", "suffix:9"))]
    cases += [case("best(suffix,quantized:int4)", 2, 1.05), case("quantized:int4", 2, 1.0)]
    assert finalists(cases, None) == ("suffix", "ngram", "recycle", "best(suffix,quantized:int4)")


def test_second_measurement_has_one_file_of_a_draft_model():
    names = ("draft:/a-Q4.gguf", "draft:/a-Q8.gguf", "draft:/a-F16.gguf", "draft:/b-Q8.gguf", "ngram")
    cases = [case(name, 2, 1.5 - 0.1 * i) for i, name in enumerate(names)]
    models = {name: name[:8] for name in names[:4]}
    assert finalists(cases, None, models=models) == (names[0], names[3], "ngram")


def test_only_lookups_are_merged_with_head():
    assert finalists([case("draft:/x/small", 2, 1.5)], "/x/head") == ("draft:/x/small", "draft:/x/head")


def test_plain_decoding_is_chosen_if_nothing_pays():
    first = measured(case("ngram", 2, 1.01, low=0.9, high=1.1), case("suffix", 2, 0.7))
    found = outcome(first, first)
    assert not found.speculates
    assert [(option.name, option.verdict) for option in found.options] == [
        ("plain decoding", "chosen"),
        ("ngram, k 2", "no sure gain"),
        ("suffix, k 2", "slower than plain decoding"),
    ]
    assert words(found).startswith("Chosen: plain decoding. No proposer is significantly faster")


def test_fastest_is_chosen_on_held_out_prompts():
    first = measured(case("ngram", 2, 1.4), case("recycle", 2, 1.1))
    final = measured(
        case("draft:/x/head", 4, 1.5, low=1.2, high=1.8, tau=2.5), case("ngram", 2, 1.3, low=1.1, high=1.5)
    )
    found = outcome(first, final, training=TRAINED, certificate=certificate(True))
    assert found.speculates
    assert [(option.name, option.verdict, option.held_out) for option in found.options] == [
        ("plain decoding", "the model itself", True),
        ("draft:head, k 4", "chosen", True),
        ("ngram, k 2", "faster than plain decoding", True),
        ("recycle, k 2", "first measurement only", False),
    ]
    assert found.options[1].memory_bytes == 2_000_000
    text = words(found)
    assert "1.50 (1.20 to 1.80) times as fast as plain decoding at temperature 0, with 2.50 tokens per pass." in text
    assert "It takes 2.0 MB" in text
    assert "1.0M parameters and trained for 2 minutes (50 steps): tau 1.50 at temperature 0" in text
    assert "The certificate passed: 12 texts" in text
    assert "--config folder/fit.json" in text


def test_proposer_whose_certificate_failed_is_not_chosen():
    final = measured(case("suffix", 2, 1.5, low=1.2, high=1.8))
    found = outcome(final, final, certificate=certificate(False))
    assert not found.speculates
    assert [option.verdict for option in found.options] == ["chosen", "not exact here: the certificate failed"]
    assert "a test of its certificate failed" in words(found)


def test_missing_certificate_is_reported():
    final = measured(case("suffix", 2, 1.5, low=1.2, high=1.8))
    assert "It is not certified." in words(outcome(final, final))
    reason = {"passed": None, "reason": "too little memory"}
    found = outcome(final, final, certificate=reason)
    assert found.speculates
    assert "the audit could not be made: too little memory" in words(found)


def test_unfinished_fit_says_so():
    first = measured(case("suffix", 2, 1.5))
    found = outcome(first)
    assert not found.complete
    assert "best so far" in words(found)
    assert "the first measurement" in words(found)


def test_head_that_was_not_trained_has_a_reason():
    first = measured(case("suffix", 2, 1.5))
    found = outcome(first, training={"trained": False, "minutes": 1.0, "reason": "it is recurrent"})
    assert "No head was trained: it is recurrent." in words(found)


def test_amounts_in_words():
    assert (duration(1.0), duration(30.0), duration(0.5)) == ("1 minute", "30 minutes", "0.5 minutes")
    assert (bytes_text(2_500_000), bytes_text(3_210_000_000)) == ("2.5 MB", "3.2 GB")
