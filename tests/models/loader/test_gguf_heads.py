"""Draft heads in GGUF files: the same as in the folders that were converted."""

from dataclasses import replace

import gguf
import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.heads.description import BlockView
from outrider.models.heads.files import read_target_info
from outrider.models.heads.formats.base import TargetInfo
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.mtp import has_mtp
from outrider.models.heads.store import import_head
from outrider.models.loader.load import load_checkpoint
from tests.helpers import tiny
from tests.helpers.gguf_architectures import writable_model, write_architecture
from tests.helpers.heads import HEAD, MASK, TABLE, cases, random_draft

_CONVOLVED = {"attention": "attn", "mlp": "ffn"}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"norm": "output_norm", "lm_head": "output", "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm"}
_TOP |= (
    {"embed_tokens": "token_embd"}
    | {f"markov_head.{part}": part for part in ("markov_w1", "markov_w2")}
    | {"confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden"}
)
_LAYER |= {f"{part}_conv.kernel_projection": f"{other}_conv_proj" for part, other in _CONVOLVED.items()}


def _target(vocab=96):
    return TargetInfo(
        vocab=vocab,
        hidden=64,
        layers=8,
        context=128,
        name="target",
        head=lambda: HEAD,
        embedding=lambda: TABLE,
        unused_id=None,
        layer_types=(),
    )


def _interleaved(weight, heads):
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _add_selector(writer, kind, config):
    """Add the fields that only DFlash 2 has."""
    inner = config.get("dflash_config", {})
    if "selector_rank" not in inner:
        return
    for field in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        writer.add_uint32(f"{kind}.{field}", inner[field])
    writer.add_uint32(f"{kind}.attention.sliding_window", config["sliding_window"])
    writer.add_bool(f"{kind}.attention.causal", inner["causal"])


def _write(path, name, kind, *, factors=None, fields=()):
    """Write a head as llama.cpp's converter does. Return the file and what was written."""
    format, description = cases()[name]
    draft = random_draft(description)
    weights = dict(draft.state_dict()) | ({"ids": draft.ids} if description.draft_vocab else {})
    config, tensors = format_of(format).write(description, weights, _target())
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(96)
    writer.add_array(f"{kind}.target_layers", [layer + 1 for layer in description.aux_states.layers])
    writer.add_uint32(f"{kind}.block_size", config.get("block_size", 0))
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK)
    if "sample_from_anchor" in config:
        writer.add_bool(f"{kind}.sample_from_anchor", config["sample_from_anchor"])
    _add_selector(writer, kind, config)
    for field, value in dict(fields).items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{kind}.{field}", value)
    for key, weight in tensors.items():
        layer, _, part = key.replace("midlayer", "layers.0").removeprefix("layers.").partition(".")
        module, _, suffix = part.rpartition(".")
        if key == "d2t":
            writer.add_tensor("d2t", (weight + torch.arange(len(weight))).numpy())
        elif part.endswith("base_kernel"):
            writer.add_tensor(f"blk.{layer}.{_CONVOLVED[module.partition('_')[0]]}_conv_base", weight.numpy())
        elif key.endswith("_codebook"):
            writer.add_tensor(f"selector_{part.removesuffix('_codebook').rpartition('.')[2]}.weight", weight.numpy())
        elif layer.isdecimal():
            permuted = kind == "eagle3" and module in ("self_attn.q_proj", "self_attn.k_proj")
            values = _interleaved(weight, 4 if "q_proj" in module else 2) if permuted else weight
            writer.add_tensor(f"blk.{layer}.{_LAYER[module]}.{suffix}", values.float().contiguous().numpy())
        elif key != "t2d":
            stem, _, suffix = key.rpartition(".")
            writer.add_tensor(f"{_TOP.get(stem, stem)}.{suffix}", weight.float().numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return description, weights


def _llama3_factors():
    """Those of the case with the rotary scaling of Llama 3: factor 8 of an original length of 64."""
    lengths = 2 * torch.pi * 5e5 ** (torch.arange(0, 16, 2) / 16)
    smooth = ((64 / lengths - 1) / 3).clamp(0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


@pytest.mark.parametrize(
    ("name", "kind", "factors"),
    [
        ("eagle3", "eagle3", None),
        ("eagle3 without a norm", "eagle3", _llama3_factors()),
        ("dflash", "dflash", None),
        ("dflash2", "dflash", None),
        ("dspark", "dflash", None),
        ("dspark with tables", "dflash", None),
    ],
)
def test_a_head_is_that_of_the_folder_that_was_converted(tmp_path, name, kind, factors):
    path = tmp_path / "head.gguf"
    description, weights = _write(path, name, kind, factors=factors)
    head = import_head(path, _target())
    body = replace(head.description.body, epsilon=1e-5)  # stored in 32 bits
    assert replace(head.description, body=body) == description
    assert head.weights.keys() == weights.keys() - {"ids"}
    assert all(torch.equal(head.weights[key].float(), weights[key].float()) for key in head.weights)
    with pytest.raises(UnsupportedModel, match=r"is a draft head, which does not run alone; use it as draft:"):
        load_checkpoint(path)


def test_a_file_has_a_module_for_further_tokens(tmp_path):
    """Of Qwen 3.5, whose files have norms plus one. The target does not run the module."""
    format, description = cases(32, tiny.VOCAB)["gated qwen"]
    body = replace(description.body, dim=8, ffn=48, rotary=0.25, theta=1e4, epsilon=1e-6)
    aux_states = replace(description.aux_states, layers=(3,))
    description = replace(description, target_layers=4, aux_states=aux_states, body=body)
    draft = random_draft(description, table=torch.randn(tiny.VOCAB, 32))
    _, tensors = format_of(format).write(description, dict(draft.state_dict()), None)
    names = {"mtp.fc": "nextn.eh_proj", "mtp.norm": "nextn.shared_head_norm"}
    names |= {"mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm"}
    names |= {f"mtp.layers.0.{part}": tensor for part, tensor in _LAYER.items()}
    names["mtp.layers.0.post_attention_layernorm"] = "post_attention_norm"
    module = {}
    for key, weight in tensors.items():
        stem = key.removesuffix(".weight")
        if stem in names:
            module[f"{names[stem]}.weight"] = (weight + stem.endswith("norm")).float()
    module["nextn.enorm.weight"] += 1  # its published name does not end in norm
    module["nextn.hnorm.weight"] += 1
    model = writable_model("qwen3_5_text")
    path = write_architecture(tmp_path / "model.gguf", model, module=module)
    assert has_mtp(path)
    assert not has_mtp(write_architecture(tmp_path / "plain.gguf", model))
    head = import_head(path, read_target_info(path))
    assert head.description.body.attention_gate
    assert all(torch.allclose(head.weights[key], weight, atol=1e-5) for key, weight in draft.state_dict().items())
    llm = LLM(path, proposer="mtp", max_model_len=64, max_num_seqs=1, check="never")
    texts = [llm.generate([[5, 6, 7]], SamplingParams(k=k, max_tokens=8, ignore_eos=True))[0].token_ids for k in (3, 0)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"final_logit_softcapping": 30.0}, "capped logits"),
        ({"logit_scale": 2.0}, "scaled logits"),
        ({"embedding_scale": 2.0}, "is a draft head with scaled embeddings or values"),
    ],
)
def test_what_draft_heads_do_not_support_is_refused(tmp_path, fields, message):
    path = tmp_path / "head.gguf"
    _write(path, "dflash", "dflash", fields=fields)
    with pytest.raises(OutriderError, match=message):
        import_head(path, _target())


def test_windows_and_causal_blocks_are_read(tmp_path):
    path = tmp_path / "head.gguf"
    _write(path, "dflash", "dflash", fields={"attention.sliding_window": 8, "attention.causal": 1})
    assert import_head(path, _target()).description.block.views == (BlockView(window=8, causal=True),) * 3


def test_an_unknown_scaling_of_a_head_is_refused(tmp_path):
    path = tmp_path / "head.gguf"
    _write(path, "eagle3", "eagle3", factors=torch.linspace(1, 3, 8))
    with pytest.raises(UnsupportedModel, match="has rotary factors that no known scaling gives"):
        import_head(path, _target())
