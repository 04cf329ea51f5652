"""Tests of the expressions that name proposers."""

import pytest

from outrider.drafting.propose.combine import First, Merge, Switch
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.lookup.recycle import RecycleProposer
from outrider.drafting.propose.registry import alternatives, check_proposer, draft_sources, find_proposer, parse
from outrider.errors import OutriderError
from outrider.testing import ToyTarget, toy_setup


@pytest.mark.parametrize(("name", "kind"), [("merge", Merge), ("switch", Switch), ("first", First)])
def test_parts_of_a_combination(name, kind):
    proposer = find_proposer(f" {name}( ngram:2-3, recycle ) ", toy_setup(ToyTarget()))
    assert type(proposer) is kind
    assert [type(part) for part in proposer.parts] == [NgramProposer, RecycleProposer]


def test_quotes_protect_commas_and_brackets():
    expression = parse('merge(ngram,draft:"a,b(c)")')
    assert [(part.name, part.argument) for part in expression.parts] == [("ngram", ""), ("draft", "a,b(c)")]
    assert list(expression.names()) == ["merge", "ngram", "draft"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("Ngam", "did you mean ngram?"),
        ("daft:@nano", "did you mean draft?"),
        ("merg(ngram,draft:@nano)", "did you mean merge?"),
        ("merge(ngram,sufix)", "did you mean suffix?"),
        ("merge", r"merge combines others; write for example merge\(ngram,recycle\)"),
        ("no.such.module:Thing", "dotted path"),
        ("./own.py:Echo", "go there and write own:Echo"),
        (".own:Echo", "go there and write own:Echo"),
        ("math:pi", "name a class, or a function of a ProposerSetup"),
        ("ngram:1-99999999", "write ngram:1-5 .* of 32 at most"),
        ("switch(suffix,ngram:5-1)", "write ngram:1-5"),
        ("recycle:5", "recycle takes no argument"),
        ("merge(ngram)", "name two or more"),
        ("first(switch(ngram,suffix),recycle)", "make switch.* the outermost one"),
        ("", "has no name"),
        ("merge(ngram", "lacks its closing bracket"),
        ('merge(ngram,draft:"a)', "open bracket or quote"),
    ],
)
def test_mistakes_name_the_fix(spec, message):
    with pytest.raises(OutriderError, match=message):
        check_proposer(spec)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("ngram", ("ngram",)),
        ("merge(ngram,recycle)", ("merge",)),
        ("switch(draft:a/x,draft:b/y,ngram)", ("draft:x", "draft:y", "ngram")),
        ("switch(ngram,ngram)", ("ngram#1", "ngram#2")),
        ("mine.guess:Best", ("mine.guess:Best",)),
    ],
)
def test_names_of_alternatives(spec, names):
    assert alternatives(spec) == names


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("ngram", ("ngram",)),
        ("merge(ngram,first(recycle,suffix:99))", ("ngram", "recycle", "suffix")),
        ('first(draft:"a/b/x",draft:c/y)', ("draft:x", "draft:y")),
        ("mine.guess:Best", ("Best",)),
    ],
)
def test_names_of_draft_sources(spec, names):
    assert draft_sources(spec) == names
