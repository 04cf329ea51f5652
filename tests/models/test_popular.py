"""Popular checkpoints: their real configurations with fewer layers, a small vocabulary and random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from tests.helpers import tiny

VOCAB = 512
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PHI_FACTORS = [1.0 + 0.02 * i for i in range(48)]

# Name -> class of the configuration, its settings, and whether the native kernels run it.
CHECKPOINTS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "Llama-3.2-1B": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rope_parameters": _LLAMA3,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
        },
        True,
    ),
    "Qwen2.5-0.5B": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        True,
    ),
    "Qwen3-0.6B": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
        True,
    ),
    "Mistral-7B": (
        "MistralConfig",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 1,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        True,
    ),
    "SmolLM2-135M": (
        "LlamaConfig",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
        True,
    ),
    "SmolLM3-3B": (
        "SmolLM3Config",
        {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
            "tie_word_embeddings": True,
        },
        True,
    ),
    "Gemma-3-270m": (
        "Gemma3TextConfig",
        {
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "num_hidden_layers": 6,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": True,
        },
        True,
    ),
    "Phi-4-mini": (
        "Phi3Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_hidden_layers": 1,
            "partial_rotary_factor": 0.75,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": _PHI_FACTORS,
                "long_factor": _PHI_FACTORS,
                "original_max_position_embeddings": 4096,
            },
            "tie_word_embeddings": True,
            "sliding_window": 262144,
        },
        True,
    ),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    """A folder with a checkpoint, and whether the native kernels run it."""
    name, settings, native = CHECKPOINTS[request.param]
    common = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, name)(**common | tokens | dict(settings))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return tiny.save_model(tmp_path_factory.mktemp("popular"), model, size=VOCAB), native and tiny.compiles()


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(checkpoint):
    """With speculation, in float32, on the kernels that are chosen by default."""
    folder, native = checkpoint
    llm = LLM(folder, proposer="ngram", dtype="float32", max_num_seqs=1, max_model_len=128)
    assert llm.parts.target.kernels == ("native" if native else "torch")
    prompt = list(range(20, 40)) * 2
    text = llm.generate([prompt], SamplingParams(k=4, max_tokens=24, ignore_eos=True))[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert list(text) == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_speculation_changes_no_bfloat16_text_on_the_native_kernels(checkpoint):
    folder, native = checkpoint
    if not native:
        pytest.skip("runs on torch, where rounding may decide between nearly equal tokens")
    llm = LLM(folder, proposer="ngram", dtype="bfloat16", max_num_seqs=2, max_model_len=128)
    prompts = [list(range(20, 40)) * 2, [5, 6, 7, 5, 6]]
    for temperature in (0.0, 0.9):
        params = {"temperature": temperature, "seed": 1, "max_tokens": 24, "ignore_eos": True}
        plain, fast = (llm.generate(prompts, SamplingParams(k=k, **params)) for k in (0, 4))
        assert [each.token_ids for each in plain] == [each.token_ids for each in fast]
