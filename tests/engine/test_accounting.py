"""Tests of the statistics of an engine: each prompt is counted whole, and once."""

import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import Request
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.llm import LLM
from outrider.testing.toy_target import ToyTarget
from tests.helpers.engines import make_engine, run, tightened

LENGTHS = (1, 2, 7, 8, 9, 23)
NO_END: frozenset[int] = frozenset()


def prompts():
    return [[1 + (i * length) % 5 for i in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("chunk", [3, 8, 512])
def test_prompt_tokens_with_chunked_prefill(chunk):
    engine = make_engine(ToyTarget(context=64), NgramProposer, chunk=chunk)
    run(engine, prompts(), SamplingParams(), limit=6, ends=NO_END)
    assert engine.stats.prompt_tokens == sum(LENGTHS)
    assert engine.stats.output_tokens == 6 * len(LENGTHS)


def test_preempted_prompts_count_once():
    engine = make_engine(tightened(ToyTarget(context=256), 300), NgramProposer, chunk=8)
    run(engine, prompts(), SamplingParams(), limit=150, ends=NO_END)
    assert engine.cache_usage().preempted > 0
    assert engine.stats.prompt_tokens == sum(LENGTHS)


def test_unfinished_and_canceled_prompts_do_not_count():
    engine = make_engine(ToyTarget(context=64), NgramProposer, chunk=8)
    run(engine, [[1, 2, 3]], SamplingParams(), limit=2, ends=NO_END)
    engine.add(Request(id=7, prompt_token_ids=(1,) * 30, params=SamplingParams(), seed=0, end_ids=NO_END, max_tokens=2))
    engine.step()
    assert engine.stats.prompt_tokens == 3
    engine.abort(7)
    assert not engine.busy()
    assert engine.stats.prompt_tokens == 3


def test_cached_tokens_count_as_prompt_tokens():
    llm = LLM(None, proposer="ngram", k=3, dtype="float32", kernels="torch", max_num_seqs=2, max_model_len=128)
    params = SamplingParams(max_tokens=8)
    completions = [llm.generate("Once upon a time there was a king", params)[0] for _ in range(3)]
    assert llm.engine.cache_usage().hit_tokens > 0
    assert llm.stats.prompt_tokens == sum(len(each.prompt_token_ids) for each in completions)
    assert llm.stats.prompt_tokens == sum(each.stats.prompt_tokens for each in completions)
