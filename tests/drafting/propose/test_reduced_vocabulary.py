"""Draft models whose LM head has a part of the vocabulary."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import Batch, DraftBudget
from outrider.drafting.propose.vocabulary.reduced import (
    read_draft_vocabulary,
    reduce_vocabulary,
    write_draft_vocabulary,
)
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.testing.drive import make_seq
from tests.helpers import tiny

NANO = embedded("nano")
VOCAB = 12288
NATIVE = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
KERNELS = [pytest.param("native", marks=NATIVE), "torch"]
FEED = tuple(range(300, 330))


@pytest.fixture(scope="module")
def ids():
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(VOCAB, generator=generator)[:3000].sort().values


def make(kernels, ids=None):
    checkpoint = load_checkpoint(NANO, dtype="float32", device="cpu")
    model = make_target(checkpoint, slots=1, context=96, kernels=kernels)
    return model if ids is None else reduce_vocabulary(model, checkpoint, ids, kernels=kernels)


def batch(model, tokens, budget):
    model.cache.admit(0, tokens)
    return Batch(seqs=(make_seq(tokens, 0),), start=(0,), feed=(tuple(tokens),), budget=DraftBudget((budget,)))


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_chain_has_the_likeliest_of_the_kept_tokens(kernels, ids):
    """Each token of the chain is what the whole model finds likeliest among them, after the tokens before it."""
    reduced = make(kernels, ids)
    chain = reduced.draft_greedy(batch(reduced, FEED, 6), VOCAB).tokens[0].tolist()
    model = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    logits = model(torch.tensor([[*FEED, *chain]])).logits[0, len(FEED) - 1 : -1]
    assert chain == ids[logits[:, ids].argmax(-1)].tolist()
    assert chain != logits.argmax(-1).tolist()


@pytest.mark.parametrize("kernels", KERNELS)
@torch.inference_mode()
def test_other_tokens_have_no_probability(kernels, ids):

    reduced, whole = make(kernels, ids), make(kernels)
    logits, expected = (
        model.score(batch(model, FEED, 0), tree.empty(1, model.device)).logits[0, 0] for model in (reduced, whole)
    )
    assert logits.shape == (VOCAB,)
    assert torch.equal(logits.isfinite().nonzero()[:, 0], ids)
    torch.testing.assert_close(logits[ids], expected[ids], atol=1e-4, rtol=1e-4)


@pytest.mark.fast_cases("draft-native")
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("proposer", ["draft", "tree", "cascade"])
def test_text_does_not_change(kernels, proposer, ids, tmp_path):
    folder = shutil.copytree(NANO, tmp_path / "nano")
    write_draft_vocabulary(folder, ids)
    options = {"dtype": "float32", "kernels": kernels, "max_num_seqs": 2, "max_model_len": 96, "verifier": "walk"}
    llm = LLM(None, proposer=f"{proposer}:{folder}", k=3, **options)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=20, seed=1)
        plain, drafted = (llm.generate(["def add(a, b):", "The cat"], replace(params, k=k)) for k in (0, 3))
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert not sum(each.stats.draft_tokens for each in plain)
        assert all(each.stats.draft_tokens for each in drafted)


@NATIVE
def test_lm_head_takes_less_memory(ids):
    assert make("native").read_bytes()[1] == VOCAB * 128 * 4
    assert make("native", ids).inner.read_bytes()[1] < 3072 * 128 * 4


@NATIVE
def test_weights_cannot_be_replaced(ids):
    with pytest.raises(OutriderError, match="reduced LM head takes no new weights"):
        make("native", ids).update_weights({}, 1)


@pytest.mark.parametrize("wrong", [[3, 3, 5], [-1, 4], [5, VOCAB], []])
def test_damaged_file_is_reported(wrong, tmp_path):
    assert read_draft_vocabulary(tmp_path, VOCAB) is None
    write_draft_vocabulary(tmp_path, torch.tensor(wrong, dtype=torch.int64))
    with pytest.raises(OutriderError, match="the ids must ascend and be below 12288; copy the draft model again"):
        read_draft_vocabulary(tmp_path, VOCAB)
    save_file({"other": torch.zeros(1)}, tmp_path / "draft_vocab.safetensors")
    with pytest.raises(OutriderError, match="cannot be read"):
        read_draft_vocabulary(tmp_path, VOCAB)
