"""Tests of the proposer `suffix` as vLLM runs it: rows that move, end and prefill, limits, history, and vLLM itself."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from outrider.drafting.propose.lookup.suffix_tree import SuffixDraft
from outrider.drafting.propose.tree_builder import TreeBuilder
from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.tools.vllm_suffix import VllmSuffix, likeliest_chain

CONTEXT = 64
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8]


def make(k=4, **additional):
    return VllmSuffix(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=k),
            model_config=SimpleNamespace(max_model_len=CONTEXT),
            additional_config=additional,
        )
    )


def step(suffix, *rows):
    """Call `propose` as vLLM does. A row is (tokens before this step, tokens that it has sampled)."""
    token_ids = np.full((len(rows) + 1, CONTEXT), -1, np.int32)
    lengths = np.zeros(len(rows) + 1, np.int32)
    for i, (before, sampled) in enumerate(rows):
        text = [*before, *sampled]
        token_ids[i, : len(text)] = text
        lengths[i] = len(text)
    return suffix.propose([list(sampled) for _, sampled in rows], lengths, token_ids, slot_mappings=None)


def test_drafts_what_followed_the_same_tokens():
    suffix = make()
    assert step(suffix, ([*REPEATED, 1, 2], [3])) == [[4, 5, 6, 7]]
    assert step(suffix, ([*REPEATED, 1, 2, 3], [4, 5, 6])) == [[7, 8, 1, 2]]
    assert step(suffix, ([*REPEATED, 1, 2, 3, 4, 5, 6], [40])) == [[]]


def test_a_row_that_prefills_gets_no_draft():
    assert step(make(), ([*REPEATED, 1, 2], []), ([*REPEATED, 1, 2], [3])) == [[], [4, 5, 6, 7]]


def test_a_draft_ends_before_the_context():
    text = (REPEATED * 8)[: CONTEXT - 3]
    assert [len(draft) for draft in step(make(), (text, [text[5]]))] == [1]
    assert step(make(), ((REPEATED * 8)[: CONTEXT - 1], [8])) == [[]]


def test_rows_may_move_when_a_request_ends():
    suffix = make()
    other = [token + 20 for token in REPEATED]
    assert step(suffix, ([*REPEATED, 1], [2]), ([*other, 21], [22])) == [[3, 4, 5, 6], [23, 24, 25, 26]]
    _, second = suffix._texts
    assert step(suffix, ([*other, 21, 22], [23])) == [[24, 25, 26, 27]]
    assert suffix._texts == [second]  # the index was kept, not built again


def test_a_new_request_in_a_row_has_its_own_text():
    suffix = make()
    step(suffix, ([*REPEATED, 1], [2]))
    assert step(suffix, ([50, 51, 52, 50], [51])) == [[52, 50, 51, 52]]
    assert step(suffix, ([50, 51, 52, 50, 51], [7])) == [[]]  # 8 followed 7 in the other request only


def test_outputs_that_ended_are_drafted_if_there_is_a_history():
    for history, expected in ((0, [[]]), (1000, [[12, 13, 14, 15]])):
        suffix = make(outrider_suffix_history=history)
        step(suffix, ([30, 31], [10, 11, 12, 13, 14, 15]))
        step(suffix, ([40, 41], [42]))  # the first request has ended
        assert step(suffix, ([40, 41, 42], [10, 11])) == expected
        # The prompt of the first request is no output.
        assert step(suffix, ([40, 41, 42, 10, 11], [30])) == [[]]


def test_drafts_that_are_rejected_get_shorter():
    suffix = make()
    lengths = []
    for other in range(40, 60):
        (draft,) = step(suffix, (REPEATED, [1, 2]))
        lengths.append(len(draft))
        step(suffix, ([*REPEATED, 1, 2], [other]))  # the first draft token is rejected
    assert lengths[0] == 4
    assert lengths[-1] < lengths[0]


@pytest.mark.parametrize("history", [-1, "many", 1.5])
def test_a_wrong_history_is_refused(history):
    with pytest.raises(OutriderError, match="use a number of tokens"):
        make(outrider_suffix_history=history)


def test_the_likeliest_chain_of_a_tree():
    builder = TreeBuilder([5, 6, 7, 8, 9], [-1, -1, 0, 1, 2], [0.9, 0.5, 0.4, 0.3, 0.2])
    chain = likeliest_chain(SuffixDraft(builder, [0, 1, 2, 3, 4], [0] * 5), 2)
    assert (chain.builder.tokens, chain.builder.parent, chain.kinds) == ([5, 7], [-1, 0], [0, 2])
    assert likeliest_chain(SuffixDraft(), 3).builder.tokens == []


def test_vllm_runs_it(monkeypatch):
    vllm = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    path = f"{VllmSuffix.__module__}.{VllmSuffix.__qualname__}"
    llm = vllm.LLM(
        str(embedded("mini")),
        dtype="float32",
        max_model_len=CONTEXT * 2,
        max_num_seqs=2,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={"method": "custom_class", "model": path, "num_speculative_tokens": 4},
    )
    prompts = [{"prompt_token_ids": [0, *REPEATED * 6]}, {"prompt_token_ids": [0, *REPEATED * 3]}]
    llm.generate(prompts, vllm.SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert counts["vllm:spec_decode_num_draft_tokens"] > counts["vllm:spec_decode_num_accepted_tokens"] > 0
