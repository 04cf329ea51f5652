"""Sampling parameters that hold for each draft token, and seeds that fix a text whatever runs beside it."""

import pytest

from outrider.core.params import SamplingParams
from tests.field.models import BOTH, EVERY, IDS, PROMPTS, token_ids

SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}
LIKELY = (IDS["a"], IDS["b"], IDS["c"])
SETTINGS = {
    # The better the draft, the weaker was the penalty (sglang PR #33643, vllm#18902).
    "frequency_penalty": ({"frequency_penalty": 1.0}, {"frequency_penalty": 2.0}),
    # Rejected draft tokens were counted, and accepted ones twice (vmlx-swift#357).
    "presence_penalty": ({"presence_penalty": 2.0},),
    # It held for the first token only (mlx-node PR #11, sglang PR #28242).
    "repetition_penalty": ({"repetition_penalty": 1.8},),
    # It was ignored while drafts were verified (vllm PR #38467).
    "logit_bias": ({"logit_bias": dict.fromkeys(LIKELY, 20.0)}, {"logit_bias": dict.fromkeys(LIKELY, -100.0)}),
    # It was ignored without a word (TensorRT-LLM PR #17701).
    "min_p": ({"min_p": 0.2},),
}


@pytest.mark.fast_cases(
    "frequency_penalty-ngram",
    "presence_penalty-suffix",
    "repetition_penalty-itself",
    "logit_bias-random",
    "min_p-ngram",
)
@EVERY
@pytest.mark.parametrize("setting", SETTINGS)
def test_setting_holds_for_every_draft_token(native_pair, name, setting):
    """Penalties, bias and filters change plain and speculative decoding alike (see `SETTINGS` for the reports)."""
    prompts = [*PROMPTS, "aaaaaaaa"]
    draws = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})
    wanted = [
        SamplingParams(max_tokens=24, ignore_eos=True, **draw, **values)
        for draw in draws
        for values in SETTINGS[setting]
    ]
    plain = native_pair.llm("none", k=0)
    expected = [token_ids(plain.generate(prompts, params)) for params in wanted]
    without = token_ids(plain.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True, **draws[1])))
    llm = native_pair.llm(name, verifier="walk")
    assert [token_ids(llm.generate(prompts, params)) for params in wanted] == expected
    assert expected[-1] != without  # the setting has an effect


@pytest.mark.fast_cases("ngram-native", "suffix-torch", "itself-native", "random-torch")
@BOTH
@EVERY
def test_rejection_of_a_sampled_token_loses_no_token(pair, name):
    """Sampled texts have the tokens of plain decoding, with filters as well (openvino.genai#4190)."""
    for filters in ({}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}):
        params = SamplingParams(**SAMPLED, **filters)
        plain = token_ids(pair.generate("none", PROMPTS, params, k=0, verifier="walk"))
        assert token_ids(pair.generate(name, PROMPTS, params, verifier="walk")) == plain


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_draft_of_equal_distribution_is_accepted(native_pair, verifier):
    """The draft is the target: q is p, so each rule accepts what was sampled from it (transformers#47932).

    A q that is not what the draft was sampled from, such as one before the filters, would reject some.
    """
    for filters in ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}):
        llm = native_pair.llm("itself", k=4, verifier=verifier)
        llm.generate(PROMPTS, SamplingParams(**SAMPLED, **filters))
        assert llm.stats.accepted == llm.stats.offered


@EVERY
def test_a_seed_fixes_the_text_in_any_batch(native_pair, name):
    """With seeds and without in one batch, alone, in another order, and a second time.

    (vllm#6038, vllm#9441, vllm PR #10863, vllm PR #52522)
    """
    llm = native_pair.llm(name, verifier="walk")
    seeded = SamplingParams(**SAMPLED)
    unseeded = SamplingParams(**{**SAMPLED, "seed": None})
    alone = [llm.generate(prompt, seeded)[0].token_ids for prompt in PROMPTS]
    mixed = llm.generate(PROMPTS, [seeded, unseeded, seeded])
    assert [mixed[0].token_ids, mixed[2].token_ids] == [alone[0], alone[2]]
    reverse = llm.generate(PROMPTS[::-1], [unseeded, seeded, seeded])
    assert token_ids(reverse)[1:] == alone[1::-1]
    assert llm.generate(PROMPTS[0], seeded)[0].token_ids == alone[0]
