"""What the formats of draft heads store differently: layers, norms, masks, modules and defaults."""

import json
from dataclasses import replace

import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.heads.description import Feedback, Kind
from outrider.models.heads.files import TensorFiles, read_target_info
from outrider.models.heads.formats.base import Source, TargetRequired
from outrider.models.heads.formats.registry import format_of
from outrider.models.heads.store import import_head
from outrider.models.loader.embedded import embedded
from outrider.tools.convert import checked
from tests.helpers.heads import KINDS, MASK, TABLE
from tests.models.heads.checkpoints import SMALL, TARGET, export_case, export_changed, random_case


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


def test_block_heads_are_exported_only_to_formats_that_can_represent_them():
    dflash = random_case("dflash")
    dspark = random_case("dspark")
    reduced = random_case("dspark of speculators")
    own_lm_head = replace(dflash[0], own_lm_head=True), dflash[1]
    for (description, weights), name, message in (
        (dspark, "dflash", "use --to dspark"),
        (random_case("causal dflash"), "dflash-speculators", "a causal block without a window; use --to dflash"),
        (random_case("dflash2"), "dflash", "is of kind dflash2; use --to dflash2"),
        (dflash, "domino", "is not of kind domino; use --to dflash"),
        (dflash, "dspark", "use --to dflash"),
        (reduced, "dspark", "use --to dspark-speculators"),
        (own_lm_head, "dflash", "use --to dflash-speculators"),
        (random_case("eagle3"), "dflash", "is of kind eagle3"),
    ):
        with pytest.raises(OutriderError, match=message):
            format_of(name).write(description, weights, TARGET)
    xpress = random_case("xpress")
    for name in ("dflash", "dspark", "dflash-speculators"):
        with pytest.raises(OutriderError, match="is of kind xpress; use --to xpress"):
            format_of(name).write(xpress[0], xpress[1], TARGET)
    with pytest.raises(OutriderError, match="is not of kind xpress; use --to dflash"):
        format_of("xpress").write(dflash[0], dflash[1], TARGET)
    odd = replace(xpress[0], block=replace(xpress[0].block, refiner=replace(xpress[0].block.refiner, ffn=12)))
    with pytest.raises(OutriderError, match="not a multiple of its rank; use --to xpress"):
        format_of("xpress-speculators").write(odd, xpress[1], TARGET)
    without_head_norms = replace(dflash[0], body=replace(dflash[0].body, head_norms=False))
    with pytest.raises(OutriderError, match="no norms of queries and keys"):
        format_of("dflash").write(without_head_norms, dflash[1], TARGET)


def test_config_with_fewer_modules_than_the_checkpoint(tmp_path):
    folder = export_changed(tmp_path, "three modules", lambda config, _: config.update(num_nextn_predict_layers=2))
    trained = import_head(folder)
    assert trained.description == replace(SMALL["three modules"][1], modules=2)
    (names,) = trained.ignored.values()
    assert all(name.startswith("model.layers.10.") for name in names)


@pytest.mark.parametrize("name", ["mtp-qwen", "mtp-mimo", "mtp-speculators", "mtp-nemotron"])
def test_only_deepseek_names_support_several_modules(name):
    # Formats that do not fit for an earlier reason report that one.
    with pytest.raises(OutriderError, match=r"several modules; use --to mtp-deepseek|unlike engines that use"):
        format_of(name).write(*random_case("three modules"), None)


def test_lm_head_tied_to_the_embedding(tmp_path):
    def tie(config, tensors):
        config["tie_word_embeddings"] = True
        tensors["embed_tokens.weight"] = tensors.pop("lm_head.weight")

    trained = checked(export_changed(tmp_path, "eagle3", tie), None)
    assert trained.description.own_lm_head
    assert torch.equal(trained.weights["head.weight"], trained.weights["embedding.weight"])
