"""Contexts that end: that of a draft model before the target's, and that of the target within a draft."""

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.errors import OutriderError
from outrider.llm import LLM
from tests.field.models import EVERY, KERNELS, llama, make_pair, token_ids
from tests.helpers import tiny
from tests.helpers.serving import serving

NATIVE = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
PROMPTS = [(1, 2, 3), tuple(range(40)), tuple(range(100, 150))]


@pytest.fixture(scope="module")
def short_draft(tmp_path_factory):
    """A draft model for 64 tokens, a block of the native kernels' cache."""
    return tiny.save(tmp_path_factory.mktemp("short") / "draft", llama(max_position_embeddings=64), seed=1)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("targets"))


@pytest.mark.fast_cases("tree-native", "draft-torch")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["tree", "draft"])
def test_draft_with_a_smaller_context(folders, tmp_path, kernels, kind, caplog):
    """A draft for 32 tokens, a target for 256, 100 tokens and a batch of three (llama.cpp#22554)."""
    draft = tiny.save(tmp_path / "draft", llama(max_position_embeddings=32), seed=1)
    options = {"dtype": "float32", "device": "cpu", "kernels": kernels, "max_num_seqs": 3}
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    plain = LLM(folders[0], proposer="none", **options).generate(PROMPTS, params)
    llm = LLM(folders[0], proposer=f"{kind}:{draft}", k=4, **options)
    completions = llm.generate(PROMPTS, params)
    assert token_ids(completions) == token_ids(plain)
    drafts = [completion.stats.draft_tokens for completion in completions]
    assert min(drafts) > 100  # all go on beyond the context of the draft
    assert sum("context" in record.message for record in caplog.records) <= 1


@pytest.mark.fast_cases("gpt_neox", "mamba2", "recurrent_gemma")
@NATIVE
@pytest.mark.parametrize(
    "name", ["gpt_neox", "lfm2", "mamba", "mamba2", "falcon_h1", "bamba", "qwen3_next", "recurrent_gemma"]
)
def test_native_draft_with_a_smaller_context_than_a_target_on_torch(shelf, short_draft, name):
    """One sequence, as `outrider run` has: the cache of the draft holds its own window (llama.cpp#22554)."""
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 1, "max_model_len": 128}
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    plain = LLM(shelf.folder(name), proposer="none", **options).generate(PROMPTS[:1], params)
    llm = LLM(shelf.folder(name), proposer=f"draft:{short_draft}", k=3, **options)
    assert llm.parts.proposer.model.cache.usage().slot_tokens == 64
    assert token_ids(llm.generate(PROMPTS[:1], params)) == token_ids(plain)


@NATIVE
def test_error_of_short_memory_names_settings_that_exist(shelf, short_draft, monkeypatch):
    """`cache_gb` cannot be set for a target on torch, so no message asks for it (llama.cpp#22554)."""
    monkeypatch.setattr("outrider.engine.cache_memory.free_memory", lambda: 1000)
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 1, "max_model_len": 128}
    with pytest.raises(OutriderError, match=r"one sequence of 64 tokens .*; free memory, or lower max_model_len"):
        LLM(shelf.folder("gpt_neox"), proposer=f"draft:{short_draft}", **options)


@pytest.mark.fast_cases("ngram-native", "suffix-torch", "itself-native", "random-torch")
@pytest.mark.parametrize("kernels", KERNELS)
@EVERY
def test_drafts_end_with_the_context(folders, kernels, name):
    """Prompts of 60 to 63 tokens in a context of 64, beside a short one (vllm#42533, exllamav2#274)."""
    pair = make_pair(*folders, kernels=kernels, slots=5, context=64)
    prompts = [(5, 6, 7) * 20 + (5, 6, 7)[:rest] for rest in range(4)] + [(9, 8) * 5]
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    plain = token_ids(pair.generate("none", prompts, params, k=0))
    completions = pair.generate(name, prompts, params, k=10)
    assert token_ids(completions) == plain
    assert [len(each.prompt_token_ids) + len(each.token_ids) for each in completions] == [64] * 5
    assert {each.finish_reason for each in completions} == {FinishReason.LENGTH}


def test_prompt_that_fills_the_context_is_a_clear_error(folders):
    """A prompt of 64 tokens in a context of 64 (vllm#42533)."""
    options = {"target": folders[0], "proposer": "ngram", "k": 10, "dtype": "float32", "max_model_len": 64}
    with serving(options) as (url, _):
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6, 7, 8] * 16, "max_tokens": 1})
        assert reply.status_code == 400
        assert "64 tokens" in reply.json()["error"]["message"]
