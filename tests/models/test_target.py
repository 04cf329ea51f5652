"""Weights that change, layers that are exported, logits that are not numbers, prompts that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.make import make_target
from outrider.models.prepack import PackedLinear, can_prepack
from outrider.propose.lookup.ngram import NgramProposer
from tests.helpers import tiny

CPU = torch.device("cpu")
PACKS = can_prepack(CPU, torch.bfloat16)
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not PACKS, reason="no bfloat16 kernels here"))]
compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler here")
TEXT = list(b"the quick brown fox")
SHORT = SamplingParams(max_tokens=12)
POISON = 77


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("target"))


def score(target):
    row = tiny.admit(target, 0, TEXT)
    with torch.inference_mode():
        logits = target.score(tiny.everything([row]), tree.empty(1, CPU)).logits
    target.cache.release(0)
    return logits


def read(folder, dtype="float32"):
    return make_target(load_checkpoint(folder, dtype=dtype, device="cpu"), slots=1, context=64)


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_swap_is_loading_the_other_weights(dtype, tied, tmp_path):
    config = tiny.make_config("LlamaConfig", attention_bias=True, tie_word_embeddings=tied)
    old, new = (tiny.save(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    target, wanted = read(old, dtype), score(read(new, dtype))
    before = score(target)
    assert not torch.equal(before, wanted)
    target.update_weights(weights_of(new), 1)
    assert target.version == 1
    assert torch.equal(score(target), wanted)
    target.update_weights(weights_of(old), 2)
    assert torch.equal(score(target), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_swap_of_a_shared_weight_reaches_both_places(dtype, name, tmp_path):
    old, new = (tmp_path / "old", tmp_path / "new")
    tiny.save(old, tiny.make_config("LlamaConfig", tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_pretrained(old)
    model.get_input_embeddings().weight.data.mul_(-0.5)
    tiny.save_model(new, model)
    target = read(old, dtype)
    target.update_weights({name: model.get_input_embeddings().weight}, 1)
    assert torch.equal(score(target), score(read(new, dtype)))


def test_swap_takes_all_or_nothing(shelf):
    target = read(shelf.folder("llama"))
    before, weights = score(target), weights_of(shelf.folder("llama"))
    good = {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])}
    with pytest.raises(OutriderError, match=r"no weight 'model\.zork'; use the names of its state_dict"):
        target.update_weights(good | {"model.zork": torch.zeros(1)}, 1)
    with pytest.raises(OutriderError, match=r"model.norm.weight has shape \(3,\); give \(32,\)"):
        target.update_weights(good | {"model.norm.weight": torch.zeros(3)}, 1)
    assert target.version == 0
    assert torch.equal(score(target), before)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "mamba2"])
def test_swap_of_what_is_stored_otherwise(name, shelf, tmp_path):
    """Experts that lie together in memory, and buffers."""
    other = tiny.save(tmp_path / name, tiny.ARCHITECTURES[name](), seed=1)
    target = read(shelf.folder(name))
    target.update_weights(weights_of(other), 1)
    assert torch.equal(score(target), score(read(other)))


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=compiled), "torch"])
def test_the_layers_asked_for_last_are_those_that_are_exported(kernels, tmp_path):
    """Whatever was asked for before, and however often; a refusal changes nothing."""
    config = tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80)
    checkpoint = load_checkpoint(tiny.save(tmp_path / "llama", config), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=1, context=64, kernels=kernels)
    row, none = tiny.admit(target, 0, [5, 6, 7]), tree.empty(1, CPU)
    for layers in ((0, 2), (1,), (1,), (2, 1, 1), ()):
        target.export_hidden_states(layers)
        with pytest.raises(OutriderError, match="layer 9 was asked for"):
            target.export_hidden_states((0, 9))
        scores = target.score(tiny.everything([row]), none)
        assert set(scores.hidden_states) == set(scores.feed_hidden_states) == set(layers)
    if kernels == "torch":
        assert not any(layer._forward_hooks for layer in target._model.model.layers)


def test_layers_that_are_not_there_are_refused(shelf):
    with pytest.raises(OutriderError, match="layer 4 was asked for; this target's layers are 0 to 3"):
        shelf.target("llama", [0, 4])
    with pytest.raises(
        OutriderError, match="a recurrent target exports no hidden states; use a proposer that needs none"
    ):
        shelf.target("mamba2", [0])
    with pytest.raises(UnsupportedModel, match="its layers have several output streams"):
        score(shelf.target("gemma3n_text", [0]))


@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba2"])
@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_logits_that_are_not_numbers_end_their_own_request_alone(name, proposer, shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name))
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    poisoned = tiny.save_model(tmp_path / name, model)
    good = [TEXT * 2, [5, 6, 7], TEXT[3:], TEXT[::-1]]
    settings = {
        "proposer": proposer,
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 50,
    }
    plain = [c.token_ids for c in LLM(shelf.folder(name), **settings).generate(good, SHORT)]
    assert all(POISON not in tokens for tokens in plain)
    bad = [*TEXT[:5], POISON, *TEXT]
    done = LLM(poisoned, **settings).generate([bad, good[0], bad, *good[1:]], SHORT)  # short after bad, beside long
    for failed in (done.pop(2), done.pop(0)):
        assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, ())
        assert "not finite" in failed.error
    assert [completion.token_ids for completion in done] == plain
    assert all(completion.finish_reason == FinishReason.LENGTH for completion in done)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_guess_that_is_rejected_may_poison_nothing(name, shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name))
    model.get_input_embeddings().weight.data[POISON] = torch.nan
    poisoned = tiny.save_model(tmp_path / name, model)

    guessed = []

    class Poisoner(NgramProposer):
        def propose(self, batch):
            guessed.append(sum(batch.draft_budget))
            width = tuple(min(b, 1 + i) for i, b in enumerate(batch.draft_budget))
            tokens = torch.full((len(width), max(width)), POISON)
            return tree.chain(tokens, width)

    prompts = [TEXT * 2, [5, 6, 7], TEXT[3:]]
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 3, "max_num_batched_tokens": 50}
    plain = LLM(shelf.folder(name), proposer="none", **settings).generate(prompts, SHORT)
    done = LLM(poisoned, proposer=Poisoner, **settings).generate(prompts, SHORT)
    assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in plain]
    assert sum(guessed) > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        ("", "the prompt is empty"),
        ([1] * 64, "the prompt is 64 tokens long and the context holds 64; shorten the prompt or raise context"),
        ([1, 256], "token id 256 is not in the vocabulary of 256; use smaller ids"),
        ([-1], "token id -1 is not in the vocabulary"),
    ],
)
def test_prompts_that_cannot_be_run_are_named(prompt, message, shelf):
    llm = LLM(shelf.folder("llama"), dtype="float32", device="cpu", max_model_len=64)
    with pytest.raises(OutriderError, match=message):
        llm.generate([prompt])


@pytest.mark.parametrize("context", [2, 5, 30])
def test_a_small_context_is_filled_to_the_end(context, shelf):
    llm = LLM(shelf.folder("llama"), dtype="float32", device="cpu", max_model_len=context)
    (completion,) = llm.generate([[7]], SamplingParams(max_tokens=None))
    assert list(completion.token_ids) == tiny.greedy(shelf.model("llama"), [7], context - 1)
    assert completion.finish_reason == FinishReason.LENGTH


@pytest.mark.skipif(not PACKS, reason="no bfloat16 kernels here")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_packed_together_are_the_layers(rows, bias):
    layers = [nn.Linear(64, out, bias=bias, dtype=torch.bfloat16) for out in (32, 16, 48)]
    packed = PackedLinear.together(layers)
    x, other = torch.randn(2, 1, rows, 64).bfloat16()
    with torch.inference_mode():
        # In turn, out of turn, one left out, and with another input in between.
        for one, given in ((0, x), (1, x), (2, x), (1, other), (0, x), (2, other), (2, x), (0, other)):
            torch.testing.assert_close(packed[one](given), layers[one](given), atol=2e-2, rtol=2e-2)
        packed[1].load(layers[1].weight * 2)
        torch.testing.assert_close(packed[1].weight, layers[1].weight * 2)
        torch.testing.assert_close(packed[0].weight, layers[0].weight)


@pytest.mark.skipif(not PACKS, reason="no bfloat16 kernels here")
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_plain_one_within_rounding(bias):
    source = torch.Generator().manual_seed(0)
    weight, again, x = (torch.randn(shape, generator=source).bfloat16() for shape in [(96, 64), (96, 64), (5, 64)])
    added = torch.randn(96, generator=source).bfloat16() if bias else None
    layer = PackedLinear(weight, added)
    for loaded in (weight, again):
        layer.load(loaded)
        exact = functional.linear(x.double(), loaded.double(), added.double() if bias else None)
        assert torch.allclose(layer(x).double(), exact, rtol=2**-7, atol=1e-2)
        assert torch.equal(layer.weight, loaded)
