"""What is wrong with a folder is said in words that name the fix; what differs within a family is put right."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.checkpoint import load_checkpoint
from tests.helpers import tiny

PADDED = 288  # the target's vocabulary; the tokenizer has 256 tokens
PROMPTS = [list(b"to be or not to be"), list(b"a rose is a rose is")]
GREEDY = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("load"))


@pytest.fixture
def folder(shelf, tmp_path):
    """A sound folder, to be spoiled."""
    return shutil.copytree(shelf.folder("llama"), tmp_path / "spoiled")


def set_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


SPOILED = {
    "no folder": (shutil.rmtree, "is not a folder; give the folder that holds the model's config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json; give the folder of a Hugging Face"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read .* copy the check"),
    "config of another kind": (lambda f: (f / "config.json").write_text("[1]"), "config.json cannot be read"),
    "config of wrong types": (lambda f: set_config(f, hidden_size="wide"), "config.json cannot be read .*hidden_size"),
    "no known model": (lambda f: set_config(f, model_type="zork"), "'zork', which transformers .* update transformers"),
    "its own code": (
        lambda f: set_config(f, model_type="zork", auto_map={"AutoConfig": "zork.Zork"}),
        "code in checkpoints is never executed",
    ),
    "masked model": (lambda f: set_config(f, model_type="bert"), "bert is not a causal language model; give a decoder"),
    "encoder and decoder": (lambda f: set_config(f, model_type="t5"), "t5 is not a causal language model"),
    "no model of text": (lambda f: set_config(f, model_type="clip"), "clip is not a causal language model"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors; write the weights there"),
    "cut weights": (cut, "cannot be read .*; copy the checkpoint again"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "cannot be read .*; copy the checkpoint"),
    "a weight is missing": (drop_tensor, "lack model.layers.1.mlp.up_proj.weight; copy the checkpoint again"),
    "weights of other shapes": (
        lambda f: set_config(f, intermediate_size=40),
        r"do not fit its config.json: model.layers.0.mlp.down_proj.weight is \(32, 48\) and should be \(32, 40\)",
    ),
    "no activation": (lambda f: set_config(f, hidden_act="zork"), "cannot be read .*zork"),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        "has no working tokenizer .*; copy its tokenizer.json there",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "has no working tokenizer"),
    "broken generation": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json cannot be read",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_wrong_is_named(case, folder):
    spoil, message = SPOILED[case]
    spoil(folder)
    with pytest.raises(OutriderError, match=f"(?s){message}"):
        load_checkpoint(folder, device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is unknown; use auto, float32, bfloat16, float16"),
        ({"device": "zork"}, "device 'zork' cannot be used here; try auto or cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"max_model_len": 4096}, "max_model_len is 4096; this model takes from 2 to 128 tokens"),
        ({"max_model_len": 1}, "max_model_len is 1; this model takes"),
    ],
)
def test_wrong_settings_are_named(settings, message, shelf):
    with pytest.raises(OutriderError, match=message):
        LLM(shelf.folder("llama"), **settings)


def test_ends_are_those_of_the_generation_config(folder):
    set_config(folder, eos_token_id=9)
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(folder, device="cpu").end_ids == {9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_checkpoint(folder, device="cpu").end_ids == {3, 4}


def test_the_dtype_is_the_checkpoints_own_where_the_machine_is_fast_at_it(folder):
    assert load_checkpoint(folder, device="cpu").dtype == torch.float32
    set_config(folder, dtype="float16")
    assert load_checkpoint(folder, device="cpu").dtype == torch.float32
    set_config(folder, dtype="bfloat16")
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert load_checkpoint(folder, device="cpu").dtype == (torch.bfloat16 if fast else torch.float32)


def test_a_context_that_would_change_cached_keys_is_cut(tmp_path):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 32
    config = tiny.make_config("Phi3Config", rope_parameters=rope, original_max_position_embeddings=32)
    llm = LLM(tiny.save(tmp_path / "phi3", config), dtype="float32", device="cpu", proposer="none")
    with pytest.raises(OutriderError, match="40 tokens long and the context holds 32"):
        llm.generate([1] * 40)


def llama(**settings) -> LlamaConfig:
    return tiny.make_config("LlamaConfig", vocab_size=PADDED, **settings)


def of_family(folder, target, vocab):
    """The target's twin, its vocabulary padded to `vocab`."""
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(vocab, mean_resizing=False)
    return tiny.save_model(folder, model)


@pytest.mark.parametrize("vocab", [tiny.VOCAB, PADDED, 320])
def test_a_family_may_pad_its_vocabularies_differently(vocab, tmp_path):
    target = tiny.save(tmp_path / "target", llama())
    draft = of_family(tmp_path / "draft", target, vocab)
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    assert any(token >= tiny.VOCAB for completion in plain for token in completion.token_ids)
    for verifier in ("walk", "block"):
        llm = LLM(target, proposer=f"draft:{draft}", verifier=verifier, k=4, dtype="float32", device="cpu")
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in plain]
        assert sum(llm.stats.accepted) > 0
    sampled = llm.generate(PROMPTS, SamplingParams(temperature=2.0, seed=1, max_tokens=20))
    assert all(len(completion.token_ids) == 20 for completion in sampled)


def test_a_draft_may_have_tokens_of_its_own(tmp_path, caplog):
    target = tiny.save(tmp_path / "target", llama())
    draft = tiny.save(tmp_path / "draft", llama(), size=tiny.VOCAB + 4)
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    llm = LLM(target, proposer=f"draft:{draft}", k=4, dtype="float32", device="cpu")
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in plain]
    assert "of the target's 256 tokens it has 100%, and it guesses by tokens" in caplog.text


def test_a_recurrent_draft_is_refused(shelf):
    with pytest.raises(OutriderError, match="recurrent draft is not handled yet; use an attention model"):
        LLM(shelf.folder("llama"), proposer=f"draft:{shelf.folder('mamba2')}", device="cpu")


def test_a_draft_of_a_shorter_context_stops_there(tmp_path, caplog):
    target = tiny.save(tmp_path / "target", llama())
    draft = tiny.save(tmp_path / "draft", llama(max_position_embeddings=32))
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    llm = LLM(
        target, proposer=f"draft:{draft}", k=4, dtype="float32", device="cpu", max_num_seqs=2, max_num_batched_tokens=5
    )
    with caplog.at_level(logging.WARNING, logger="outrider"):
        ours = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in ours] == [c.token_ids for c in plain]
    assert [r.getMessage() for r in caplog.records] == [
        "the draft model's context of 32 tokens is full; going on without it"
    ]
    assert llm.stats.draft_tokens > 0
    before = llm.stats
    llm.generate([list(range(40))], GREEDY)  # a prompt that the draft cannot hold at all
    assert llm.stats.draft_tokens == before.draft_tokens
