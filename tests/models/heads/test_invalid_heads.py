"""Checkpoints of draft heads that are rejected: damaged, unsupported, or of another target."""

import math
from dataclasses import replace

import pytest
import torch

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.heads.store import import_head, is_head, load_module, read_head
from outrider.models.loader.embedded import embedded
from outrider.tools.convert import checked
from tests.models.heads.checkpoints import CPU, TARGET, export_case, export_changed, random_case


def _set(name, value):
    return lambda config, _: config.update({name: value})


def _set_in_dflash_config(**values):
    return lambda config, _: config["dflash_config"].update(values)


def _set_in_text_config(**values):
    return lambda config, _: config["text_config"].update(values)


def _drop(name):
    return lambda _, tensors: tensors.pop(name)


def _drop_key(name):
    return lambda config, _: config.pop(name)


def _add(name, *shape):
    return lambda _, tensors: tensors.update({name: torch.zeros(*shape)})


def _shift_d2t(_, tensors):
    tensors["d2t"][3:] += 200


def _clear_t2d(_, tensors):
    tensors["t2d"][:] = False


def _set_yarn(**values):
    return lambda config, _: config.update(rope_scaling={"rope_type": "yarn", "factor": 4.0, **values})


def _reshape(name, shape):
    return lambda _, tensors: tensors.update({name: tensors[name].flatten()[: math.prod(shape)].reshape(shape)})


def _cast(name, dtype):
    return lambda _, tensors: tensors.update({name: tensors[name].to(dtype)})


def _set_nan(_, tensors):
    tensors["fc.weight"][0, 0] = torch.nan


def _change_second_lm_head(_, tensors):
    name = "model.layers.9.shared_head.head.weight"
    tensors[name] = tensors[name] + 1


# By name: the case, how it is changed, and the error.
INVALID = {
    "missing tensor": ("eagle3", _drop("midlayer.mlp.up_proj.weight"), "lacks 'layers.0.mlp.up_proj.weight'"),
    "missing norm": ("eagle3", _drop("norm.weight"), "no tensor 'norm.weight'"),
    "unknown tensor": ("eagle3", _add("surprise.weight", 3), "'surprise.weight' .* is unknown in this format"),
    "unknown bias": ("eagle3", _add("fc.bias", 64), "'fc.bias' .* is unknown in this format"),
    "NaN": ("eagle3", _set_nan, "fuse.weight has values that are NaN or infinite"),
    "d2t": ("eagle3 of some tokens", _shift_d2t, "d2t must hold offsets that lead to ascending ids below 96"),
    "t2d": ("eagle3 of some tokens", _clear_t2d, "do not describe the same tokens"),
    "missing d2t": ("eagle3 of some tokens", _drop("d2t"), "has 40 of 96 tokens, but d2t"),
    "draft_vocab_size": ("eagle3 of some tokens", _set("draft_vocab_size", 41), "draft_vocab_size is 41"),
    "number of layers": (
        "eagle3",
        _set("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3]}),
        "states of 2 layers with size 64 do not fit fc.weight",
    ),
    "layer beyond the target": (
        "eagle3",
        _set("num_target_layers", 4),
        "hidden states of layer 4, but its target has 4 layers",
    ),
    "embedding as a layer": ("speculators", _set("eagle_aux_hidden_state_layer_ids", [0, 3, 5]), "input of layer 0"),
    "both norms": ("eagle3.1", _set("norm_before_fc", True), "exclude each other"),
    "head_dim": ("eagle3", _set("head_dim", 32), "q_proj.weight has shape"),
    "size 0": (
        "eagle3",
        _set("num_attention_heads", 0),
        "has 0 for 'num_attention_heads'; correct it to a positive integer",
    ),
    "type": ("eagle3", _set("hidden_size", "wide"), "'wide' for 'hidden_size'; correct it to a value of type int"),
    "activation": ("eagle", _set("hidden_act", "gelu"), "hidden_act gelu"),
    "rope type": ("eagle", _set("rope_scaling", {"type": "dynamic", "factor": 2.0}), "has the rope_type 'dynamic'"),
    "window": ("eagle", _set("use_sliding_window", True), "a sliding window"),
    "one state": (
        "eagle3",
        _set("eagle_config", {"use_aux_hidden_state": False}),
        "use_aux_hidden_state is false, which is not supported",
    ),
    "float8": ("eagle", _cast("fc.weight", torch.float8_e4m3fn), "quantized draft heads are not supported"),
    "integers": ("eagle", _cast("fc.weight", torch.int32), "project.weight has dtype torch"),
    "huge size": ("eagle3", _set("intermediate_size", 10**30), "has sizes of 64, 4, 2, 16, 1000"),
    "huge vocabulary": ("legacy medusa", _set("vocab_size", 10**12), "its vocabulary has 1000000000000 tokens"),
    "epsilon": ("eagle3", _set("rms_norm_eps", math.nan), "its norms have an epsilon of nan"),
    "theta": (
        "eagle3",
        _set("rope_theta", math.nan),
        "rotary positions in config.json have values that are out of range",
    ),
    "rope factor": (
        "eagle3",
        _set_yarn(factor=math.nan),
        "rotary positions in config.json have values that are out of range",
    ),
    "rope context": (
        "eagle3",
        _set_yarn(original_max_position_embeddings=0),
        "rotary positions in config.json have values that are out of range",
    ),
    "scalar": ("eagle3", _reshape("lm_head.weight", ()), r"lm_head.weight has shape \(\) and so holds no weights"),
    "empty tensor": ("medusa", _reshape("0.0.linear.weight", (0, 64)), r"shape \(0, 64\) and so holds no weights"),
    "rows": ("medusa of some tokens", _reshape("lm_head.weight", (39, 64)), "has 39 rows instead of 40 or 96"),
    "vector": ("dspark with tables", _reshape("markov_head.markov_w1.weight", (96,)), "markov_in.weight has shape"),
    "MLA": ("deepseek", _add("model.layers.8.self_attn.kv_a_proj_with_mqa.weight", 2), r"kv_a_proj.*\(MLA\)"),
    "too few modules": ("three modules", _set("num_nextn_predict_layers", 4), "is 4, but the checkpoint has 3 modules"),
    "tables that differ": (
        "modules with tables",
        _change_second_lm_head,
        "model.layers.9. has a head.weight that differs from the first module's",
    ),
    "MoE in a later module": ("three modules", _add("model.layers.9.mlp.experts.0.up_proj.weight", 2), r"\(MoE\)"),
    "MoE": ("deepseek", _add("model.layers.8.mlp.experts.0.up_proj.weight", 2), r"experts.0.*\(MoE\)"),
    "packed MoE": ("qwen", _add("mtp.layers.0.mlp.experts.gate_up_proj", 2), r"gate_up_proj.*\(MoE\)"),
    "MoE of Nemotron": ("nemotron", _add("mtp.layers.1.mixer.experts.0.up_proj.weight", 2), r"\(MoE\)"),
    "pattern": ("nemotron", _set("mtp_hybrid_override_pattern", "*E"), r"use a draft head with '\*-'"),
    "model type": ("qwen", _set("model_type", "exaone_moe"), "layers of model_type 'exaone_moe' are not supported"),
    "module number": ("deepseek", _set("num_hidden_layers", 9), "num_hidden_layers says model.layers.9."),
    "Hydra prefix": ("hydra", _set("hydra_head_arch", "prefix-mlp"), "hydra_head_arch prefix-mlp is not supported"),
    "missing block": ("medusa", _drop("1.1.linear.weight"), "5 blocks instead of 3 heads with 2 blocks each"),
    "medusa_num_layers": ("medusa", _set("medusa_num_layers", 3), "medusa_num_layers is 3"),
    "token_map": ("medusa of some tokens", lambda _, tensors: tensors["token_map"].fill_(3), "40 different ids"),
    "missing mask token": ("peagle", _drop_key("ptd_token_id"), "does not name the mask token"),
    "missing mask state": ("peagle", _drop("mask_hidden"), "the tensor mask_hidden is missing"),
    "mask token": ("peagle", _set("ptd_token_id", 96), "mask token is 96, but its vocabulary has 96 tokens"),
    "mask state": (
        "peagle",
        lambda _, tensors: tensors.update(mask_hidden=tensors["mask_hidden"][..., 1:]),
        "mask has shape",
    ),
    "DFlare": (
        "dflash",
        _set("architectures", ["DFlareSpeculator"]),
        "DFlare is not supported; use DFlash or DFlash 2",
    ),
    "EAGLE-4": ("eagle3", _set("architectures", ["LlamaForCausalLMEagle4"]), "EAGLE-4 is not supported, because"),
    "candidate head": ("eagle3", _add("efficient_lm_head.weight", 96, 8), "EAGLE-4 is not supported, because"),
    "Domino without its parts": (
        "dflash",
        _set("architectures", ["DominoDraftModel"]),
        "there is no tensor 'prefix_gru.weight_ih_l0'; copy the draft head again",
    ),
    "projector without its parts": (
        "dflash",
        _set_in_dflash_config(projector_type="domino"),
        "there is no tensor 'prefix_gru.weight_ih_l0'; copy the draft head again",
    ),
    "projector": ("dflash", _set_in_dflash_config(projector_type="guru"), "projector_type 'guru' is not supported"),
    "selector": ("dflash2", _set_in_dflash_config(selector_top_k=None), "lacks 'selector_top_k'; copy"),
    "scaled logits": ("dflash2", _set_in_dflash_config(output_multiplier=0.5), r"\(output_multiplier\) are not supp"),
    "capped selector": ("dflash2", _set_in_dflash_config(final_logit_softcapping=30.0), "capped logits .* are not"),
    "sinks": ("dflash", _set_in_dflash_config(attention_sink_bias=True), "attention that attention_sink_bias selects"),
    "neox": ("dspark", _set("is_neox_style", False), "the attention that is_neox_style selects is not supported"),
    "sliding": ("dflash", _set("layer_types", ["sliding_attention"] * 3), "not its size; add sliding_window"),
    "types": (
        "dflash",
        _set("layer_types", ["chunked_attention"] * 3),
        "'chunked_attention' is not supported; use one",
    ),
    "number of types": ("dflash", _set("layer_types", ["full_attention"]), "has 1 entries for 3 layers; use one of"),
    "window of unknown layers": (
        "dflash",
        lambda config, _: config.update(use_sliding_window=True, sliding_window=9),
        "but not the layers that use it; add layer_types",
    ),
    "capped logits": ("dspark", _set("final_logit_softcapping", 30.0), "capped logits .* are not supported"),
    "Gemma layers": (
        "dspark",
        _set("model_type", "gemma4_text"),
        "layers of model_type 'gemma4_text' are not supported",
    ),
    "missing mask_token_id": ("dflash", _set_in_dflash_config(mask_token_id=None), "lacks 'mask_token_id'"),
    "mask_token_id": ("dspark with tables", _set("mask_token_id", 96), "mask_token_id is 96, .* has 96 rows"),
    "embeddings": (
        "dspark with tables",
        _set("target_layer_ids", [-1, 3, 5]),
        "has -1, the target's embeddings, which are not supported",
    ),
    "missing sample_from_anchor": (
        "dspark of speculators",
        _set("sample_from_anchor", None),
        "lacks sample_from_anchor",
    ),
    "missing layers": (
        "dflash of speculators",
        _set("aux_hidden_state_layer_ids", None),
        "lacks 'aux_hidden_state_layer",
    ),
    "Markov type": ("dspark", _set("markov_head_type", "gated"), "markov_head_type 'gated' is not supported"),
    "confidence head": (
        "dspark with tables",
        _add("confidence_head.proj.weight", 1, 64),
        "no tensor 'confidence_head.proj.bias'",
    ),
    "kind of speculators": (
        "speculators",
        _set("speculators_model_type", "guru"),
        "'guru' is not supported; use xpress, dspark, dflash2, domino, dflash, eagle3, peagle or mtp",
    ),
    "assistant without target": (
        "assistant",
        lambda *_: None,
        "depend on its target, a Gemma 4 model; give the target with --target DIR",
    ),
    "assistant's layers": (
        "assistant",
        _set_in_text_config(hidden_activation="silu"),
        "not those of Gemma 4's assistants",
    ),
    "assistant's layer types": (
        "assistant",
        _set_in_text_config(layer_types=["full_attention"]),
        "but there are 3 layers of type .*; correct config.json",
    ),
    "assistant's clusters": (
        "assistant with centroids",
        lambda config, _: config.update(num_centroids=7),
        "do not divide into 7 clusters of equal size",
    ),
    "assistant's rope": (
        "assistant",
        _set_in_text_config(rope_parameters={}),
        "no rope_parameters for sliding_attention",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_checkpoints_are_rejected(name, tmp_path):
    case, change, message = INVALID[name]
    folder = export_changed(tmp_path / name, case, change)
    with pytest.raises(OutriderError, match=message) as error:
        checked(folder, None)
    assert str(folder) in str(error.value)


def test_each_token_must_be_in_one_cluster():
    description, weights = random_case("assistant with centroids")
    weights["centroid_head.token_order"].fill_(3)
    with pytest.raises(OutriderError, match="each token must be in one cluster"):
        load_module(description, weights, where="head")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_damaged_files_are_rejected(tmp_path):
    export_case(tmp_path / "a", "eagle3")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(OutriderError, match=r"cannot be read .* copy the checkpoint again"):
        is_head(tmp_path / "a")
    export_case(tmp_path / "b", "medusa")
    (tmp_path / "b" / "medusa_lm_head.pt").write_bytes(b"no archive")
    with pytest.raises(OutriderError, match="is damaged or does not hold named tensors only"):
        checked(tmp_path / "b", None)
    for state in ({"a": 1}, {"a": torch.eye(3).to_sparse()}, {"a": torch.eye(3, device="meta")}):
        torch.save(state, tmp_path / "b" / "medusa_lm_head.pt")
        with pytest.raises(OutriderError, match="does not hold named tensors only"):
            checked(tmp_path / "b", None)
    (tmp_path / "a" / "model.safetensors.index.json").write_text('{"weight_map": null}')
    with pytest.raises(OutriderError, match=r"index.json cannot be read .* copy the checkpoint again"):
        checked(tmp_path / "a", None)
    with pytest.raises(OutriderError, match="is not a folder"):
        checked(tmp_path / "nowhere", None)
    with pytest.raises(OutriderError, match="holds no draft head in a known format"):
        checked(embedded("nano"), None)
    assert not is_head(embedded("nano"))


def test_another_target_is_rejected(tmp_path):
    export_case(tmp_path, "eagle3")
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 96, width 64 and 8 layers"):
        checked(tmp_path, replace(TARGET, vocab=97))
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 96, width 64 and 8 layers"):
        LLM(proposer=f"draft:{tmp_path}", dtype="float32")


@pytest.mark.parametrize(
    ("case", "projection"),
    [
        ("deepseek", "model.layers.8.eh_proj.weight"),
        ("three modules", "model.layers.8.eh_proj.weight"),
        ("qwen", "mtp.fc.weight"),
        ("mimo", "model.mtp_layers.0.input_proj.weight"),
        ("mtp of speculators", "mtp_layers.0.input_proj.weight"),
        ("nemotron", "mtp.layers.0.eh_proj.weight"),
    ],
)
def test_module_without_its_projection_is_damaged(case, projection, tmp_path):
    folder = export_changed(tmp_path, case, lambda _, tensors: tensors.pop(projection))
    with pytest.raises(OutriderError, match=f"no tensor '{projection}'; copy"):
        import_head(folder)
    if case == "three modules":
        assert is_head(folder)  # by its second module
        return
    with pytest.raises(OutriderError, match=f"no tensor '{projection}'; copy"):
        is_head(folder)  # and not a draft model without weights


def test_model_with_a_damaged_module_is_a_draft_model(tmp_path):
    def change(_, tensors):
        del tensors["mtp.fc.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(2, 2)

    assert not is_head(export_changed(tmp_path, "qwen", change))


@pytest.mark.parametrize("size", [0, 40])
def test_truncated_module_is_damaged(size, tmp_path):
    folder = export_changed(tmp_path, "qwen", lambda _, __: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(OutriderError, match=r"model.safetensors cannot be read \(.*; copy the checkpoint again"):
        is_head(folder)


def test_size_in_a_later_module_is_named_as_in_the_checkpoint(tmp_path):
    def lengthen(_, tensors):
        tensors["model.layers.10.hnorm.weight"] = torch.ones(3)

    folder = export_changed(tmp_path, "three modules", lengthen)
    with pytest.raises(OutriderError, match=r"model.layers.10.hnorm.weight \(deeper.1.state_norm.weight in Outrider\)"):
        read_head(folder, dtype=torch.float32, device=CPU)
