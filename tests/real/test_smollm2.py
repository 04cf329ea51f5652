"""A model that Outrider's authors did not train: SmolLM2-135M-Instruct, as GGUF and as a Hugging Face folder."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
MODELS = Path(os.environ.get("OUTRIDER_REAL_MODELS", ROOT / "benchmarks" / "real" / "models"))
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(
        not (MODELS / "smollm2").is_dir(),
        reason=f"{MODELS} has no smollm2; write it with: python benchmarks/real/smollm2.py",
    ),
]
QUESTIONS = ("What is the capital of France?", "Write a function that adds two numbers.", "Name three colors.")


def _prompts(llm):
    return [llm.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@pytest.mark.parametrize("model", ["smollm2.gguf", "smollm2"])
@pytest.mark.parametrize("proposer", ["ngram", "merge(suffix,recycle)"])
def test_speculation_changes_no_text(model, proposer):
    llm = LLM(MODELS / model, proposer=proposer, max_num_seqs=4, max_model_len=512)
    prompts = _prompts(llm)
    for temperature in (0.0, 0.8):
        params = {"temperature": temperature, "seed": 3, "max_tokens": 48}
        plain = llm.generate(prompts, SamplingParams(k=0, **params))
        fast = llm.generate(prompts, SamplingParams(k=4, **params))
        assert [each.token_ids for each in plain] == [each.token_ids for each in fast]


@torch.inference_mode()
def test_greedy_text_is_that_of_transformers():
    llm = LLM(MODELS / "smollm2", proposer="ngram", dtype="float32", max_num_seqs=4, max_model_len=512)
    model = AutoModelForCausalLM.from_pretrained(MODELS / "smollm2", dtype=torch.float32).eval()
    for prompt in _prompts(llm):
        text = llm.generate([prompt], SamplingParams(max_tokens=32))[0].token_ids
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)[0, len(prompt) :]
        assert list(text) == expected.tolist()


def test_the_tokenizer_of_the_file_is_that_of_the_folder():
    one, two = (LLM(MODELS / name, proposer="none", k=0, max_model_len=64) for name in ("smollm2.gguf", "smollm2"))
    text = json.dumps({"name": "Ada", "year": 1843, "tags": ["x", "  y"]}) + "\n\tÄ 12345"
    assert one.encode(text) == two.encode(text)
    assert one.decode(one.encode(text)) == text
