"""Files of draft heads: pickles, shards, and tensors that are not needed."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import OutriderError
from outrider.models.heads.store import import_head, make_module, read_head, write_head
from outrider.train.model.presets import Sizes, describe
from tests.models.heads.checkpoints import CPU, SMALL, TARGET, export_case, export_changed


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


@pytest.mark.parametrize(
    ("ids", "stored"), [([1, 2, 8, 17], [0b110, 1, 0b10]), ([8, 1, 2, 17], [8, 1, 2, 17])], ids=["ascending", "others"]
)
def test_token_ids_in_a_file(ids, stored, tmp_path):
    """Ascending ids are bits, which take less space."""
    module = make_module(describe("mtp", Sizes(hidden=64, layers=1, vocab=40, epsilon=1e-5, draft_vocab=4)))
    module.ids.copy_(torch.tensor(ids))
    write_head(tmp_path, module, dtype=torch.float32)
    assert load_file(tmp_path / "model.safetensors")["ids"].tolist() == stored
    assert import_head(tmp_path).weights["ids"].tolist() == ids
