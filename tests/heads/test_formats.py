"""Checkpoint formats of draft heads: export and import, rejected checkpoints, and the commands convert and inspect."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.params import SamplingParams
from outrider.core.stats import Stats
from outrider.errors import OutriderError
from outrider.heads.description import Feedback, Kind
from outrider.heads.files import TensorFiles, read_target_info, write_folder
from outrider.heads.formats.base import Source, TargetInfo, TargetRequired
from outrider.heads.formats.registry import FORMATS, format_of
from outrider.heads.store import import_head, is_head, load_module, read_head, write_head
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.tools import inspect_draft
from outrider.tools.convert import checked
from tests.helpers.heads import HEAD, KINDS, MASK, PROMPTS, TABLE, cases, guessed_by, random_draft

SMALL = cases()
MINI = cases(hidden=384, vocab=12288)
TARGET = TargetInfo(vocab=96, hidden=64, layers=8, head=lambda: HEAD, embedding=lambda: TABLE, layer_types=KINDS)
# Cases that cannot be read without their target: it has the layers that an assistant attends to, tables that these
# heads share, or the embedding with the mask.
CASES_THAT_NEED_THE_TARGET = [
    "assistant",
    "assistant with centroids",
    "legacy medusa",
    "medusa with the target's head",
    *(
        case
        for case, (_, description) in SMALL.items()
        if description.block and not (description.own_lm_head and description.own_embedding)
    ),
]
OPTIONS = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 128, "verifier": "walk", "k": 3}
CPU = torch.device("cpu")


def export_case(folder, case, target=None, *, of=SMALL):
    """Export a random draft head to a folder. Return its module."""
    name, description = of[case]
    target = target or TARGET
    module = random_draft(description, table=target.embedding())
    format = format_of(name)
    config, tensors = format.write(description, module.state_dict(), target)
    write_folder(folder, config, tensors, format.file)
    return module


def export_changed(folder, case, change):
    """Export a random draft head after `change` has modified its config and tensors. Return the folder."""
    name, description = SMALL[case]
    format = format_of(name)
    config, tensors = format.write(description, random_draft(description).state_dict(), TARGET)
    change(config, tensors)
    write_folder(folder, config, tensors, format.file)
    return folder


def random_case(case):
    """Return the description of a case, and random weights."""
    description = SMALL[case][1]
    return description, random_draft(description).state_dict()


def token_ids(completions):
    """Return the output tokens of each completion."""
    return [completion.token_ids for completion in completions]


def all_equal(tensors, expected):
    """Return whether two dictionaries of tensors are equal."""
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], value) for name, value in expected.items()
    )


def test_every_format_has_a_case():
    assert {name for name, _ in SMALL.values()} == {format.name for format in FORMATS}


@pytest.mark.parametrize("case", SMALL)
def test_import_of_an_export_gives_the_same_draft_head(case, tmp_path):
    module = export_case(tmp_path, case)
    trained = import_head(tmp_path, TARGET)
    assert trained.description == module.description
    # Both Medusa formats of the authors are recognized as the first one.
    title = format_of(SMALL[case][0]).title.replace("(its authors', safetensors)", "(its authors')")
    assert trained.format == title
    assert not trained.ignored
    assert all_equal(trained.weights, module.state_dict())
    checked(tmp_path, TARGET)


@pytest.mark.parametrize("case", SMALL)
def test_export_of_an_import_gives_the_same_checkpoint(case):
    name, description = SMALL[case]
    config, tensors = format_of(name).write(description, random_draft(description).state_dict(), TARGET)
    source = Source(config, tensors, TARGET)
    imported_description, weights = format_of(name).read(source)
    assert not source.close()
    new_config, new_tensors = format_of(name).write(imported_description, weights, TARGET)
    assert new_config == config
    assert all_equal(new_tensors, tensors)


@pytest.mark.parametrize("case", [case for case in SMALL if case not in CASES_THAT_NEED_THE_TARGET])
def test_import_without_the_target(case, tmp_path):
    module = export_case(tmp_path, case)
    assert import_head(tmp_path).description == module.description


@pytest.fixture(scope="module")
def plain_output():
    """The greedy output of the embedded target without drafting."""
    params = SamplingParams(temperature=0, max_tokens=24)
    return token_ids(LLM(proposer="none", **OPTIONS).generate(PROMPTS, params))


@pytest.mark.parametrize("case", [case for case in MINI if "assistant" not in case])  # its target is a Gemma 4
def test_output_equals_plain_decoding(case, plain_output, tmp_path):
    export_case(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = guessed_by(f"draft:{tmp_path}", k=3)
    assert isinstance(llm.parts.proposer, HeadProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert token_ids(completions) == plain_output
    assert sum(completion.stats.draft_tokens for completion in completions)


@pytest.mark.parametrize("case", ["eagle3.1", "medusa", "gated qwen"])
def test_output_with_draft_trees_equals_plain_decoding(case, plain_output, tmp_path):
    export_case(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = LLM(proposer=f"tree:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadTreeProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert token_ids(completions) == plain_output


def read_configs(folder, *names):
    """Return the config.json of each of these folders."""
    return [json.loads((folder / name / "config.json").read_text()) for name in names]


def test_layers_are_counted_as_each_format_does(tmp_path):
    export_case(tmp_path / "a", "eagle3")
    export_case(tmp_path / "b", "speculators")
    flat, nested = read_configs(tmp_path, "a", "b")
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM looks here first and counts by inputs
    assert nested["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    export_case(tmp_path / "c", "dflash")
    export_case(tmp_path / "d", "dflash of speculators")
    flat, nested = read_configs(tmp_path, "c", "d")
    assert flat["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    assert nested["aux_hidden_state_layer_ids"] == [2, 4, 6]


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("eagle3", lambda config, _: config.update(eagle_config=None, eagle_aux_hidden_state_layer_ids=None)),
        ("eagle3", lambda config, _: config.update(eagle_config={}, eagle_aux_hidden_state_layer_ids=[2, 4, 5])),
        ("speculators", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=None)),
    ],
)
def test_layers_have_defaults(case, change, tmp_path):
    def change_and_drop_num_layers(config, tensors):
        change(config, tensors)
        config.pop("num_target_layers")

    folder = export_changed(tmp_path, case, change_and_drop_num_layers)
    assert import_head(folder, TARGET).description == SMALL[case][1]


def test_error_if_the_target_is_needed(tmp_path):
    folder = export_changed(tmp_path / "a", "eagle", lambda config, _: config.pop("num_target_layers"))
    with pytest.raises(TargetRequired, match="give the target with --target DIR"):
        import_head(folder)
    default_layers = export_changed(tmp_path / "b", "eagle3", lambda config, _: config.pop("num_target_layers"))
    # Layers 1, 3 and 4 are the default for a target with 8 layers.
    assert import_head(default_layers).description.target_layers == 8
    with pytest.raises(TargetRequired, match="uses its target's"):
        format_of("medusa-vllm").write(*random_case("legacy medusa"), None)


def test_norm_output_has_two_meanings(tmp_path):
    flat = export_changed(tmp_path / "a", "eagle3", lambda config, _: config.update(norm_output=True))
    assert import_head(flat).description == SMALL["eagle3"][1]
    assert import_head(flat).description.feedback is Feedback.RAW
    nested = export_changed(tmp_path / "b", "speculators", lambda config, _: config.update(norm_output=True))
    assert import_head(nested).description.feedback is Feedback.NORMED
    config, _ = format_of("eagle3").write(*random_case("eagle3"), None)
    assert "norm_output" not in config
    with pytest.raises(OutriderError, match="feeds back the normed state"):
        format_of("eagle3").write(*random_case("eagle3.1"), None)


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
    "too few modules": (
        "three modules",
        _set("num_nextn_predict_layers", 4),
        "is 4, but the checkpoint has 3 modules",
    ),
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
    "Domino": ("dflash", _set("architectures", ["DominoDraftModel"]), "this variant of DFlash is not supported"),
    "projector": ("dflash", _set_in_dflash_config(projector_type="domino"), "projector_type 'domino' is not supported"),
    "causal": ("dflash", _set_in_dflash_config(causal=True), "the attention that causal selects is not supported"),
    "neox": ("dspark", _set("is_neox_style", False), "the attention that is_neox_style selects is not supported"),
    "sliding": ("dflash", _set("layer_types", ["sliding_attention"] * 3), "a sliding window"),
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
        "'guru' is not supported; use dflash, dspark, xpress, eagle3, peagle or mtp",
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


def test_mask_is_stored_as_a_row_of_the_embedding(tmp_path):
    """The embedding is the head's own or the target's. A mask that equals no row is written to an unused row."""
    export_case(tmp_path / "a", "dflash")
    with pytest.raises(TargetRequired, match=r"a row of the target's embedding.*; give the target with --target DIR"):
        import_head(tmp_path / "a")
    description, weights = random_case("dflash of speculators")
    weights["mask"] = torch.randn(64)
    for name in ("dflash", "dflash-speculators"):
        with pytest.raises(
            OutriderError, match=r"a mask that is not the embedding of a token.*; train it with --mask-token-id"
        ):
            format_of(name).write(description, weights, TARGET)
    format = format_of("dflash-speculators")
    config, tensors = format.write(description, weights, replace(TARGET, unused_id=91))
    assert config["mask_token_id"] == 91
    assert torch.equal(tensors["embed_tokens.weight"][:91], TABLE[:91])
    imported_description, imported_weights = format.read(Source(config, tensors, TARGET))
    assert imported_description == replace(description, own_embedding=True)
    assert torch.equal(imported_weights["mask"], weights["mask"])
    (tmp_path / "a" / "mask_embedding.pt").touch()
    with pytest.raises(OutriderError, match=r"the mask in mask_embedding.pt is not the embedding of a token"):
        import_head(tmp_path / "a", TARGET)


def test_unused_row_of_the_embedding_is_found_from_the_tokenizer(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((embedded("nano") / name).read_bytes())
    assert read_target_info(tmp_path).unused_id is None
    assert torch.equal(read_target_info(tmp_path).embedding(), TensorFiles(tmp_path)["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    assert read_target_info(tmp_path).unused_id == config["vocab_size"]
    (tmp_path / "tokenizer.json").unlink()
    assert read_target_info(tmp_path).unused_id is None
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    with pytest.raises(OutriderError, match="scales its embeddings"):
        read_target_info(tmp_path).embedding()


def test_confidence_head_without_markov_input():
    description, weights = random_case("dspark")
    weights["judge.weight"][:, 64:] = 0
    config, tensors = format_of("dspark").write(description, weights, TARGET)
    assert config["confidence_head_with_markov"] is False
    assert tensors["confidence_head.proj.weight"].shape == (1, 64)
    imported_description, imported_weights = format_of("dspark").read(Source(config, tensors, TARGET))
    assert imported_description == description
    assert torch.equal(imported_weights["judge.weight"], weights["judge.weight"])


@pytest.mark.parametrize(
    ("case", "values", "expected"),
    [
        ("dflash", {}, False),
        ("dspark", {"sample_from_anchor": None}, True),
        ("dspark", {"sample_from_anchor": False}, False),
        ("anchored dflash", {"sample_from_anchor": None}, True),
        ("dflash of speculators", {"sample_from_anchor": True}, True),
    ],
)
def test_default_of_sample_from_anchor_depends_on_the_format(case, values, expected, tmp_path):
    folder = export_changed(tmp_path, case, lambda config, _: config.update(values))
    assert import_head(folder, TARGET).description.block.sample_from_anchor is expected


def test_specforge_config_with_all_values_in_dflash_config(tmp_path):
    """SpecForge does not name the layers if they are the default ones."""

    def nest(config, _):
        inner = {name: config.pop(name) for name in list(config) if "markov" in name or "confidence" in name}
        inner |= {"mask_token_id": config.pop("mask_token_id"), "projector_type": "dspark", "attention_mode": "gqa"}
        del config["target_layer_ids"], config["sample_from_anchor"]
        config.update(architectures=["DSparkDraftModel"], dflash_config=inner)

    folder = export_changed(tmp_path, "dspark", nest)
    assert import_head(folder, TARGET).description == SMALL["dspark"][1]


def test_assistant_is_exported_only_for_a_matching_target():
    description, weights = random_case("assistant")
    format = format_of("gemma4-assistant")
    config, tensors = format.write(description, weights, TARGET)
    assert "lm_head.weight" not in tensors
    all_tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    source = Source(config, all_tensors, TARGET)
    assert format.read(source)[0] == description
    assert sum(source.close().values(), ()) == ("model.embed_tokens.weight",)
    sliding, full = description.shared_kv[1:]
    other_kind = {"kind": Kind.MTP, "shared_kv": (), "body": SMALL["qwen"][1].body}
    for change, target, message in (
        ({}, None, "give the target with --target DIR"),
        ({}, replace(TARGET, layer_types=("full_attention",) * 8), "which the given target does not have"),
        ({}, replace(TARGET, layer_types=KINDS[::-1]), "attends to other layers than the target's last ones"),
        ({"shared_kv": (sliding, replace(sliding, window=5), full)}, TARGET, "attend to different keys and values"),
        ({"body": replace(description.body, gemma=False)}, TARGET, "has other layers than Gemma 4"),
        (other_kind, TARGET, "is of kind mtp"),
    ):
        with pytest.raises(OutriderError, match=message):
            format.write(replace(description, **change), weights, target)


def test_each_token_must_be_in_one_cluster():
    description, weights = random_case("assistant with centroids")
    weights["centroid_head.token_order"].fill_(3)
    with pytest.raises(OutriderError, match="each token must be in one cluster"):
        load_module(description, weights, where="head")


def test_block_heads_are_exported_only_to_formats_that_can_represent_them():
    dflash = random_case("dflash")
    dspark = random_case("dspark")
    reduced = random_case("dspark of speculators")
    own_lm_head = replace(dflash[0], own_lm_head=True), dflash[1]
    for (description, weights), name, message in (
        (dspark, "dflash", "use --to dspark"),
        (dflash, "dspark", "use --to dflash"),
        (reduced, "dspark", "use --to dspark-speculators"),
        (own_lm_head, "dflash", "use --to dflash-speculators"),
        (random_case("eagle3"), "dflash", "is of kind eagle3"),
    ):
        with pytest.raises(OutriderError, match=message):
            format_of(name).write(description, weights, TARGET)
    xpress = random_case("xpress")
    for name in ("dflash", "dspark", "dflash-speculators"):
        with pytest.raises(OutriderError, match="has a causal refiner; use --to xpress"):
            format_of(name).write(xpress[0], xpress[1], TARGET)
    with pytest.raises(OutriderError, match="has no causal refiner; use --to dflash"):
        format_of("xpress").write(dflash[0], dflash[1], TARGET)
    odd = replace(xpress[0], block=replace(xpress[0].block, refiner=replace(xpress[0].block.refiner, ffn=12)))
    with pytest.raises(OutriderError, match="no multiple of its rank; use --to xpress"):
        format_of("xpress-speculators").write(odd, xpress[1], TARGET)
    without_head_norms = replace(dflash[0], body=replace(dflash[0].body, head_norms=False))
    with pytest.raises(OutriderError, match="no norms of queries and keys"):
        format_of("dflash").write(without_head_norms, dflash[1], TARGET)


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


def test_pickled_prefixed_and_sharded_files_are_read(tmp_path):
    """Tensors that share memory are read as independent weights."""
    export_case(tmp_path / "a", "medusa")
    state = torch.load(tmp_path / "a" / "medusa_lm_head.pt")
    for kind in ("weight", "bias"):
        state[f"0.1.linear.{kind}"] = state[f"0.0.linear.{kind}"]
    torch.save(state, tmp_path / "a" / "medusa_lm_head.pt")
    module = read_head(tmp_path / "a", dtype=torch.float32, device=CPU)
    write_head(tmp_path / "own", module, dtype=torch.float32)
    assert torch.equal(module.blocks[0][0].linear.weight, module.blocks[0][1].linear.weight)
    tensors = {f"medusa_head.{name}": value.clone() for name, value in state.items()}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "medusa_num_heads": 2}))
    weight_map = {}
    for i, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({name: tensors[name] for name in names}, tmp_path / "b" / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"part-{i}.safetensors")
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    trained = import_head(tmp_path / "b")
    assert trained.description == module.description
    assert all(torch.equal(trained.weights[name], value) for name, value in module.state_dict().items())
    (tmp_path / "b" / "part-1.safetensors").unlink()
    with pytest.raises(OutriderError, match=r"part-1.safetensors cannot be read"):
        import_head(tmp_path / "b")


def test_ignored_tensors_are_logged(tmp_path, caplog):
    module = export_case(tmp_path, "deepseek")
    later_module = {
        f"model.layers.9.{name}": torch.zeros(2) for name in ("enorm.weight", "mlp.experts.0.up_proj.weight")
    }
    save_file({**load_file(tmp_path / "model.safetensors"), **later_module}, tmp_path / "model.safetensors")
    trained = import_head(tmp_path)
    assert trained.description == module.description
    ignored = [names for reason, names in trained.ignored.items() if "modules after the first" in reason]
    assert ignored == [tuple(sorted(later_module))]
    with caplog.at_level(logging.WARNING, "outrider"):
        read_head(tmp_path, dtype=torch.float32, device=CPU)
    assert "2 tensors are ignored" in caplog.text


def test_config_with_fewer_modules_than_the_checkpoint(tmp_path):
    folder = export_changed(tmp_path, "three modules", lambda config, _: config.update(num_nextn_predict_layers=2))
    trained = import_head(folder)
    assert trained.description == replace(SMALL["three modules"][1], modules=2)
    (names,) = trained.ignored.values()
    assert all(name.startswith("model.layers.10.") for name in names)


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


@pytest.mark.parametrize("name", ["mtp-qwen", "mtp-mimo", "mtp-speculators", "mtp-nemotron"])
def test_only_deepseek_names_support_several_modules(name):
    # Formats that do not fit for an earlier reason report that one.
    with pytest.raises(OutriderError, match=r"several modules; use --to mtp-deepseek|unlike engines that use"):
        format_of(name).write(*random_case("three modules"), None)


@pytest.mark.parametrize(
    ("case", "names", "reason"),
    [
        ("eagle", ["layers.0.self_attn.rotary_emb.inv_freq"], "computed from config.json instead"),
        ("speculators", ["verifier_lm_head.weight", "verifier_norm.weight"], "for training only"),
        ("eagle3 without a norm", ["norm.weight"], "no final norm"),
        ("hydra", ["input_embed_fn.weight"], "the target's embedding"),
        ("medusa of some tokens", ["lm_heads.1.weight"], "copies of the shared LM head"),
        (
            "qwen",
            ["lm_head.weight", "model.embed_tokens.weight", "mtp.layers.1.mlp.up_proj.weight"],
            "weights of the target",
        ),
    ],
)
def test_tensors_that_are_not_needed_are_ignored(case, names, reason, tmp_path):
    extra = {name: torch.zeros(1) for name in names}
    folder = export_changed(tmp_path, case, lambda _, tensors: tensors.update(extra))
    trained = import_head(folder, TARGET)
    assert trained.description == SMALL[case][1]
    assert sorted(name for ignored in trained.ignored.values() for name in ignored) == names
    assert any(reason in each for each in trained.ignored)


def test_lm_head_tied_to_the_embedding(tmp_path):
    def tie(config, tensors):
        config["tie_word_embeddings"] = True
        tensors["embed_tokens.weight"] = tensors.pop("lm_head.weight")

    trained = checked(export_changed(tmp_path, "eagle3", tie), None)
    assert trained.description.own_lm_head
    assert torch.equal(trained.weights["head.weight"], trained.weights["embedding.weight"])


def test_full_model_is_a_draft_head_only_for_its_own_target(plain_output, tmp_path):
    """A copy of the embedded model with an MTP module is given as `draft:` to the embedded model."""
    config = json.loads((embedded("mini") / "config.json").read_text())
    name, description = MINI["qwen"]
    _, tensors = format_of(name).write(description, random_draft(description).state_dict(), None)
    body = description.body
    config |= {"num_attention_heads": body.heads, "head_dim": body.dim, "intermediate_size": body.ffn}
    write_folder(tmp_path, config, {**tensors, **TensorFiles(embedded("mini"))}, "model.safetensors")
    trained = import_head(tmp_path)
    assert "weights of the target" in trained.ignored
    assert not is_head(tmp_path)
    assert not is_head(tmp_path, lambda: replace(TARGET, vocab=12288))
    assert is_head(tmp_path, lambda: read_target_info(embedded("mini")))
    llm = LLM(proposer=f"draft:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadProposer)
    completions = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert token_ids(completions) == plain_output


def invoke(*arguments):
    """Run the command line."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_convert_to_other_formats_and_back(tmp_path):
    module = export_case(tmp_path / "a", "eagle3 of some tokens")
    for source, out, format in (("a", "b", "eagle3-speculators"), ("b", "c", "outrider"), ("c", "d", "eagle3")):
        result = invoke("convert", tmp_path / source, "--to", format, "--out", tmp_path / out)
        assert result.exit_code == 0, result.output
        assert "and read back" in result.output
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert all_equal(first, last)
    assert import_head(tmp_path / "d").description == module.description
    assert json.loads((tmp_path / "d" / "config.json").read_text())["torch_dtype"] == "float32"


def test_convert_a_block_head_and_back(tmp_path):
    target = read_target_info(embedded("mini"))
    module = export_case(tmp_path / "a", "dflash", target, of=MINI)
    result = invoke("convert", tmp_path / "a", "--to", "outrider", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "--target DIR" in result.output
    for source, out, format in (("a", "b", "outrider"), ("b", "c", "dflash-speculators"), ("c", "d", "dflash")):
        arguments = ("convert", tmp_path / source, "--to", format, "--out", tmp_path / out)
        result = invoke(*arguments, "--target", embedded("mini"))
        assert result.exit_code == 0, result.output
        assert "describes the head differently" not in result.output
    assert import_head(tmp_path / "d", target).description == module.description
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert all_equal(first, last)
    assert (tmp_path / "a" / "config.json").read_text().count("block_size") == 1


def test_convert_errors(tmp_path):
    export_case(tmp_path / "a", "legacy medusa", of=MINI)
    command = "convert", tmp_path / "a", "--to"
    result = invoke(*command, "medusa-vllm", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "--target DIR" in result.output
    assert not (tmp_path / "b").exists()
    result = invoke(*command, "medusa-vllm", "--out", tmp_path / "b", "--target", embedded("mini"))
    assert result.exit_code == 0, result.output
    assert load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].shape == (12288, 384)
    for format, message in (("guru", "format 'guru' is unknown; use outrider, "), ("eagle", "is of kind medusa")):
        result = invoke(*command, format, "--out", tmp_path / "c")
        assert result.exit_code == 2
        assert message in result.output
        assert not (tmp_path / "c").exists()
    result = invoke(*command, "medusa", "--out", tmp_path / "b")
    assert result.exit_code == 2
    assert "exists and is not empty" in result.output


@pytest.mark.parametrize("inner", [False, True])
def test_quantization_config_with_unquantized_weights_is_logged(inner, tmp_path, caplog):
    export_case(tmp_path, "eagle3")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    quantized = {**config, "quantization_config": {"quant_method": "fp8"}}
    import_head(tmp_path)
    assert not caplog.records
    file.write_text(json.dumps({**config, "text_config": quantized} if inner else quantized))
    import_head(tmp_path)
    assert "config.json has a quantization_config, but the weights are read as unquantized" in caplog.text


def test_convert_needs_an_output_folder(tmp_path):
    export_case(tmp_path / "a", "legacy medusa", of=MINI)
    (tmp_path / "file").write_text("mine")
    for out, message in (("file", "is a file; name a folder"), ("file/b", "which is a file; name a folder")):
        result = invoke("convert", tmp_path / "a", "--to", "outrider", "--out", tmp_path / out)
        assert result.exit_code == 2
        assert message in result.output
    assert (tmp_path / "file").read_text() == "mine"


def test_inspect_describes_every_kind():
    assert set(inspect_draft.KIND_TEXTS) == set(Kind)


def test_inspect_describes_a_draft_head(tmp_path):
    export_case(tmp_path / "a", "mimo")
    result = invoke("inspect", tmp_path / "a")
    assert result.exit_code == 0, result.output
    for words in ("MTP (MiMo's names)", "output of layer 7", "state, then embedding", "first embedding as zeros"):
        assert words in result.output
    export_case(tmp_path / "c", "dspark with tables")
    result = invoke("inspect", tmp_path / "c")
    assert result.exit_code == 0, result.output
    assert (
        "4 draft tokens in 4 columns, the last committed token predicts one as well, corrected by the previous"
        in result.output
    )
    folder = export_changed(tmp_path / "b", "eagle", lambda config, _: config.pop("num_target_layers"))
    result = invoke("inspect", folder, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    tensors = load_file(folder / "model.safetensors")
    assert document["parameters"] == sum(weight.numel() for weight in tensors.values())
    assert "--target DIR" in document["unknown"]


def test_probe_detects_a_head_with_low_acceptance(tmp_path):
    export_case(tmp_path, "eagle3", read_target_info(embedded("mini")), of=MINI)
    result = invoke("inspect", tmp_path, "--target", embedded("mini"), "--json")
    assert result.exit_code == 0, result.output
    probe = json.loads(result.stdout)["probe"]
    assert probe["draft_tokens"] >= 50
    assert probe["agreement"] < inspect_draft.ENOUGH
    assert [line.split(":")[0] for line in probe["checklist"]][:4] == ["layer index", "norm", "rotary", "concat order"]


def test_probe_accepts_a_head_with_high_acceptance(tmp_path, monkeypatch):
    class AcceptingLLM:
        stats = Stats(reached=(60,), accepted=(45,))

        def __init__(self, *_, **__):
            pass

        def generate(self, *_):
            pass

    export_case(tmp_path, "eagle3")
    monkeypatch.setattr(inspect_draft, "LLM", AcceptingLLM)
    probe = inspect_draft.probe(str(tmp_path), str(embedded("mini")))
    assert (probe.agreement, probe.draft_tokens, probe.checklist) == (0.75, 60, ())
