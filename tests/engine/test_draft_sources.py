"""Who made which guess, through every combination."""

from __future__ import annotations

import pytest

from outrider.core.constraint import Constraint
from outrider.core.params import SamplingParams
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.propose.registry import draft_sources
from outrider.serve.stream.drafts import drafts_of

PROMPT = "a = 1\nb = 1\nc = 1\nd = 1\n"


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("ngram", ("ngram",)),
        ("merge(ngram,first(recycle,suffix:99))", ("ngram", "recycle", "suffix")),
        ('first(draft:"a/b/x",draft:c/y)', ("draft:x", "draft:y")),
        ("mine.guess:Best", ("Best",)),
    ],
)
def test_those_who_guess_have_names(spec, names):
    assert draft_sources(spec) == names


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        ("ngram", {"ngram"}),
        ("first(ngram,recycle)", {"ngram", "recycle"}),
        ("merge(ngram,recycle)", {"ngram", "recycle", "ngram+recycle"}),
        ("merge(recycle,first(ngram,suffix))", {"ngram", "recycle", "recycle+ngram"}),
        ("switch(ngram,recycle)", {"ngram"}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_guess_is_told_with_who_made_it(spec, seen, temperature):
    llm = LLM(embedded("nano"), proposer=spec, dtype="float32", max_model_len=256, max_num_seqs=2, k=6)
    rounds, told = [], []

    def look(round):
        rounds.append(round)
        told.extend(drafts_of(round, b, llm.parts.draft_sources) for b in range(len(round.batch.seqs)))

    llm.engine.on_round = look
    llm.generate([PROMPT, "x = 2\ny = 2\nz = 2\n"], SamplingParams(max_tokens=40, temperature=temperature, seed=1))
    names = {name for each in told for name in each.source}
    assert names <= seen
    assert ("+" in "".join(names)) == spec.startswith("merge")
    assert sum(len(each.tokens) for each in told) >= llm.stats.draft_tokens > 0
    assert sum(sum(each.accepted) for each in told) >= sum(llm.stats.accepted)
    for each in told:
        assert len(each.source) == len(each.parents) == len(each.accepted) == len(each.tokens)
        assert all(parent < node for node, parent in enumerate(each.parents))
        assert all(
            each.accepted[parent] for node, parent in enumerate(each.parents) if each.accepted[node] and parent >= 0
        )


def test_what_a_grammar_forces_was_nobodys_guess():
    pytest.importorskip("llguidance")
    llm = LLM(
        embedded("nano"), proposer="merge(ngram,recycle)", dtype="float32", max_model_len=256, max_num_seqs=2, k=6
    )
    told = []
    llm.engine.on_round = lambda round: told.extend(
        drafts_of(round, b, llm.parts.draft_sources) for b in range(len(round.batch.seqs))
    )
    form = Constraint.regex('"name": "[a-z]{1,9}", "surname": "[a-z]{1,9}", "telephone number"')
    llm.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=60, constraint=form), SamplingParams(max_tokens=60)])
    assert all(len(each.source) == len(each.tokens) for each in told)
    names = {name for each in told for name in each.source}
    assert {"grammar", "ngram"} <= names
    assert all(name == "grammar" or set(name.split("+")) <= {"ngram", "recycle"} for name in names)


@pytest.mark.parametrize("spec", ["switch(merge(ngram,recycle),suffix)", "merge(ngram,recycle)"])
def test_guards_let_names_through(spec):
    llm = LLM(
        embedded("nano"), proposer=spec, dtype="float32", max_model_len=256, max_num_seqs=2, k=6, isolate_faults=True
    )
    told = []
    llm.engine.on_round = lambda round: told.extend(drafts_of(round, 0, llm.parts.draft_sources).source)
    arms = ("suffix", "merge") if spec.startswith("switch") else (None,)
    for arm in arms:
        llm.generate([PROMPT], SamplingParams(max_tokens=30, proposer=arm))
    assert {"ngram", "recycle", "ngram+recycle"} & set(told)
    assert ("suffix" in told) == (len(arms) > 1)
