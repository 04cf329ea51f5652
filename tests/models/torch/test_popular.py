"""Popular checkpoints: their real configurations and the settings of their tokenizers, with few layers, a small
vocabulary and random weights.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from tests.helpers import tiny
from tests.helpers.popular import CHECKPOINTS, popular_config
from tests.helpers.published_tokenizers import save_tokenizer, small_tokenizer


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request, tmp_path_factory):
    """A folder with a checkpoint."""
    name = request.param
    config = popular_config(name, vocab=small_tokenizer(name).model_vocab)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp("popular")
    model.save_pretrained(folder)
    save_tokenizer(name, folder)
    return folder


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(checkpoint):
    """With speculation, in float32, on the kernels that are chosen by default."""
    llm = LLM(checkpoint, proposer="ngram", dtype="float32", max_num_seqs=1, max_model_len=128)
    assert llm.parts.target.kernels == ("native" if tiny.compiles() else "torch")
    prompt = list(range(20, 40)) * 2
    text = llm.generate([prompt], SamplingParams(k=4, max_tokens=24, ignore_eos=True))[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert list(text) == expected[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.skipif(not tiny.compiles(), reason="on torch, rounding may decide between nearly equal tokens")
def test_speculation_changes_no_bfloat16_text_on_the_native_kernels(checkpoint):
    llm = LLM(checkpoint, proposer="ngram", dtype="bfloat16", max_num_seqs=2, max_model_len=128)
    prompts = [list(range(20, 40)) * 2, [5, 6, 7, 5, 6]]
    for temperature in (0.0, 0.9):
        params = {"temperature": temperature, "seed": 1, "max_tokens": 24, "ignore_eos": True}
        plain, fast = (llm.generate(prompts, SamplingParams(k=k, **params)) for k in (0, 4))
        assert [each.token_ids for each in plain] == [each.token_ids for each in fast]
