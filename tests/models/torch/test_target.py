"""Targets: weight updates, exported layers, non-finite logits, and limits of prompts and contexts."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.errors import OutriderError, UnsupportedModel
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch.prepack import PackedLinear, can_prepack
from tests.helpers import tiny

CPU = torch.device("cpu")
HAS_BFLOAT16 = can_prepack(CPU, torch.bfloat16)
DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 kernels"))]
compiled = pytest.mark.skipif(not tiny.compiles(), reason="no C++ compiler")
TEXT = list(b"the quick brown fox")
SHORT = SamplingParams(max_tokens=12)
NAN_TOKEN = 77  # its embedding is NaN


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("target"))


def score(target):
    seq = tiny.admit(target, 0, TEXT)
    with torch.inference_mode():
        logits = target.score(tiny.everything([seq]), tree.empty(1, CPU)).logits
    target.cache.release(0)
    return logits


def load_target(folder, dtype="float32"):
    return make_target(load_checkpoint(folder, dtype=dtype, device="cpu"), slots=1, context=64)


def weights_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.fast_cases("False-float32", "True-bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_weight_update_equals_loading_the_other_checkpoint(dtype, tied, tmp_path):
    config = tiny.make_config("LlamaConfig", attention_bias=True, tie_word_embeddings=tied)
    old, new = (tiny.save(tmp_path / str(seed), config, seed=seed) for seed in (0, 1))
    target = load_target(old, dtype)
    expected = score(load_target(new, dtype))
    before = score(target)
    assert not torch.equal(before, expected)
    target.update_weights(weights_of(new), 1)
    assert target.version == 1
    assert torch.equal(score(target), expected)
    target.update_weights(weights_of(old), 2)
    assert torch.equal(score(target), before)


@pytest.mark.fast_cases("model.embed_tokens.weight-float32", "lm_head.weight-bfloat16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_update_of_a_tied_weight_changes_embedding_and_head(dtype, name, tmp_path):
    old = tmp_path / "old"
    new = tmp_path / "new"
    tiny.save(old, tiny.make_config("LlamaConfig", tie_word_embeddings=True))
    model = AutoModelForCausalLM.from_pretrained(old)
    model.get_input_embeddings().weight.data.mul_(-0.5)
    tiny.save_model(new, model)
    target = load_target(old, dtype)
    target.update_weights({name: model.get_input_embeddings().weight}, 1)
    assert torch.equal(score(target), score(load_target(new, dtype)))


def test_failed_weight_update_changes_nothing(shelf):
    target = load_target(shelf.folder("llama"))
    before = score(target)
    weights = weights_of(shelf.folder("llama"))
    valid = {"lm_head.weight": torch.zeros_like(weights["lm_head.weight"])}
    with pytest.raises(OutriderError, match=r"no weight 'model\.zork'; use the names of its state_dict"):
        target.update_weights(valid | {"model.zork": torch.zeros(1)}, 1)
    with pytest.raises(OutriderError, match=r"model.norm.weight has shape \(3,\); give \(32,\)"):
        target.update_weights(valid | {"model.norm.weight": torch.zeros(3)}, 1)
    assert target.version == 0
    assert torch.equal(score(target), before)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "mamba2"])
def test_weight_update_of_experts_and_buffers(name, shelf, tmp_path):
    """transformers stacks the weights of experts in one tensor."""
    other = tiny.save(tmp_path / name, tiny.ARCHITECTURES[name](), seed=1)
    target = load_target(shelf.folder(name))
    target.update_weights(weights_of(other), 1)
    assert torch.equal(score(target), score(load_target(other)))


@pytest.mark.parametrize("kernels", [pytest.param("native", marks=compiled), "torch"])
def test_export_replaces_the_layers_of_the_call_before(kernels, tmp_path):
    """An invalid call changes nothing."""
    config = tiny.make_config("LlamaConfig", head_dim=16, hidden_size=48, intermediate_size=80)
    checkpoint = load_checkpoint(tiny.save(tmp_path / "llama", config), dtype="float32", device="cpu")
    target = make_target(checkpoint, slots=1, context=64, kernels=kernels)
    seq = tiny.admit(target, 0, [5, 6, 7])
    no_draft = tree.empty(1, CPU)
    for layers in ((0, 2), (1,), (1,), (2, 1, 1), ()):
        target.export_hidden_states(layers)
        with pytest.raises(OutriderError, match="this target has no layer 9"):
            target.export_hidden_states((0, 9))
        scores = target.score(tiny.everything([seq]), no_draft)
        assert set(scores.hidden_states) == set(scores.feed_hidden_states) == set(layers)
    if kernels == "torch":
        assert not any(layer._forward_hooks for layer in target._model.model.layers)


def test_export_of_unsupported_layers_raises(shelf):
    with pytest.raises(OutriderError, match="this target has no layer 4; use layers 0 to 3"):
        shelf.target("llama", [0, 4])
    with pytest.raises(UnsupportedModel, match="its layers have several output streams"):
        score(shelf.target("gemma3n_text", [0]))


@pytest.mark.fast_cases("none-llama", "none-mamba2", "ngram-mixtral")
@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba2"])
@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_non_finite_logits_end_only_their_request(name, proposer, shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name))
    model.get_input_embeddings().weight.data[NAN_TOKEN] = torch.nan
    nan_folder = tiny.save_model(tmp_path / name, model)
    valid_prompts = [TEXT * 2, [5, 6, 7], TEXT[3:], TEXT[::-1]]
    settings = {
        "proposer": proposer,
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 50,
    }
    plain = [c.token_ids for c in LLM(shelf.folder(name), **settings).generate(valid_prompts, SHORT)]
    assert all(NAN_TOKEN not in tokens for tokens in plain)
    nan_prompt = [*TEXT[:5], NAN_TOKEN, *TEXT]
    # The slots of failed requests are reused by shorter prompts, while a longer one is still running.
    prompts = [nan_prompt, valid_prompts[0], nan_prompt, *valid_prompts[1:]]
    done = LLM(nan_folder, **settings).generate(prompts, SHORT)
    for failed in (done.pop(2), done.pop(0)):
        assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, ())
        assert "not finite" in failed.error
    assert [completion.token_ids for completion in done] == plain
    assert all(completion.finish_reason == FinishReason.LENGTH for completion in done)


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_rejected_draft_token_with_nan_affects_nothing(name, shelf, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(shelf.folder(name))
    model.get_input_embeddings().weight.data[NAN_TOKEN] = torch.nan
    nan_folder = tiny.save_model(tmp_path / name, model)

    draft_sizes = []

    class NanProposer(NgramProposer):
        def propose(self, batch):
            draft_sizes.append(sum(batch.draft_budget))
            width = tuple(min(b, 1 + i) for i, b in enumerate(batch.draft_budget))
            tokens = torch.full((len(width), max(width)), NAN_TOKEN)
            return tree.chain(tokens, width)

    prompts = [TEXT * 2, [5, 6, 7], TEXT[3:]]
    settings = {"dtype": "float32", "device": "cpu", "max_num_seqs": 3, "max_num_batched_tokens": 50}
    plain = LLM(shelf.folder(name), proposer="none", **settings).generate(prompts, SHORT)
    done = LLM(nan_folder, proposer=NanProposer, **settings).generate(prompts, SHORT)
    assert [(c.token_ids, c.finish_reason) for c in done] == [(c.token_ids, c.finish_reason) for c in plain]
    assert sum(draft_sizes) > 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        ("", "the prompt is empty"),
        ([1] * 64, "the prompt is 64 tokens long and the context holds 64; shorten the prompt or raise max_model_len"),
        ([1, 256], "token id 256 is not in the vocabulary of 256; use ids from 0 to 255"),
        ([-1], "token id -1 is not in the vocabulary"),
    ],
)
def test_error_messages_for_invalid_prompts(prompt, message, shelf):
    llm = LLM(shelf.folder("llama"), dtype="float32", device="cpu", max_model_len=64)
    with pytest.raises(OutriderError, match=message):
        llm.generate([prompt])


def test_error_message_for_prompt_beyond_the_context_of_the_model(shelf):
    llm = LLM(shelf.folder("llama"), dtype="float32", device="cpu")
    message = f"the context holds {llm.parts.context}; shorten the prompt \\(the model takes no more\\)"
    with pytest.raises(OutriderError, match=message):
        llm.generate([[1] * llm.parts.context])


@pytest.mark.parametrize("context", [2, 5, 30])
def test_small_context_is_filled_to_the_end(context, shelf):
    llm = LLM(shelf.folder("llama"), dtype="float32", device="cpu", max_model_len=context)
    (completion,) = llm.generate([[7]], SamplingParams(max_tokens=None))
    assert list(completion.token_ids) == tiny.greedy(shelf.model("llama"), [7], context - 1)
    assert completion.finish_reason == FinishReason.LENGTH


@pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 kernels")
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_stacked_packed_layers_equal_the_layers(rows, bias):
    layers = [nn.Linear(64, out, bias=bias, dtype=torch.bfloat16) for out in (32, 16, 48)]
    packed = PackedLinear.together(layers)
    x, other = torch.randn(2, 1, rows, 64).bfloat16()
    # The layers in order, out of order, with one left out, and with another input in between.
    calls = ((0, x), (1, x), (2, x), (1, other), (0, x), (2, other), (2, x), (0, other))
    with torch.inference_mode():
        for index, inputs in calls:
            torch.testing.assert_close(packed[index](inputs), layers[index](inputs), atol=2e-2, rtol=2e-2)
        packed[1].load(layers[1].weight * 2)
        torch.testing.assert_close(packed[1].weight, layers[1].weight * 2)
        torch.testing.assert_close(packed[0].weight, layers[0].weight)


@pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 kernels")
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layer_equals_plain_layer_within_rounding(bias):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16()
    new_weight = torch.randn(96, 64, generator=generator).bfloat16()
    x = torch.randn(5, 64, generator=generator).bfloat16()
    bias_values = torch.randn(96, generator=generator).bfloat16() if bias else None
    layer = PackedLinear(weight, bias_values)
    for loaded in (weight, new_weight):
        layer.load(loaded)
        exact = functional.linear(x.double(), loaded.double(), bias_values.double() if bias else None)
        assert torch.allclose(layer(x).double(), exact, rtol=2**-7, atol=1e-2)
        assert torch.equal(layer.weight, loaded)
