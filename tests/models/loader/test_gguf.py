"""GGUF files as targets and drafts."""

import json
import os
import random
import shutil
from errno import EACCES
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, OutriderError, SamplingParams
from outrider.core import tree
from outrider.errors import UnsupportedModel
from outrider.models.loader.load import load_checkpoint
from outrider.models.torch.gguf_linear import BlockLinear
from tests.helpers import tiny
from tests.helpers.gguf_files import CHAT, SIZES, write_gguf

NAMES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "phi3": "Phi3Config",
    "gemma3": "Gemma3TextConfig",
    "gemma": "GemmaConfig",
    "gemma2": "Gemma2Config",
    "granite": "GraniteConfig",
    "olmo2": "Olmo2Config",
    "smollm3": "SmolLM3Config",
}
TIED = ("qwen2", "gemma", "gemma2", "gemma3")
SPECIAL = {
    "gemma2": {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    "gemma3": {"query_pre_attn_scalar": 32},
    "smollm3": {"pad_token_id": None},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
}


def _model(name="llama", **settings):
    torch.manual_seed(3)
    sizes = SIZES | {"head_dim": 32, "num_hidden_layers": 2, "initializer_range": 0.1}
    config = tiny.make_config(NAMES[name], **sizes | SPECIAL.get(name, {}) | settings)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape) if weight.dim() == 1 else 0
    return model


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", _model())


@pytest.mark.fast_cases(
    "F32-float32-llama",
    "F32-float32-phi3",
    "F32-float32-gemma",
    "F32-float32-granite",
    "F32-float32-smollm3",
    "F16-float16-mistral",
    "F16-float16-qwen3",
    "F16-float16-gemma3",
    "F16-float16-gemma2",
    "F16-float16-olmo2",
    "BF16-bfloat16-qwen2",
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
@torch.inference_mode()
def test_logits_are_those_of_the_model_that_was_written(tmp_path, name, kind, dtype):
    model = _model(name, tie_word_embeddings=name in TIED)
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    loaded = load_checkpoint(path, dtype="float32").model
    loaded.set_attn_implementation("eager")
    ids = torch.randint(tiny.VOCAB, (1, 20))
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.fast_cases(
    "False-llama-Q8_0",
    "False-llama-Q4_1",
    "False-llama-Q5_1",
    "False-llama-Q6_K",
    "False-gemma3-Q8_0",
    "True-llama-Q4_0",
    "True-llama-Q5_0",
    "True-llama-Q4_K",
    "True-phi3-Q8_0",
)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", kind) for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")]
    + [("llama", kind) for kind in ("IQ4_NL", "IQ4_XS", "MXFP4")]
    + [("phi3", "Q8_0"), ("gemma3", "Q8_0")],
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
@torch.inference_mode()
def test_the_kernels_multiply_the_blocks(tmp_path, name, kind, tied):
    """Activations of 8 bits leave errors of about a percent. Tree, chain and plain pass agree in all bits."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64} if kind.endswith(("_K", "_XS")) else {}
    path = write_gguf(tmp_path / "model.gguf", _model(name, tie_word_embeddings=tied, **sizes), kind)
    target = tiny.make_target(load_checkpoint(path), slots=2, context=64, kernels="native")
    assert target.kernels == f"native {kind}"
    model = load_checkpoint(path).model
    model.set_attn_implementation("eager")
    chance = random.Random(1)
    seq = tiny.admit(target, 0, tiny.text(chance, 12))
    draft = tree.chain(torch.tensor([tiny.text(chance, 3)]), (3,))
    scores = target.score(tiny.everything([seq]), draft).logits[0]
    ids = torch.tensor([list(seq.token_ids) + draft.tokens[0].tolist()])
    expected = model(ids).logits[0, -4:]
    assert ((scores - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 0.08
    alone = target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits[0]
    assert torch.equal(alone[0], scores[0])


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
@torch.inference_mode()
def test_the_kernels_multiply_float16_as_it_is_stored(tmp_path):
    model = _model()
    for weight in model.parameters():
        weight.copy_(weight.half())
    path = write_gguf(tmp_path / "model.gguf", model, "F16")
    ids = tiny.text(random.Random(1), 12)
    expected = model(torch.tensor([ids])).logits[0, -1]
    folder = tiny.save_model(tmp_path / "folder", model.half())
    for source in (path, folder):
        target = tiny.make_target(load_checkpoint(source), slots=2, context=64, kernels="native")
        packed = target._decoder.weights.packed
        assert {packed[name].bits for name in ("0.qkv", "0.out", "0.gate_up", "0.down")} == {16}
        logits = target.score(tiny.everything([tiny.admit(target, 0, ids)]), tree.empty(1, target.device)).logits[0, 0]
        assert torch.allclose(logits, expected, atol=1e-4)


@pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")
def test_types_may_differ_within_a_layer(tmp_path):
    """As in Q4_K_M files, which give the values more bits than the queries and keys."""
    kinds = {"attn_v": "Q8_0", "ffn_down": "Q5_1", "token_embd": "Q8_0", "ffn_up": "Q5_0"}
    path = write_gguf(tmp_path / "model.gguf", _model(), "Q4_0", kinds=kinds)
    llm = LLM(path, proposer="ngram", kernels="native", max_model_len=64, max_num_seqs=2)
    assert llm.parts.target.kernels == "native Q4_0+Q5_0+Q5_1+Q8_0"
    prompts = [[3, 4, 5, 3, 4], [7, 8, 9]]
    params = {"max_tokens": 16, "ignore_eos": True}
    texts = [each.token_ids for each in llm.generate(prompts, SamplingParams(k=4, **params))]
    assert texts == [each.token_ids for each in llm.generate(prompts, SamplingParams(k=0, **params))]


def test_weights_are_not_expanded(file):
    checkpoint = load_checkpoint(file)
    model = checkpoint.model
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert not layers
    assert checkpoint.block_types == ("Q8_0",)
    blocks = next(module.blocks for module in model.modules() if isinstance(module, BlockLinear))
    assert blocks.nbytes == blocks.shape.numel() * 34 // 32


def test_a_file_is_a_draft(file):
    llm = LLM(file, proposer=f"draft:{file}", k=3, max_model_len=64, max_num_seqs=1)
    completion = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=16, ignore_eos=True))[0]
    assert completion.stats.tau > 3  # the draft is the target


def test_tokenizer_template_and_end_tokens(file):
    checkpoint = load_checkpoint(file)
    assert checkpoint.end_ids == {1, 2}
    assert checkpoint.tokenizer.chat_template == CHAT
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer("hello")["input_ids"]) == "hello"
    assert checkpoint.context == 128


@pytest.mark.parametrize(
    ("rule", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 1234", " a", "  ", " b", "\n\n"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", " a", "  ", " b", "\n\n"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", " a", "  ", " b", "\n\n"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", " a", "  ", " b", "\n\n"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", " a", "  ", " b", "\n\n"]),
        ("gpt-4o", ["it's", " ", "123", "4", " a", "  ", " b", "\n\n"]),
        ("deepseek-v3", ["it", "'s", " ", "123", "4", " a", "  ", " b", "\n\n"]),
        ("deepseek-llm", ["it", "'", "s", " ", "1234", " a", "  ", " b", "\n", "\n"]),
        ("deepseek-coder", ["it", "'", "s", " ", "1", "2", "3", "4", " a", "  ", " b", "\n", "\n"]),
        ("falcon", ["it", "'", "s", " ", "123", "4", " a", "  ", " b", "\n\n"]),
        ("bloom", ["it's", " 1234", " a", "  ", " b", "\n\n"]),
        ("kimi-k2", ["it's", " ", "123", "4", " a", "  ", " b", "\n\n"]),
        ("afmoe", ["it", "'s", " ", "1", "234", " a", "  ", " b", "\n\n"]),
    ],
)
def test_text_is_split_by_the_rule_of_the_file(tmp_path, rule, pieces):
    """The splits of llama.cpp, before bytes are merged."""
    path = write_gguf(tmp_path / "model.gguf", _model(), rule=rule)
    splitter = load_checkpoint(path).tokenizer.backend_tokenizer.pre_tokenizer
    found = [piece for piece, _ in splitter.pre_tokenize_str("it's 1234 a   b\n\n")]
    readable = [piece.replace("\u0120", " ").replace("\u010a", "\n") for piece in found]
    assert "".join(readable) == "".join(pieces)
    assert readable == pieces


def test_an_unknown_rule_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", _model(), rule="rule-of-2030")
    with pytest.raises(UnsupportedModel, match="splits text by the rule 'rule-of-2030'; supported are default"):
        load_checkpoint(path)


def test_torch_computes_in_float32(file):
    llm = LLM(file, proposer="ngram", kernels="torch", dtype="float32", max_model_len=64, max_num_seqs=1)
    assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    with pytest.raises(UnsupportedModel, match="run on torch in float32 only; use dtype float32"):
        LLM(file, kernels="torch", dtype="bfloat16")


def test_rotary_factors_divide_the_frequencies(tmp_path):
    model = _model()
    plain = load_checkpoint(write_gguf(tmp_path / "plain.gguf", model)).model.model.rotary_emb.inv_freq
    factors = np.linspace(1, 8, len(plain), dtype=np.float32)
    path = write_gguf(tmp_path / "f.gguf", model, add=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    scaled = load_checkpoint(path).model.model.rotary_emb.inv_freq
    assert torch.allclose(scaled * torch.from_numpy(factors), plain)


def test_quantize_is_refused(file):
    with pytest.raises(OutriderError, match=r"quantized already \(Q8_0\); leave quantize out"):
        LLM(file, quantize="int8")


def test_new_weights_are_refused(file):
    if not tiny.compiles():
        pytest.skip("needs a C++ compiler")
    target = LLM(file, max_model_len=64, max_num_seqs=1).parts.target
    with pytest.raises(OutriderError, match="takes no new ones"):
        target.update_weights({}, version=1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
            r"damaged or truncated: it has \d+ bytes of at least \d+; download it again",
        ),
        (lambda path: path.write_bytes(b"GGUF"), "damaged or truncated"),
        (lambda path: path.write_bytes(b"PK" + path.read_bytes()), r"no GGUF file: its first bytes are b.PKGG. and"),
        (lambda path: path.write_bytes(b""), "is no GGUF file: it is empty; download it again"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_damaged_files(tmp_path, file, damage, message):
    path = shutil.copy(file, tmp_path / "damaged.gguf")
    damage(path)
    with pytest.raises(OutriderError, match=message):
        load_checkpoint(path)


def test_a_file_without_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", _model(), tokens=False)
    with pytest.raises(OutriderError, match="has no tokenizer; convert the model again"):
        load_checkpoint(path)


def test_an_architecture_that_is_not_supported(tmp_path):
    path = tmp_path / "bert.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(1)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(UnsupportedModel, match="bert"):
        load_checkpoint(path)


def test_types_that_cannot_be_read_are_named(tmp_path, file):
    content = bytearray(file.read_bytes())
    place = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    content[place : place + 4] = (99).to_bytes(4, "little")
    path = tmp_path / "unknown.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"the tensor blk.0.attn_q.weight has the unknown type 99; convert"):
        load_checkpoint(path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@torch.inference_mode()
def test_rotary_scaling_is_that_of_the_file(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 32
    model = _model(rope_parameters=rope)

    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(32)

    loaded = load_checkpoint(write_gguf(tmp_path / "model.gguf", model, "F32", add=add), dtype="float32").model
    loaded.set_attn_implementation("eager")
    ids = torch.randint(tiny.VOCAB, (1, 20))
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)


@torch.inference_mode()
def test_longrope_factors_are_those_of_the_file(tmp_path):
    """Of Phi-4-mini, which also rotates a part of each head."""
    short, long = [[1 + 0.1 * i * slope for i in range(12)] for slope in (1, 5)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": short, "long_factor": long, "attention_factor": 1.2}
    rope["original_max_position_embeddings"] = 64
    model = _model("phi3", rope_parameters=rope, original_max_position_embeddings=64, pad_token_id=None)

    def add(writer):
        writer.add_rope_dimension_count(24)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(1.2)
        writer.add_tensor("rope_factors_short.weight", np.array(short, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.array(long, np.float32))

    checkpoint = load_checkpoint(write_gguf(tmp_path / "model.gguf", model, "F32", add=add), dtype="float32")
    assert checkpoint.context == 64
    loaded = checkpoint.model
    loaded.set_attn_implementation("eager")
    ids = torch.randint(tiny.VOCAB, (1, 20))
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)


def _split(path, count):
    """Write the tensors of a file into `count` files, as llama-gguf-split does. Return the first one."""
    reader = gguf.GGUFReader(path)
    names = [path.with_name(f"model-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "llama")
        if not i:
            for field in reader.fields.values():
                if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                    kinds = field.types
                    sub_type = kinds[1] if len(kinds) > 1 else None
                    writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=sub_type)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[i::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
            getattr(writer, step)()
    return names


def test_a_model_in_several_files(tmp_path, file):
    path = shutil.copy(file, tmp_path / "whole.gguf")
    first, second, third = _split(path, 3)
    whole = load_checkpoint(file).model.state_dict()
    parts = load_checkpoint(first).model.state_dict()
    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], value) for name, value in whole.items())
    with pytest.raises(OutriderError, match=r"is a part of a model; give the first part, model-00001-of-00003.gguf"):
        load_checkpoint(second)
    for swapped in ((first, second), (second, third)):
        contents = [part.read_bytes() for part in swapped]
        for part, content in zip(swapped, reversed(contents), strict=True):
            part.write_bytes(content)
        with pytest.raises(OutriderError, match=r"is part \d of a model by its contents and part \d by its name; give"):
            load_checkpoint(first)
        for part, content in zip(swapped, contents, strict=True):
            part.write_bytes(content)
    second.unlink()
    with pytest.raises(OutriderError, match=r"is one of 3 parts, and model-00002-of-00003.gguf is missing"):
        load_checkpoint(first)
    third.write_bytes(third.read_bytes()[:900])
    shutil.copy(third, second)
    with pytest.raises(OutriderError, match=r"00002-of-00003.gguf is damaged or truncated: it has 900 bytes of"):
        load_checkpoint(first)


def test_a_file_without_permission(file, monkeypatch):
    def refuse(*_):
        raise PermissionError(EACCES, "Permission denied")

    os.utime(file, (1, 1))  # an unchanged file is not read again
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OutriderError, match=r"tiny.gguf cannot be read \(Permission denied\); change its permissions"):
        load_checkpoint(file)


def test_an_unknown_rotary_scaling_is_named(tmp_path):
    add = lambda writer: writer.add_string("llama.rope.scaling.type", "su")  # noqa: E731
    path = write_gguf(tmp_path / "model.gguf", _model(), add=add)
    with pytest.raises(OutriderError, match=r"has no field llama.rope.scaling.factor"):
        load_checkpoint(path)


def test_partial_rotary_embeddings_are_refused(tmp_path, monkeypatch):
    add = gguf.GGUFWriter.add_rope_dimension_count
    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_dimension_count", lambda writer, _: add(writer, 24))
    path = write_gguf(tmp_path / "model.gguf", _model())
    with pytest.raises(UnsupportedModel, match="rotates 24 of 32 dimensions of each head"):
        load_checkpoint(path)


def test_a_missing_tensor_is_named(tmp_path):
    model = _model()
    del model.model.layers[1].mlp.up_proj
    path = write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(OutriderError, match=r"has no tensor blk.1.ffn_up.weight"):
        load_checkpoint(path)


def test_run_answers_with_a_file(file):
    from typer.testing import CliRunner

    from outrider.cli.app import app

    arguments = ["run", "hello", "--target", str(file), "--max-tokens", "4", "--max-model-len", "64", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])
