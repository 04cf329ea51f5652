"""Models that come with Outrider, and how they are named."""

from __future__ import annotations

import pytest

from outrider.embedded import embedded
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.proposers import parse


def test_they_are_named_in_expressions():
    merged = parse("merge(ngram,draft:@nano)")
    assert merged.parts[1].argument == str(embedded("nano"))
    assert parse("draft:@nano") == parse(f"draft:{embedded('nano')}")


@pytest.mark.parametrize("name", ["", "nobody", "../models"])
def test_others_are_refused(name):
    with pytest.raises(OutriderError, match="does not come with Outrider; use @"):
        parse(f"draft:@{name}")


def test_the_draft_by_its_name_is_the_default():
    params = SamplingParams(temperature=0.0, max_tokens=12)
    named, usual = (LLM(proposer=name, rows=1, context=64, k=4) for name in ("draft:@nano", None))
    (one,), (two,) = (llm.generate(["def add(a, b):"], params) for llm in (named, usual))
    assert (one.tokens, one.stats.drafted) == (two.tokens, two.stats.drafted)


@pytest.mark.parametrize(("name", "least"), [("mtp", 1.5), ("eagle31", 1.5), ("medusa", 1.05)])
def test_heads_of_the_embedded_target_guess_for_it(name, least):
    prompts = ["def add(a, b):\n    return", "<|endoftext|><|user|>Count to ten.<|end|><|assistant|>"]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    options = {"rows": 2, "context": 128, "dtype": "float32", "verifier": "walk", "k": 4}
    ours = LLM(proposer=f"draft:@{name}", **options).generate(prompts, params)
    plain = LLM(proposer="none", **options).generate(prompts, params)
    assert [each.tokens for each in ours] == [each.tokens for each in plain]
    assert sum(each.stats.emitted for each in ours) / sum(each.stats.passes for each in ours) > least
