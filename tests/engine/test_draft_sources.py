"""Tests of the proposer names that a stream reports for draft tokens, with every combination of proposers."""

import pytest

from outrider.core.constraint import Constraint
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.serve.stream.drafts import drafts_of

PROMPT = "a = 1\nb = 1\nc = 1\nd = 1\n"


ALLOWED = {  # the sources of each proposer
    "ngram": {"ngram"},
    "first(ngram,recycle)": {"ngram", "recycle"},
    "merge(ngram,recycle)": {"ngram", "recycle", "ngram+recycle"},
    "merge(recycle,first(ngram,suffix))": {"ngram", "recycle", "recycle+ngram"},
    "switch(ngram,recycle)": {"ngram"},
}


@pytest.mark.fast_cases(
    "0.0-ngram",
    "0.0-merge(ngram,recycle)",
    "0.0-switch(ngram,recycle)",
    "1.0-first(ngram,recycle)",
    "1.0-merge(recycle,first(ngram,suffix))",
)
@pytest.mark.parametrize("spec", ALLOWED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_source_of_each_draft_token(spec, temperature):
    llm = LLM(embedded("nano"), proposer=spec, dtype="float32", max_model_len=256, max_num_seqs=2, k=6)
    drafts = []

    def record(round):
        drafts.extend(drafts_of(round, b, llm.parts.draft_sources) for b in range(len(round.batch.seqs)))

    llm.engine.on_round = record
    llm.generate([PROMPT, "x = 2\ny = 2\nz = 2\n"], SamplingParams(max_tokens=40, temperature=temperature, seed=1))
    names = {name for draft in drafts for name in draft.source}
    assert names <= ALLOWED[spec]
    assert ("+" in "".join(names)) == spec.startswith("merge")
    assert sum(len(draft.tokens) for draft in drafts) >= llm.stats.draft_tokens > 0
    assert sum(sum(draft.accepted) for draft in drafts) >= sum(llm.stats.accepted)
    for draft in drafts:
        assert len(draft.source) == len(draft.parents) == len(draft.accepted) == len(draft.tokens)
        for node, parent in enumerate(draft.parents):
            assert parent < node
            if draft.accepted[node] and parent >= 0:
                assert draft.accepted[parent]


def test_source_of_forced_tokens_is_grammar():
    pytest.importorskip("llguidance")
    llm = LLM(
        embedded("nano"), proposer="merge(ngram,recycle)", dtype="float32", max_model_len=256, max_num_seqs=2, k=6
    )
    drafts = []
    llm.engine.on_round = lambda round: drafts.extend(
        drafts_of(round, b, llm.parts.draft_sources) for b in range(len(round.batch.seqs))
    )
    constraint = Constraint.regex('"name": "[a-z]{1,9}", "surname": "[a-z]{1,9}", "telephone number"')
    params = [SamplingParams(max_tokens=60, constraint=constraint), SamplingParams(max_tokens=60)]
    llm.generate([PROMPT, PROMPT], params)
    assert all(len(draft.source) == len(draft.tokens) for draft in drafts)
    names = {name for draft in drafts for name in draft.source}
    assert {"grammar", "ngram"} <= names
    assert all(name == "grammar" or set(name.split("+")) <= {"ngram", "recycle"} for name in names)


@pytest.mark.parametrize("spec", ["switch(merge(ngram,recycle),suffix)", "merge(ngram,recycle)"])
def test_draft_sources_with_isolated_proposers(spec):
    llm = LLM(
        embedded("nano"), proposer=spec, dtype="float32", max_model_len=256, max_num_seqs=2, k=6, isolate_faults=True
    )
    sources = []
    llm.engine.on_round = lambda round: sources.extend(drafts_of(round, 0, llm.parts.draft_sources).source)
    alternatives = ("suffix", "merge") if spec.startswith("switch") else (None,)
    for alternative in alternatives:
        llm.generate([PROMPT], SamplingParams(max_tokens=30, proposer=alternative))
    assert {"ngram", "recycle", "ngram+recycle"} & set(sources)
    assert ("suffix" in sources) == (len(alternatives) > 1)
