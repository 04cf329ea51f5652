"""Error messages for invalid model folders and settings, and drafts with other vocabularies or contexts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.load import check_model, load_checkpoint
from tests.helpers import tiny

PADDED = 288  # the target's vocabulary; the tokenizer has 256 tokens
PROMPTS = [list(b"to be or not to be"), list(b"a rose is a rose is")]
GREEDY = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return tiny.Shelf(tmp_path_factory.mktemp("load"))


@pytest.fixture
def folder(shelf, tmp_path):
    """A valid model folder, which a test may change."""
    return shutil.copytree(shelf.folder("llama"), tmp_path / "model")


def set_config(folder, **settings):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def truncate_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def drop_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_weights(folder, change, metadata="pt"):
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": metadata})


def without_head(weights):
    return {name: weight for name, weight in weights.items() if name != "lm_head.weight"}


def split_weights(folder):
    """Write the weights as two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        part = {name: weights[name] for name in names if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def split_and(change):
    def damage(folder):
        split_weights(folder)
        change(folder)

    return damage


def replace_by(name, text=""):
    """Remove the weights and write another file."""

    def replace(folder):
        (folder / "model.safetensors").unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    return replace


def only(name):
    """Leave nothing but a file of this name."""

    def remove(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_text("{}")

    return remove


def make_folder(name):
    def replace(folder):
        (folder / name).unlink()
        (folder / name).mkdir()

    return replace


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
INDEX = "model.safetensors.index.json"
SECOND = "model-00002-of-00002.safetensors"
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}
INVALID_FOLDERS = {
    "no model type": (lambda f: (f / "config.json").write_text("{}"), "config.json has no model_type; give the folder"),
    "model type is a list": (lambda f: set_config(f, model_type=["llama"]), "config.json cannot be read .*; copy the"),
    "image model": (lambda f: set_config(f, model_type="vit"), "vit is not a causal language model; give a text model"),
    "classifier": (
        lambda f: set_config(f, **CLASSIFIER),
        "a LlamaForSequenceClassification, which writes no text; giv",
    ),
    "embedding model": (
        lambda f: (set_config(f, architectures=["LlamaModel"]), change_weights(f, without_head)),
        "lack lm_head.weight, as a LlamaModel does; give a model that generates text",
    ),
    "no layers": (lambda f: set_config(f, num_hidden_layers=0), "config.json has num_hidden_layers 0; copy the check"),
    "no heads": (lambda f: set_config(f, num_attention_heads=0), "config.json cannot be read .*; copy the checkpoint"),
    "odd heads": (lambda f: set_config(f, num_attention_heads=5), "cannot be read .*not a multiple of .*; copy the ch"),
    "end token as text": (lambda f: set_config(f, eos_token_id="</s>"), "cannot be read .*eos_token_id.*; copy the ch"),
    "rotary settings as text": (lambda f: set_config(f, rope_parameters="linear"), "cannot be read .*rope_parameters"),
    "unknown rotary scaling": (lambda f: set_config(f, rope_parameters={"rope_type": "zork"}), "cannot be read .*zork"),
    "config in another encoding": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), "cannot be read .*utf-8"),
    "empty config": (
        lambda f: (f / "config.json").write_text(""),
        "config.json cannot be read .*; copy the checkpoint",
    ),
    "config is a folder": (make_folder("config.json"), "holds no config.json; give the folder of a Hugging Face model"),
    "adapter": (only("adapter_config.json"), "a PEFT adapter and no model; merge it with merge_and_unload"),
    "pipeline of diffusers": (only("model_index.json"), "a pipeline of diffusers .*; give the folder of a text model"),
    "own format of a publisher": (only("params.json"), "own format; give the folder of its Hugging Face version"),
    "only a GGUF file": (only("model.gguf"), "holds GGUF files; give the file itself, .*model.gguf"),
    "GGUF weights": (replace_by("model.gguf"), "holds GGUF files; give the file itself, .*model.gguf"),
    "bin weights": (replace_by("pytorch_model-1.bin"), "weights as pytorch_model-1.bin, .*; write safetens"),
    "pth weights": (replace_by("consolidated.00.pth"), "weights as consolidated.00.pth, .*; give the folder of its"),
    "ONNX model": (replace_by("onnx/model.onnx"), "an ONNX model, onnx/model.onnx; give the folder of the checkpoint"),
    "MLX weights": (lambda f: set_config(f, quantization={"bits": 4}), "quantized for MLX; give the folder of the ori"),
    "weights are a pointer": (replace_by("model.safetensors", POINTER), "is a pointer of git-lfs .*; run git lfs pull"),
    "config is a pointer": (lambda f: (f / "config.json").write_text(POINTER), "is a pointer of git-lfs .*; run git"),
    "tokenizer is a pointer": (lambda f: (f / "tokenizer.json").write_text(POINTER), "is a pointer of git-lfs .*; run"),
    "missing part": (
        split_and(lambda f: (f / SECOND).unlink()),
        f"lacks {SECOND}, which {INDEX} names; copy the missi",
    ),
    "missing index": (split_and(lambda f: (f / INDEX).unlink()), f"lacks {INDEX}, which says .*; copy it as well"),
    "broken index": (split_and(lambda f: (f / INDEX).write_text("[]")), f"{INDEX} cannot be read .*; copy the checkp"),
    "truncated part": (split_and(lambda f: (f / SECOND).write_bytes(b"123")), f"{SECOND} is damaged or truncated"),
    "empty part": (split_and(lambda f: (f / SECOND).write_bytes(b"")), f"{SECOND} is damaged or truncated"),
    "part without its end": (
        split_and(lambda f: (f / SECOND).write_bytes((f / SECOND).read_bytes()[:-64])),
        f"{SECOND} is damaged or truncated .*; copy or download it again",
    ),
    "several GGUF files": (
        lambda f: (only("a.gguf")(f), (f / "b.gguf").touch()),
        "holds GGUF files; give one of them, .*a.gguf or .*b.gguf",
    ),
    "web page": (
        replace_by("model.safetensors", "<!DOCTYPE html>"),
        "is damaged or truncated .*; copy or download it again",
    ),
    "no folder": (shutil.rmtree, "is not a folder; give the folder that holds the model's config.json, or a"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no config.json; give the folder of a Hugging Face"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read .* copy the check"),
    "config is not an object": (lambda f: (f / "config.json").write_text("[1]"), "config.json cannot be read"),
    "config value of wrong type": (
        lambda f: set_config(f, hidden_size="wide"),
        "config.json cannot be read .*hidden_size",
    ),
    "unknown model type": (
        lambda f: set_config(f, model_type="zork"),
        "'zork', which transformers .* update transformers",
    ),
    "code in the checkpoint": (
        lambda f: set_config(f, model_type="zork", auto_map={"AutoConfig": "zork.Zork"}),
        "code in checkpoints is never executed",
    ),
    "masked model": (lambda f: set_config(f, model_type="bert"), "bert is not a causal language model; give a text"),
    "encoder-decoder model": (lambda f: set_config(f, model_type="led"), "of encoder-decoder models only bart, "),
    "not a text model": (lambda f: set_config(f, model_type="clip"), "clip is not a causal language model"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "holds no .safetensors; write the weights there"),
    "truncated weights": (truncate_weights, "is damaged or truncated .*; copy or download it again"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "is damaged or truncated .*; copy or down"),
    "missing weight": (drop_tensor, "lack model.layers.1.mlp.up_proj.weight; copy the checkpoint again"),
    "weights of other shapes": (
        lambda f: set_config(f, intermediate_size=40),
        r"do not fit its config.json: model.layers.0.mlp.down_proj.weight is \(32, 48\) and should be \(32, 40\)",
    ),
    "unknown activation": (lambda f: set_config(f, hidden_act="zork"), "cannot be read .*zork"),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        r"has no working tokenizer \(there is no tokenizer.json\); copy its tokenizer.json there",
    ),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "has no working tokenizer"),
    "broken generation config": (
        lambda f: (f / "generation_config.json").write_text("{"),
        "generation_config.json cannot be read",
    ),
}


@pytest.mark.parametrize("case", INVALID_FOLDERS)
def test_error_message_for_invalid_folder(case, folder):
    change, message = INVALID_FOLDERS[case]
    change(folder)
    with pytest.raises(OutriderError, match=message) as raised:
        load_checkpoint(folder, device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.skipif("dots3_note" not in CONFIG_MAPPING, reason="an older transformers")
def test_sizes_that_differ_between_layers_are_accepted(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "dots3_note"}')
    check_model(tmp_path)


def test_unreadable_folder_is_named(folder, monkeypatch):
    def refuse(self, *_args):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(folder), "open", refuse)
    with pytest.raises(
        OutriderError, match=r"config.json cannot be read \(Permission denied\); change its permissions"
    ):
        load_checkpoint(folder, device="cpu")


def test_missing_package_is_named(shelf, monkeypatch):
    def fail(*_args, **_settings):
        raise ImportError("\nMambaMixer requires the mamba_ssm library but it was not found.\nInstall it. \n")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    message = r"\(mamba2\) needs a package that is missing \(MambaMixer requires the mamba_ssm library .*\); install it"
    with pytest.raises(OutriderError, match=message) as raised:
        load_checkpoint(shelf.folder("mamba2"), device="cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is unknown; use auto, float32, bfloat16 or float16"),
        ({"device": "zork"}, "device 'zork' cannot be used here; try auto or cpu"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"max_model_len": 4096}, "max_model_len is 4096; this model takes from 2 to 128 tokens"),
        ({"max_model_len": 1}, "max_model_len is 1; this model takes"),
    ],
)
def test_error_message_for_invalid_setting(settings, message, shelf):
    with pytest.raises(OutriderError, match=message):
        LLM(shelf.folder("llama"), **settings)


def test_generation_config_overrides_end_ids(folder):
    set_config(folder, eos_token_id=9)
    (folder / "generation_config.json").unlink()
    assert load_checkpoint(folder, device="cpu").end_ids == {9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load_checkpoint(folder, device="cpu").end_ids == {3, 4}


@pytest.mark.parametrize(
    ("stored", "kernels", "fast", "expected", "reason"),
    [
        ("float32", "auto", True, torch.float32, "as the checkpoint is stored"),
        ("float16", "auto", True, torch.float32, "as CPUs have no fast float16"),
        ("bfloat16", "auto", True, torch.bfloat16, "as the checkpoint is stored"),
        ("bfloat16", "torch", True, torch.bfloat16, "as the checkpoint is stored"),
        ("bfloat16", "torch", False, torch.float32, "as torch has no fast bfloat16 on this CPU"),
    ],
)
def test_auto_dtype_follows_checkpoint_if_it_is_fast(folder, monkeypatch, stored, kernels, fast, expected, reason):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    set_config(folder, dtype=stored)
    checkpoint = load_checkpoint(folder, device="cpu", kernels=kernels)
    assert (checkpoint.dtype, checkpoint.dtype_reason) == (expected, reason)


@pytest.mark.parametrize(("compiler", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_native_kernels_run_bfloat16_on_every_cpu(folder, monkeypatch, compiler, expected):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setenv("CXX", "sh" if compiler else "no-such-compiler")
    set_config(folder, dtype="bfloat16")
    assert load_checkpoint(folder, device="cpu").dtype == expected
    monkeypatch.setattr("outrider.models.native.support.FAMILIES", frozenset())
    assert load_checkpoint(folder, device="cpu").dtype == torch.float32


ROPES = {
    "dynamic": tiny.make_config(
        "LlamaConfig",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        max_position_embeddings=32,
    ),
    "longrope": tiny.make_config(
        "Phi3Config",
        rope_parameters={
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 32,
            "factor": 4.0,
        },
        original_max_position_embeddings=32,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_context_ends_where_rotary_scaling_changes_cached_keys(kind, tmp_path):
    folder = tiny.save(tmp_path / kind, ROPES[kind])
    options = {"dtype": "float32", "device": "cpu"}
    reason = rf"\(in longer texts, its {kind} rotary scaling changes keys that are already cached\)"
    llm = LLM(folder, proposer="ngram", k=4, **options)
    with pytest.raises(OutriderError, match=f"40 tokens long and the context holds 32; shorten the prompt {reason}"):
        llm.generate([1] * 40)
    with pytest.raises(OutriderError, match=f"max_model_len is 64; this model takes from 2 to 32 tokens {reason}"):
        LLM(folder, proposer="none", max_model_len=64, **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    prompt = [5, 6, 7, 5, 6, 7, 5]
    (completion,) = llm.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True))
    assert list(completion.token_ids) == tiny.greedy(model, prompt, 25), "up to the last token of the context"
    assert llm.stats.draft_tokens > 0


def llama(**settings) -> LlamaConfig:
    return tiny.make_config("LlamaConfig", vocab_size=PADDED, **settings)


def save_padded(folder, target, vocab):
    """Save a copy of the target with a vocabulary that is padded to `vocab`."""
    model = AutoModelForCausalLM.from_pretrained(target)
    model.resize_token_embeddings(vocab, mean_resizing=False)
    return tiny.save_model(folder, model)


@pytest.mark.fast_cases("320")
@pytest.mark.parametrize("vocab", [tiny.VOCAB, PADDED, 320])
def test_draft_with_other_vocabulary_padding(vocab, tmp_path):
    target = tiny.save(tmp_path / "target", llama())
    draft = save_padded(tmp_path / "draft", target, vocab)
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    assert any(token >= tiny.VOCAB for completion in plain for token in completion.token_ids)
    for verifier in ("walk", "block"):
        llm = LLM(target, proposer=f"draft:{draft}", verifier=verifier, k=4, dtype="float32", device="cpu")
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in plain]
        assert sum(llm.stats.accepted) > 0
    sampled = llm.generate(PROMPTS, SamplingParams(temperature=2.0, seed=1, max_tokens=20))
    assert all(len(completion.token_ids) == 20 for completion in sampled)


def test_draft_with_additional_tokens(tmp_path, caplog):
    target = tiny.save(tmp_path / "target", llama())
    draft = tiny.save(tmp_path / "draft", llama(), size=tiny.VOCAB + 4)
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    llm = LLM(target, proposer=f"draft:{draft}", k=4, dtype="float32", device="cpu")
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in plain]
    assert "of the target's 256 tokens it has 100%, and it drafts by tokens" in caplog.text


def test_recurrent_draft(shelf):
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 96}
    plain = LLM(shelf.folder("llama"), proposer="none", **options).generate(PROMPTS, GREEDY)
    llm = LLM(shelf.folder("llama"), proposer=f"draft:{shelf.folder('mamba2')}", k=3, **options)
    assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == [c.token_ids for c in plain]


def test_draft_slides_over_texts_longer_than_its_own_context(tmp_path):
    target = tiny.save(tmp_path / "target", llama())
    draft = tiny.save(tmp_path / "draft", llama(max_position_embeddings=32))
    plain = LLM(target, proposer="none", dtype="float32", device="cpu").generate(PROMPTS, GREEDY)
    llm = LLM(
        target, proposer=f"draft:{draft}", k=4, dtype="float32", device="cpu", max_num_seqs=2, max_num_batched_tokens=5
    )
    speculative = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in speculative] == [c.token_ids for c in plain]
    draft_tokens_before = llm.stats.draft_tokens
    llm.generate([list(range(40))], GREEDY)  # the prompt alone is longer than the context of the draft
    assert llm.stats.draft_tokens > draft_tokens_before > 0


def test_weights_that_exceed_the_memory_are_refused_before_they_are_loaded(folder, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.memory.free_memory", lambda: 1000)
    monkeypatch.setattr("outrider.models.loader.load.read_tokenizer", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(OutriderError, match=r"take 0\.\d+ GB in memory, and 1e-06 GB are free; free some"):
        load_checkpoint(folder, device="cpu")
