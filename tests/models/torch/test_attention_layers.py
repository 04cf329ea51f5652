"""Attention layers that Outrider replaces: large batches, drafts, bfloat16 and long texts.

`test_architectures.py` compares each architecture with transformers, and `test_support.py` shares prefixes.
"""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.tree import chain
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.loader.model_class import auto_class
from outrider.models.torch.attention_layers.alibi import bloom_slopes, mpt_slopes
from outrider.models.torch.attention_layers.registry import LAYERS
from outrider.models.torch.rounding import TOLERANCE
from tests.helpers import tiny
from tests.helpers.self_draft import check_draft_of_itself

ALIBI = ("bloom", "mpt", "falcon with alibi", "falcon with alibi and one key head")
NAMES = (*ALIBI, "falcon", "falcon with grouped queries", "stablelm", "nemotron", "doge", "llama4_text", "deepseek_v32")
SAME_LAYERS = (
    "axk2",
    "dots3_note_text",
    "gpt_neo",
    "mistral_large4",
    "glm_moe_dsa",
    "hy_v4",
    "zamba",
)  # whose classes have other names
ROPES = ("llama with dynamic rope", "phi3 with longrope")
OPTIONS = {"dtype": "float32", "device": "cpu"}
LENGTHS = (2, 3, 5, 8, 13, 21, 34, 55, 50, 48, 40, 33, 16, 17, 31, 2)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("layers"))


def test_names_have_every_replaced_layer():
    found = set()
    for name in (*NAMES, *SAME_LAYERS):
        config = tiny.EVERY[name]()
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        found |= {type(module).__name__ for module in model.modules()}
    assert found >= set(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *ROPES])
def test_batch_of_many_lengths_equals_generate(name, shelf):
    rng = random.Random(3)
    prompts = [tiny.text(rng, length) for length in LENGTHS]
    expected = [tiny.greedy(shelf.model(name), prompt, 8) for prompt in prompts]
    llm = LLM(shelf.folder(name), proposer="merge(ngram,recycle)", k=4, max_num_seqs=16, max_model_len=64, **OPTIONS)
    completions = llm.generate(prompts, SamplingParams(max_tokens=8))
    assert [list(completion.token_ids) for completion in completions] == expected
    assert llm.stats.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["draft", "tree"])
@pytest.mark.parametrize("name", [*NAMES, *ROPES])
def test_as_draft_of_itself(name, proposer, shelf):
    check_draft_of_itself(shelf.folder(name), proposer)


@pytest.mark.parametrize("name", [*ALIBI, "falcon", "doge"])
@torch.inference_mode()
def test_bfloat16_rounds_as_transformers_does(name, shelf):
    """Biases grow with the position, and with them their rounding."""
    tokens = tiny.text(random.Random(1), 100)
    checkpoint = load_checkpoint(shelf.folder(name), dtype="bfloat16", device="cpu")
    target = make_target(checkpoint, slots=1, context=128, kernels="torch")
    seq = tiny.admit(target, 0, tokens[:60])
    logits = target.score(tiny.everything([seq]), chain(torch.tensor([tokens[60:]]), (40,))).logits[0]
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name), dtype=torch.bfloat16)
    expected = model(torch.tensor([tokens]), use_cache=False).logits[0, 59:].float()
    errors = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 71])
def test_slopes_equal_those_of_transformers(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    expected = bloom.build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(bloom_slopes(heads)), expected)
    expected = mpt.build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(-torch.tensor(mpt_slopes(heads)), expected)
