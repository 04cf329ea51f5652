"""Tests of `without_outputs`: proposers that are made again without the outputs that they remember."""

import pytest

from outrider import LLM, SamplingParams
from outrider.core.proposer import NoProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.drafting.propose.registry import parse
from outrider.drafting.propose.renew import remembers_outputs, without_outputs

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("spec", ["none", "ngram", "suffix", "recycle", "draft:x", "merge(ngram,draft:x)"])
def test_no_memory_of_outputs(spec):
    assert not remembers_outputs(parse(spec))


@pytest.mark.parametrize(
    "spec", ["suffix:100", "group", "merge(ngram,suffix:9)", "best(first(ngram,group),mtp)", "a.b:C"]
)
def test_memory_of_outputs(spec):
    assert remembers_outputs(parse(spec))


def test_only_parts_with_a_memory_are_made_again():
    llm = LLM(proposer="best(suffix:1000,draft:@nano)", dtype="float32", max_num_seqs=1, max_model_len=64)
    llm.generate(["import os\n"], PARAMS)
    proposer = llm.parts.proposer
    renewed = without_outputs(proposer, "best(suffix:1000,draft:@nano)", llm.parts.setup)
    assert renewed is not proposer
    assert renewed.parts[1] is proposer.parts[1]  # the draft model is not loaded again
    assert proposer.parts[0].bytes() > 0
    assert renewed.parts[0].bytes() == 0


def test_proposers_without_a_memory_stay_and_own_proposers_are_made_again():
    setup = LLM(proposer="none", dtype="float32", max_num_seqs=1, max_model_len=64).parts.setup
    ngram = NgramProposer(setup)
    assert without_outputs(ngram, "ngram", setup) is ngram
    own = NoProposer(setup)
    assert isinstance(without_outputs(own, NoProposer, setup), NoProposer)
    assert without_outputs(own, NoProposer, setup) is not own
