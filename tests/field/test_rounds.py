"""Rounds without drafts, requests that go away, and caches that several sequences share."""

from dataclasses import replace

import pytest

from outrider.core.params import SamplingParams
from outrider.core.planner import FixedPlanner
from tests.field.models import BOTH, EVERY, GREEDY, KERNELS, PROMPTS, make_pair, token_ids
from tests.helpers import tiny


class Alternating(FixedPlanner):
    """Draft in every third round only."""

    rounds = 0

    def plan(self, batch, stats):
        self.rounds += 1
        planned = super().plan(batch, stats)
        return planned if self.rounds % 3 == 0 else planned.limited((0,) * len(batch.seqs))


@pytest.mark.fast_cases("ngram-native", "suffix-torch", "itself-native", "random-torch")
@BOTH
@EVERY
def test_drafts_after_rounds_without_drafts(pair, name):
    """The draft length changes between rounds and between the requests of a batch, also to 0 (vllm#49548).

    The cache of a draft model must then hold the tokens of rounds in which it did not draft.
    """
    plain = token_ids(pair.generate("none", PROMPTS, GREEDY, k=0))
    for planner in (Alternating(4), None):
        llm = pair.llm(name, planner=planner)
        wanted = [replace(GREEDY, k=None if planner else k) for k in (0, 5, 1)]
        assert token_ids(llm.generate(PROMPTS, wanted)) == plain
        assert llm.stats.draft_tokens > 0 or name in ("ngram", "suffix")
        if name == "itself":
            assert llm.stats.accepted == llm.stats.offered


@EVERY
def test_a_request_that_goes_away_leaves_nothing(native_pair, name):
    """A stream is left within a block, and another request takes the slot (m87-labs/kestrel PR #114)."""
    pair = make_pair(native_pair.folder, native_pair.draft, slots=1)
    plain = token_ids(pair.generate("none", PROMPTS, GREEDY, k=0))
    llm = pair.llm(name)
    for prompt, expected in zip(PROMPTS, plain, strict=True):
        stream = llm.stream("another text that ends early", GREEDY)
        next(stream)
        stream.close()
        assert not llm.engine.busy()
        assert llm.generate(prompt, GREEDY)[0].token_ids == expected


@pytest.mark.fast_cases("ngram-native", "suffix-torch", "itself-native", "random-torch")
@pytest.mark.parametrize("kernels", KERNELS)
@EVERY
def test_cached_prefixes_give_the_text_of_a_cold_cache(folders, kernels, name):
    """Prompts with a common prefix, of which each block may lie anywhere in the cache.

    (text-generation-inference PR #2711, vllm PR #47926)
    """
    prefix = tuple(range(130))
    prompts = [(*prefix, 7 * i, 5) for i in range(6)]
    pair = make_pair(*folders, kernels=kernels, slots=3)
    cold = pair.generate("none", prompts, GREEDY, k=0, prefix_caching=False)
    llm = pair.llm(name)
    first = llm.generate(prompts, GREEDY)
    again = llm.generate(prompts[::-1], GREEDY)[::-1]
    assert token_ids(first) == token_ids(again) == token_ids(cold)
    assert llm.engine.cache_usage().hit_tokens > 0
    if name == "itself":  # the draft's own cache is as warm
        assert all(each.stats.accepted == each.stats.offered for each in again)


@pytest.mark.skipif(not tiny.compiles(), reason="only caches in blocks preempt")
@EVERY
def test_preempted_sequences_go_on(native_pair, name):
    """Memory is short, so sequences lose their slots and go on later (tenstorrent/vllm-tt-plugin PR #131)."""
    prompts = [tuple(range(10 * i, 10 * i + 50)) for i in range(4)]
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    plain = token_ids(native_pair.generate("none", prompts, params, k=0))
    pair = make_pair(native_pair.folder, native_pair.draft)
    layers = {"itself": 4, "random": 3}.get(name, 2)  # of target and draft
    token_bytes = layers * 256
    llm = pair.llm(name, k=4, cache_gb=9 * 64 * token_bytes / 1e9)  # 9 blocks of 64 tokens
    assert token_ids(llm.generate(prompts, params)) == plain
    assert llm.engine.cache_usage().preempted > 0
