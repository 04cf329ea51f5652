"""Formats of trained drafts: there and back, what is refused, and the verbs around them."""

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
from outrider.heads.formats.base import Source, TargetInfo, UnusedTensors
from outrider.heads.formats.registry import FORMATS, format_of
from outrider.heads.store import is_head, read_head, read_trained, write_head
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.propose.draft_model.trained_head import HeadProposer, HeadTreeProposer
from outrider.tools import inspect_draft
from outrider.tools.convert import checked
from tests.helpers.heads import HEAD, KINDS, MASK, PROMPTS, TABLE, cases, guessed_by, random_draft

SMALL, MINI = cases(), cases(hidden=384, vocab=12288)
PARTNER = TargetInfo(vocab=96, hidden=64, layers=8, head=lambda: HEAD, embedding=lambda: TABLE, kinds=KINDS)
# What is the target's own in them is found by comparing, or what they look at follows from the target.
BORROWERS = [
    "assistant",
    "legacy medusa",
    "medusa with the target's head",
    *(case for case, (_, it) in SMALL.items() if it.block and not (it.own_lm_head and it.own_embedding)),
]
OPTIONS = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 128, "verifier": "walk", "k": 3}


def written(folder, case, partner=None, *, of=SMALL):
    """A folder with a random draft, and its module."""
    name, description = of[case]
    partner = partner or PARTNER
    module = random_draft(description, table=partner.embedding())
    format = format_of(name)
    config, tensors = format.write(description, module.state_dict(), partner)
    write_folder(folder, config, tensors, format.file)
    return module


def spoiled(folder, case, spoil):
    """The same after `spoil` has had its way with config and tensors."""
    name, description = SMALL[case]
    format = format_of(name)
    config, tensors = format.write(description, random_draft(description).state_dict(), PARTNER)
    spoil(config, tensors)
    write_folder(folder, config, tensors, format.file)
    return folder


def test_every_format_has_a_case():
    assert {name for name, _ in SMALL.values()} == {format.name for format in FORMATS}


@pytest.mark.parametrize("case", SMALL)
def test_a_draft_comes_back_as_it_was(case, tmp_path):
    module = written(tmp_path, case)
    found = read_trained(tmp_path, PARTNER)
    assert found.description == module.description
    assert found.format == format_of(SMALL[case][0]).title.replace("(its authors', safetensors)", "(its authors')")
    assert not found.ignored
    assert found.weights.keys() == module.state_dict().keys()
    assert all(torch.equal(found.weights[name], value) for name, value in module.state_dict().items())
    checked(tmp_path, PARTNER)


@pytest.mark.parametrize("case", SMALL)
def test_a_checkpoint_comes_back_as_it_was(case):
    name, description = SMALL[case]
    config, tensors = format_of(name).write(description, random_draft(description).state_dict(), PARTNER)
    source = Source(config, tensors, PARTNER)
    found, weights = format_of(name).read(source)
    assert not source.close()
    again, same = format_of(name).write(found, weights, PARTNER)
    assert again == config
    assert same.keys() == tensors.keys()
    assert all(torch.equal(same[each], value) for each, value in tensors.items())


@pytest.mark.parametrize("case", [case for case in SMALL if case not in BORROWERS])
def test_what_is_written_names_everything_that_it_takes(case, tmp_path):
    module = written(tmp_path, case)
    assert read_trained(tmp_path).description == module.description


@pytest.fixture(scope="module")
def plain():
    params = SamplingParams(temperature=0, max_tokens=24)
    return [each.token_ids for each in LLM(proposer="none", **OPTIONS).generate(PROMPTS, params)]


@pytest.mark.parametrize("case", [case for case in MINI if case != "assistant"])  # whose target is Gemma 4
def test_the_text_is_the_targets_own(case, plain, tmp_path):
    written(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = guessed_by(f"draft:{tmp_path}", k=3)
    assert isinstance(llm.parts.proposer, HeadProposer)
    found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [each.token_ids for each in found] == plain
    assert sum(each.stats.draft_tokens for each in found)


@pytest.mark.parametrize("case", ["eagle3.1", "medusa", "gated qwen"])
def test_trees_grow_from_other_formats_too(case, plain, tmp_path):
    written(tmp_path, case, read_target_info(embedded("mini")), of=MINI)
    llm = LLM(proposer=f"tree:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadTreeProposer)
    found = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [each.token_ids for each in found] == plain


def test_layers_are_counted_as_each_format_does(tmp_path):
    written(tmp_path / "a", "eagle3")
    written(tmp_path / "b", "speculators")
    flat, nested = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert flat["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert flat["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # vLLM's count, where it looks first
    assert nested["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    written(tmp_path / "c", "dflash")
    written(tmp_path / "d", "dflash of speculators")
    flat, nested = (json.loads((tmp_path / name / "config.json").read_text()) for name in "cd")
    assert flat["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}
    assert nested["aux_hidden_state_layer_ids"] == [2, 4, 6]


@pytest.mark.parametrize(
    ("case", "spoil"),
    [
        ("eagle3", lambda config, _: config.update(eagle_config=None, eagle_aux_hidden_state_layer_ids=None)),
        ("eagle3", lambda config, _: config.update(eagle_config={}, eagle_aux_hidden_state_layer_ids=[2, 4, 5])),
        ("speculators", lambda config, _: config.update(eagle_aux_hidden_state_layer_ids=None)),
    ],
)
def test_layers_that_nobody_names_are_the_usual_ones(case, spoil, tmp_path):
    folder = spoiled(tmp_path, case, lambda config, tensors: (spoil(config, tensors), config.pop("num_target_layers")))
    assert read_trained(folder, PARTNER).description == SMALL[case][1]


def test_a_target_is_asked_for_where_it_must_be_known(tmp_path):
    folder = spoiled(tmp_path / "a", "eagle", lambda config, _: config.pop("num_target_layers"))
    with pytest.raises(UnusedTensors, match="give the target with --target DIR"):
        read_trained(folder)
    usual = spoiled(tmp_path / "b", "eagle3", lambda config, _: config.pop("num_target_layers"))
    assert read_trained(usual).description.target_layers == 8  # 1, 3 and 4 are the usual ones of 8
    with pytest.raises(UnusedTensors, match="uses its target's"):
        format_of("medusa-vllm").write(*_plain("legacy medusa"), None)


def test_norm_output_means_two_things(tmp_path):
    flat = spoiled(tmp_path / "a", "eagle3", lambda config, _: config.update(norm_output=True))
    assert read_trained(flat).description == SMALL["eagle3"][1]
    assert read_trained(flat).description.feedback is Feedback.RAW
    nested = spoiled(tmp_path / "b", "speculators", lambda config, _: config.update(norm_output=True))
    assert read_trained(nested).description.feedback is Feedback.NORMED
    config, _ = format_of("eagle3").write(*_plain("eagle3"), None)
    assert "norm_output" not in config
    with pytest.raises(OutriderError, match="carries its normed state on"):
        format_of("eagle3").write(*_plain("eagle3.1"), None)


def _plain(case):
    description = SMALL[case][1]
    return description, random_draft(description).state_dict()


def _set(name, value):
    return lambda config, _: config.update({name: value})


def _inside(**values):
    return lambda config, _: config["dflash_config"].update(values)


def _text(**values):
    return lambda config, _: config["text_config"].update(values)


def _drop(name):
    return lambda _, tensors: tensors.pop(name)


def _drop_key(name):
    return lambda config, _: config.pop(name)


def _add(name, *shape):
    return lambda _, tensors: tensors.update({name: torch.zeros(*shape)})


def _shift(_, tensors):
    tensors["d2t"][3:] += 200


def _forget(_, tensors):
    tensors["t2d"][:] = False


def _scaled(**values):
    return lambda config, _: config.update(rope_scaling={"rope_type": "yarn", "factor": 4.0, **values})


def _reshape(name, shape):
    return lambda _, tensors: tensors.update({name: tensors[name].flatten()[: math.prod(shape)].reshape(shape)})


def _break(_, tensors):
    tensors["fc.weight"][0, 0] = torch.nan


BAD = {
    "missing": ("eagle3", _drop("midlayer.mlp.up_proj.weight"), "lacks 'layers.0.mlp.up_proj.weight'"),
    "no norm": ("eagle3", _drop("norm.weight"), "no tensor 'norm.weight'"),
    "strange": ("eagle3", _add("surprise.weight", 3), "'surprise.weight' .* is refused"),
    "bias": ("eagle3", _add("fc.bias", 64), "'fc.bias' .* is refused"),
    "no number": ("eagle3", _break, "fuse.weight holds what is no number"),
    "d2t": ("eagle3 of some tokens", _shift, "d2t does not lead to rising ids below 96"),
    "t2d": ("eagle3 of some tokens", _forget, "do not speak of the same tokens"),
    "no d2t": ("eagle3 of some tokens", _drop("d2t"), "guesses 40 of 96 tokens, and d2t"),
    "draft vocabulary": ("eagle3 of some tokens", _set("draft_vocab_size", 41), "draft_vocab_size is 41"),
    "taps": ("eagle3", _set("eagle_config", {"eagle_aux_hidden_state_layer_ids": [1, 3]}), "taps 2 layers 64 wide"),
    "beyond": ("eagle3", _set("num_target_layers", 4), "reads layer 4 of a target with 4"),
    "embedding": ("speculators", _set("eagle_aux_hidden_state_layer_ids", [0, 3, 5]), "input of layer 0"),
    "both norms": ("eagle3.1", _set("norm_before_fc", True), "exclude each other"),
    "head": ("eagle3", _set("head_dim", 32), "q_proj.weight has shape"),
    "no size": ("eagle3", _set("num_attention_heads", 0), "is no size"),
    "type": ("eagle3", _set("hidden_size", "wide"), "'wide' for 'hidden_size' where int is expected"),
    "act": ("eagle", _set("hidden_act", "gelu"), "hidden_act gelu"),
    "rope": ("eagle", _set("rope_scaling", {"type": "dynamic", "factor": 2.0}), "scales rotary positions by 'dynamic'"),
    "window": ("eagle", _set("use_sliding_window", True), "a sliding window"),
    "bare state": ("eagle3", _set("eagle_config", {"use_aux_hidden_state": False}), "reads one state"),
    "quantised": ("eagle", lambda _, t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "quantised"),
    "packed": (
        "eagle",
        lambda _, t: t.update({"fc.weight": t["fc.weight"].int()}),
        "project.weight is stored as torch",
    ),
    "huge": ("eagle3", _set("intermediate_size", 10**30), "has sizes of 64, 4, 2, 16, 1000"),
    "tokens": ("legacy medusa", _set("vocab_size", 10**12), "has a vocabulary of 1000000000000 tokens"),
    "epsilon": ("eagle3", _set("rms_norm_eps", math.nan), "norms with an epsilon of nan"),
    "theta": ("eagle3", _set("rope_theta", math.nan), "no rotary positions that could be"),
    "factor": ("eagle3", _scaled(factor=math.nan), "no rotary positions that could be"),
    "no context": ("eagle3", _scaled(original_max_position_embeddings=0), "no rotary positions that could be"),
    "point": ("eagle3", _reshape("lm_head.weight", ()), r"lm_head.weight has shape \(\) and so holds no weights"),
    "nothing": ("medusa", _reshape("0.0.linear.weight", (0, 64)), r"shape \(0, 64\) and so holds no weights"),
    "rows": ("medusa of some tokens", _reshape("lm_head.weight", (39, 64)), "has 39 rows, for 40 of 96 tokens"),
    "row": ("dspark with tables", _reshape("markov_head.markov_w1.weight", (96,)), "markov_in.weight has shape"),
    "latent": ("deepseek", _add("model.layers.8.self_attn.kv_a_proj_with_mqa.weight", 2), r"kv_a_proj.*\(MLA\)"),
    "too few modules": ("three modules", _set("num_nextn_predict_layers", 4), "is 4, and 3 modules are there"),
    "other tables": (
        "modules with tables",
        lambda _, t: t.update({(name := "model.layers.9.shared_head.head.weight"): t[name] + 1}),
        r"model.layers.9. has a table of its own \(head.weight\)",
    ),
    "experts behind": ("three modules", _add("model.layers.9.mlp.experts.0.up_proj.weight", 2), r"\(MoE\)"),
    "experts": ("deepseek", _add("model.layers.8.mlp.experts.0.up_proj.weight", 2), r"experts.0.*\(MoE\)"),
    "packed experts": ("qwen", _add("mtp.layers.0.mlp.experts.gate_up_proj", 2), r"gate_up_proj.*\(MoE\)"),
    "hybrid experts": ("nemotron", _add("mtp.layers.1.mixer.experts.0.up_proj.weight", 2), r"\(MoE\)"),
    "pattern": ("nemotron", _set("mtp_hybrid_override_pattern", "*E"), "known is '\\*-'"),
    "family": ("qwen", _set("model_type", "exaone_moe"), "what its layers compute is not known here"),
    "place": ("deepseek", _set("num_hidden_layers", 9), "num_hidden_layers says model.layers.9."),
    "prefix": ("hydra", _set("hydra_head_arch", "prefix-mlp"), "only mlp is handled"),
    "blocks": ("medusa", _drop("1.1.linear.weight"), "5 blocks where 3 heads with 2 each"),
    "block layers": ("medusa", _set("medusa_num_layers", 3), "medusa_num_layers is 3"),
    "token map": ("medusa of some tokens", lambda _, t: t["token_map"].fill_(3), "40 different ids"),
    "no mask token": ("peagle", _drop_key("ptd_token_id"), "which token its masks are"),
    "no mask state": ("peagle", _drop("mask_hidden"), r"mask_hidden, their state, is missing"),
    "no such mask": ("peagle", _set("ptd_token_id", 96), "the embedding of token 96 of 96"),
    "mask state": ("peagle", lambda _, t: t.update(mask_hidden=t["mask_hidden"][..., 1:]), "mask has shape"),
    "domino": ("dflash", _set("architectures", ["DominoDraftModel"]), "this one has other parts"),
    "projector": ("dflash", _inside(projector_type="domino"), "projector_type is 'domino'"),
    "causal": ("dflash", _inside(causal=True), "another attention by causal"),
    "neighbours": ("dspark", _set("is_neox_style", False), "another attention by is_neox_style"),
    "sliding": ("dflash", _set("layer_types", ["sliding_attention"] * 3), "a sliding window"),
    "capped": ("dspark", _set("final_logit_softcapping", 30.0), "caps its logits"),
    "other layers": ("dspark", _set("model_type", "gemma4_text"), "what its layers compute is not known here"),
    "no mask": ("dflash", _inside(mask_token_id=None), "lacks 'mask_token_id'"),
    "mask": ("dspark with tables", _set("mask_token_id", 96), "mask_token_id is 96, .* has 96 rows"),
    "embeddings": ("dspark with tables", _set("target_layer_ids", [-1, 3, 5]), "which no draft reads here"),
    "no anchor": ("dspark of speculators", _set("sample_from_anchor", None), "does not say sample_from_anchor"),
    "no layers": ("dflash of speculators", _set("aux_hidden_state_layer_ids", None), "lacks 'aux_hidden_state_layer"),
    "gate": ("dspark", _set("markov_head_type", "gated"), "markov_head_type is 'gated'"),
    "judge": (
        "dspark with tables",
        _add("confidence_head.proj.weight", 1, 64),
        "no tensor 'confidence_head.proj.bias'",
    ),
    "unknown kind": ("speculators", _set("speculators_model_type", "guru"), "known are dflash, dspark, eagle3, peagle"),
    "bare assistant": ("assistant", lambda *_: None, "follows from its target, Gemma 4; give that with --target DIR"),
    "assistant's layers": ("assistant", _text(hidden_activation="silu"), "not those of Gemma 4's assistants"),
    "assistant's kinds": ("assistant", _text(layer_types=["full_attention"]), "and it has 3 layers; mend config.json"),
    "assistant's turns": ("assistant", _text(rope_parameters={}), "no rope_parameters for sliding_attention"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_read_is_refused(bad, tmp_path):
    case, spoil, message = BAD[bad]
    folder = spoiled(tmp_path / bad, case, spoil)
    with pytest.raises(OutriderError, match=message) as told:
        checked(folder, None)
    assert str(folder) in str(told.value)


def test_a_mask_is_a_row_of_a_table(tmp_path):
    """The draft's own, or the target's, of which the draft knows nothing; where it is no row, a spare one takes it."""
    written(tmp_path / "a", "dflash")
    with pytest.raises(UnusedTensors, match="a row of its target's embeddings; give the target with --target DIR"):
        read_trained(tmp_path / "a")
    description, weights = _plain("dflash of speculators")
    weights["mask"] = torch.randn(64)
    for name in ("dflash", "dflash-speculators"):
        with pytest.raises(
            OutriderError, match=r"a mask that is no token's embedding.*; train it with --mask-token-id"
        ):
            format_of(name).write(description, weights, PARTNER)
    format = format_of("dflash-speculators")
    config, tensors = format.write(description, weights, replace(PARTNER, spare=91))
    assert config["mask_token_id"] == 91
    assert torch.equal(tensors["embed_tokens.weight"][:91], TABLE[:91])
    found, again = format.read(Source(config, tensors, PARTNER))
    assert found == replace(description, own_embedding=True)
    assert torch.equal(again["mask"], weights["mask"])
    (tmp_path / "a" / "mask_embedding.pt").touch()
    with pytest.raises(OutriderError, match=r"mask_embedding.pt holds a mask that is no token's embedding"):
        read_trained(tmp_path / "a", PARTNER)


def test_a_tokenizer_tells_which_row_is_to_spare(tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((embedded("nano") / name).read_bytes())
    assert read_target_info(tmp_path).spare is None
    assert torch.equal(read_target_info(tmp_path).embedding(), TensorFiles(tmp_path)["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 8}))
    assert read_target_info(tmp_path).spare == config["vocab_size"]
    (tmp_path / "tokenizer.json").unlink()
    assert read_target_info(tmp_path).spare is None
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    with pytest.raises(OutriderError, match="scales its embeddings"):
        read_target_info(tmp_path).embedding()


def test_a_judge_may_not_see_the_token_before():
    description, weights = _plain("dspark")
    weights["judge.weight"][:, 64:] = 0
    config, tensors = format_of("dspark").write(description, weights, PARTNER)
    assert config["confidence_head_with_markov"] is False
    assert tensors["confidence_head.proj.weight"].shape == (1, 64)
    found, again = format_of("dspark").read(Source(config, tensors, PARTNER))
    assert found == description
    assert torch.equal(again["judge.weight"], weights["judge.weight"])


@pytest.mark.parametrize(
    ("case", "spoil", "anchored"),
    [
        ("dflash", {}, False),
        ("dspark", {"sample_from_anchor": None}, True),
        ("dspark", {"sample_from_anchor": False}, False),
        ("anchored dflash", {"sample_from_anchor": None}, True),
        ("dflash of speculators", {"sample_from_anchor": True}, True),
    ],
)
def test_the_first_column_guesses_as_each_layout_has_it(case, spoil, anchored, tmp_path):
    folder = spoiled(tmp_path, case, lambda config, _: config.update(spoil))
    assert read_trained(folder, PARTNER).description.block.sample_from_anchor is anchored


def test_specforge_says_all_of_it_in_one_table(tmp_path):
    """And names no layers where they are the usual ones."""

    def nest(config, _):
        inner = {name: config.pop(name) for name in list(config) if "markov" in name or "confidence" in name}
        inner |= {"mask_token_id": config.pop("mask_token_id"), "projector_type": "dspark", "attention_mode": "gqa"}
        del config["target_layer_ids"], config["sample_from_anchor"]
        config.update(architectures=["DSparkDraftModel"], dflash_config=inner)

    assert read_trained(spoiled(tmp_path, "dspark", nest), PARTNER).description == SMALL["dspark"][1]


def test_an_assistant_is_written_where_its_target_has_what_it_looks_at():
    description, weights = _plain("assistant")
    format = format_of("gemma4-assistant")
    config, tensors = format.write(description, weights, PARTNER)
    assert "lm_head.weight" not in tensors
    clusters = {
        "masked_embedding.centroids.weight": torch.zeros(4, 48),
        "masked_embedding.token_ordering": torch.zeros(96),
    }
    source = Source(config, {**tensors, **clusters, "lm_head.weight": tensors["model.embed_tokens.weight"]}, PARTNER)
    assert format.read(source)[0] == description
    assert sorted(sum(source.close().values(), ())) == [*clusters, "model.embed_tokens.weight"]
    near, far = description.shared_kv[1:]
    for change, partner, why in (
        ({}, None, "give that with --target DIR"),
        ({}, replace(PARTNER, kinds=("full_attention",) * 8), "and the target given has none"),
        ({}, replace(PARTNER, kinds=KINDS[::-1]), "looks at other layers than the target's last ones"),
        ({"shared_kv": (near, replace(near, window=5), far)}, PARTNER, "in more than one way"),
        ({"body": replace(description.body, gemma=False)}, PARTNER, "other layers than Gemma 4's"),
        ({"kind": Kind.MTP, "shared_kv": (), "body": SMALL["qwen"][1].body}, PARTNER, "is of kind mtp"),
    ):
        with pytest.raises(OutriderError, match=why):
            format.write(replace(description, **change), weights, partner)


def test_a_block_is_written_where_its_readers_run_it_alike():
    flash, spark = _plain("dflash"), _plain("dspark")
    few = _plain("dspark of speculators")
    own = replace(flash[0], own_lm_head=True), flash[1]
    for (description, weights), name, why in (
        (spark, "dflash", "write dspark"),
        (flash, "dspark", "write dflash"),
        (few, "dspark", "write dspark-speculators"),
        (own, "dflash", "write dflash-speculators"),
        (_plain("eagle3"), "dflash", "is of kind eagle3"),
    ):
        with pytest.raises(OutriderError, match=why):
            format_of(name).write(description, weights, PARTNER)
    without = replace(flash[0], body=replace(flash[0].body, head_norms=False)), flash[1]
    with pytest.raises(OutriderError, match="no norms of queries and keys"):
        format_of("dflash").write(*without, PARTNER)


def test_damaged_files_are_refused(tmp_path):
    written(tmp_path / "a", "eagle3")
    file = tmp_path / "a" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(OutriderError, match=r"cannot be read .* copy the checkpoint again"):
        is_head(tmp_path / "a")
    written(tmp_path / "b", "medusa")
    (tmp_path / "b" / "medusa_lm_head.pt").write_bytes(b"no archive")
    with pytest.raises(OutriderError, match="is damaged, or holds something else than named tensors"):
        checked(tmp_path / "b", None)
    for found in ({"a": 1}, {"a": torch.eye(3).to_sparse()}, {"a": torch.eye(3, device="meta")}):
        torch.save(found, tmp_path / "b" / "medusa_lm_head.pt")
        with pytest.raises(OutriderError, match="something else than named tensors"):
            checked(tmp_path / "b", None)
    (tmp_path / "a" / "model.safetensors.index.json").write_text('{"weight_map": null}')
    with pytest.raises(OutriderError, match=r"index.json cannot be read .* copy the checkpoint again"):
        checked(tmp_path / "a", None)
    with pytest.raises(OutriderError, match="is not a folder"):
        checked(tmp_path / "nowhere", None)
    with pytest.raises(OutriderError, match="holds no trained draft in a known format"):
        checked(embedded("nano"), None)
    assert not is_head(embedded("nano"))


def test_another_target_is_refused(tmp_path):
    written(tmp_path, "eagle3")
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 96, width 64 and 8 layers"):
        checked(tmp_path, replace(PARTNER, vocab=97))
    with pytest.raises(OutriderError, match="was trained on a target with vocabulary 96, width 64 and 8 layers"):
        LLM(proposer=f"draft:{tmp_path}", dtype="float32")


def test_files_of_all_sorts_are_read(tmp_path):
    """Pickled blocks in one memory, names with a prefix, shards behind an index."""
    written(tmp_path / "a", "medusa")
    state = torch.load(tmp_path / "a" / "medusa_lm_head.pt")
    for kind in ("weight", "bias"):
        state[f"0.1.linear.{kind}"] = state[f"0.0.linear.{kind}"]
    torch.save(state, tmp_path / "a" / "medusa_lm_head.pt")
    found = read_head(tmp_path / "a", dtype=torch.float32, device=torch.device("cpu"))
    write_head(tmp_path / "own", found, dtype=torch.float32)
    assert torch.equal(found.blocks[0][0].linear.weight, found.blocks[0][1].linear.weight)
    named = {f"medusa_head.{name}": value.clone() for name, value in state.items()}
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps({"num_hidden_layers": 8, "medusa_num_heads": 2}))
    halves = sorted(named)[::2], sorted(named)[1::2]
    for i, half in enumerate(halves):
        save_file({name: named[name] for name in half}, tmp_path / "b" / f"part-{i}.safetensors")
    index = {"weight_map": {name: f"part-{i}.safetensors" for i, half in enumerate(halves) for name in half}}
    (tmp_path / "b" / "model.safetensors.index.json").write_text(json.dumps(index))
    again = read_trained(tmp_path / "b")
    assert again.description == found.description
    assert all(torch.equal(again.weights[name], value) for name, value in found.state_dict().items())
    (tmp_path / "b" / "part-1.safetensors").unlink()
    with pytest.raises(OutriderError, match=r"part-1.safetensors cannot be read"):
        read_trained(tmp_path / "b")


def test_what_is_left_aside_is_said(tmp_path, caplog):
    module = written(tmp_path, "deepseek")
    more = {f"model.layers.9.{name}": torch.zeros(2) for name in ("enorm.weight", "mlp.experts.0.up_proj.weight")}
    save_file({**load_file(tmp_path / "model.safetensors"), **more}, tmp_path / "model.safetensors")
    found = read_trained(tmp_path)
    assert found.description == module.description
    assert [names for why, names in found.ignored.items() if "behind the first" in why] == [tuple(sorted(more))]
    with caplog.at_level(logging.WARNING, "outrider"):
        read_head(tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    assert "2 tensors are left aside" in caplog.text


def test_a_config_may_speak_of_fewer_modules(tmp_path):
    folder = spoiled(tmp_path, "three modules", lambda config, _: config.update(num_nextn_predict_layers=2))
    found = read_trained(folder)
    assert found.description == replace(SMALL["three modules"][1], modules=2)
    (names,) = found.ignored.values()
    assert all(name.startswith("model.layers.10.") for name in names)


@pytest.mark.parametrize("name", ["mtp-qwen", "mtp-mimo", "mtp-speculators", "mtp-nemotron"])
def test_other_names_hold_one_module(name):
    with pytest.raises(OutriderError, match=r"several modules: write mtp-deepseek|which"):
        format_of(name).write(*_plain("three modules"), None)


@pytest.mark.parametrize(
    ("case", "names", "why"),
    [
        ("eagle", ["layers.0.self_attn.rotary_emb.inv_freq"], "computed anew"),
        ("speculators", ["verifier_lm_head.weight", "verifier_norm.weight"], "for training"),
        ("eagle3 without a norm", ["norm.weight"], "no final norm"),
        ("hydra", ["input_embed_fn.weight"], "the target's own embeddings"),
        ("medusa of some tokens", ["lm_heads.1.weight"], "copies of the one output layer"),
        (
            "qwen",
            ["lm_head.weight", "model.embed_tokens.weight", "mtp.layers.1.mlp.up_proj.weight"],
            "the target's own",
        ),
    ],
)
def test_what_is_of_no_use_is_left_aside_by_name(case, names, why, tmp_path):
    folder = spoiled(tmp_path, case, lambda _, tensors: tensors.update({name: torch.zeros(1) for name in names}))
    found = read_trained(folder, PARTNER)
    assert found.description == SMALL[case][1]
    assert sorted(name for left in found.ignored.values() for name in left) == names
    assert any(why in each for each in found.ignored)


def test_an_output_layer_may_be_the_drafts_embeddings(tmp_path):
    def tie(config, tensors):
        config["tie_word_embeddings"] = True
        tensors["embed_tokens.weight"] = tensors.pop("lm_head.weight")

    found = checked(spoiled(tmp_path, "eagle3", tie), None)
    assert found.description.own_lm_head
    assert torch.equal(found.weights["head.weight"], found.weights["embedding.weight"])


def test_a_whole_model_is_a_draft_to_its_own_target_alone(plain, tmp_path):
    """The embedded model with a module of its own, as `draft:` of itself and of another."""
    config = json.loads((embedded("mini") / "config.json").read_text())
    name, description = MINI["qwen"]
    _, tensors = format_of(name).write(description, random_draft(description).state_dict(), None)
    body = description.body
    config |= {"num_attention_heads": body.heads, "head_dim": body.dim, "intermediate_size": body.ffn}
    write_folder(tmp_path, config, {**tensors, **TensorFiles(embedded("mini"))}, "model.safetensors")
    found = read_trained(tmp_path)
    assert "the target's own" in found.ignored
    assert not is_head(tmp_path)
    assert not is_head(tmp_path, lambda: replace(PARTNER, vocab=12288))
    assert is_head(tmp_path, lambda: read_target_info(embedded("mini")))
    llm = LLM(proposer=f"draft:{tmp_path}", **OPTIONS)
    assert isinstance(llm.parts.proposer, HeadProposer)
    texts = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [each.token_ids for each in texts] == plain


def invoke(*words):
    return CliRunner().invoke(app, list(words))


def test_converting_there_and_back(tmp_path):
    module = written(tmp_path / "a", "eagle3 of some tokens")
    for one, two, to in (("a", "b", "eagle3-speculators"), ("b", "c", "outrider"), ("c", "d", "eagle3")):
        told = invoke("convert", str(tmp_path / one), "--to", to, "--out", str(tmp_path / two))
        assert told.exit_code == 0, told.output
        assert "written and read again" in told.output
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], value) for name, value in last.items())
    assert read_trained(tmp_path / "d").description == module.description
    assert json.loads((tmp_path / "d" / "config.json").read_text())["torch_dtype"] == "float32"


def test_converting_a_block_draft_there_and_back(tmp_path):
    partner = read_target_info(embedded("mini"))
    module = written(tmp_path / "a", "dflash", partner, of=MINI)
    told = invoke("convert", str(tmp_path / "a"), "--to", "outrider", "--out", str(tmp_path / "b"))
    assert told.exit_code == 2
    assert "--target DIR" in told.output
    for one, two, to in (("a", "b", "outrider"), ("b", "c", "dflash-speculators"), ("c", "d", "dflash")):
        words = "convert", str(tmp_path / one), "--to", to, "--out", str(tmp_path / two)
        told = invoke(*words, "--target", str(embedded("mini")))
        assert told.exit_code == 0, told.output
        assert "in other terms" not in told.output
    assert read_trained(tmp_path / "d", partner).description == module.description
    first, last = (load_file(tmp_path / name / "model.safetensors") for name in "ad")
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], value) for name, value in last.items())
    assert (tmp_path / "a" / "config.json").read_text().count("block_size") == 1


def test_converting_asks_for_what_it_needs(tmp_path):
    written(tmp_path / "a", "legacy medusa", of=MINI)
    words = "convert", str(tmp_path / "a"), "--to"
    told = invoke(*words, "medusa-vllm", "--out", str(tmp_path / "b"))
    assert told.exit_code == 2
    assert "--target DIR" in told.output
    assert not (tmp_path / "b").exists()
    told = invoke(*words, "medusa-vllm", "--out", str(tmp_path / "b"), "--target", str(embedded("mini")))
    assert told.exit_code == 0, told.output
    assert load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].shape == (12288, 384)
    for to, message in (("guru", "format 'guru' is unknown; use outrider, "), ("eagle", "is of kind medusa")):
        told = invoke(*words, to, "--out", str(tmp_path / "c"))
        assert told.exit_code == 2
        assert message in told.output
        assert not (tmp_path / "c").exists()
    told = invoke(*words, "medusa", "--out", str(tmp_path / "b"))
    assert told.exit_code == 2
    assert "is there already" in told.output


@pytest.mark.parametrize("inner", [False, True])
def test_plain_weights_under_a_config_of_quantised_ones_are_spoken_of(inner, tmp_path, caplog):
    written(tmp_path, "eagle3")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    said = {"quantization_config": {"quant_method": "fp8"}}
    read_trained(tmp_path)
    assert not caplog.records
    file.write_text(json.dumps({**config, "text_config": {**config, **said}} if inner else {**config, **said}))
    read_trained(tmp_path)
    assert "config.json speaks of quantised weights, and the draft's are read as plain numbers" in caplog.text


def test_converting_needs_a_folder(tmp_path):
    written(tmp_path / "a", "legacy medusa", of=MINI)
    (tmp_path / "file").write_text("mine")
    for out, message in (("file", "is a file; name a folder"), ("file/b", "which is a file; name a folder")):
        told = invoke("convert", str(tmp_path / "a"), "--to", "outrider", "--out", str(tmp_path / out))
        assert told.exit_code == 2
        assert message in told.output
    assert (tmp_path / "file").read_text() == "mine"


def test_inspecting_says_what_a_draft_is(tmp_path):
    written(tmp_path / "a", "mimo")
    told = invoke("inspect", str(tmp_path / "a"))
    assert told.exit_code == 0, told.output
    for words in ("MTP (MiMo's names)", "output of layer 7", "state, then embedding", "first embedding as zeros"):
        assert words in told.output
    written(tmp_path / "c", "dspark with tables")
    told = invoke("inspect", str(tmp_path / "c"))
    assert told.exit_code == 0, told.output
    assert "4 guesses of 4 columns, the text's last token guesses, too, corrected by the token before" in told.output
    folder = spoiled(tmp_path / "b", "eagle", lambda config, _: config.pop("num_target_layers"))
    told = invoke("inspect", str(folder), "--json")
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert document["parameters"] == sum(weight.numel() for weight in load_file(folder / "model.safetensors").values())
    assert "--target DIR" in document["unknown"]


def test_the_probe_finds_a_draft_that_is_read_wrongly(tmp_path):
    written(tmp_path, "eagle3", read_target_info(embedded("mini")), of=MINI)
    told = invoke("inspect", str(tmp_path), "--target", str(embedded("mini")), "--json")
    assert told.exit_code == 0, told.output
    seen = json.loads(told.stdout)["probe"]
    assert seen["guesses"] >= 50
    assert seen["agreement"] < inspect_draft.ENOUGH
    assert [line.split(":")[0] for line in seen["checklist"]][:4] == ["layer index", "norm", "rotary", "concat order"]


def test_the_probe_leaves_a_good_draft_alone(tmp_path, monkeypatch):
    class Knowing:
        stats = Stats(reached=(60,), accepted=(45,))

        def __init__(self, *_, **__):
            pass

        def generate(self, *_):
            pass

    written(tmp_path, "eagle3")
    monkeypatch.setattr(inspect_draft, "LLM", Knowing)
    seen = inspect_draft.probe(str(tmp_path), str(embedded("mini")))
    assert (seen.agreement, seen.draft_tokens, seen.checklist) == (0.75, 60, ())
