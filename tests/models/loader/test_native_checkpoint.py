"""Folders that are opened for the native kernels, and those that are left to transformers."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core import tree
from outrider.errors import OutriderError
from outrider.models.loader.check import check_target
from outrider.models.loader.load import load_checkpoint, read_weights
from outrider.models.loader.model_config import TEXT_PARTS, read_native_config
from outrider.models.loader.native_checkpoint import name_weights, open_stored
from outrider.models.loader.transformers_checkpoint import read_model
from tests.helpers import tiny
from tests.helpers.architectures import gemma3
from tests.helpers.multimodal_architectures import MULTIMODAL
from tests.models.native.test_moe import MODELS as MIXTURES

needs_compiler = pytest.mark.skipif(not tiny.compiles(), reason="needs a C++ compiler")


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "model", tiny.make_config("LlamaConfig", hidden_size=64))


def _open(folder):
    config = read_native_config(folder)
    return name_weights(open_stored(folder, config, torch.float32), config, torch.float32)


def test_weights_are_those_of_the_files(folder):
    stored = load_file(folder / "model.safetensors")
    weights = _open(folder)
    assert weights.keys() >= stored.keys()
    for name, value in stored.items():
        assert torch.equal(weights[name], value)
        assert weights.shape(name) == value.shape
        weights.release(name)
        assert torch.equal(weights[name], value)  # it is read again
    assert read_weights(folder, torch.bfloat16)["model.norm.weight"].dtype == torch.bfloat16


def test_shards_are_read_by_their_index(folder):
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: stored[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert all(torch.equal(_open(folder)[name], stored[name]) for name in names)


def _change(folder, change):
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


def _shift(folder):
    """Write a header of an odd length, which older programs may do."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size] + b" "
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])


LEFT = {
    "missing weight": lambda folder: _change(folder, lambda stored: stored.pop("model.norm.weight")),
    "other shape": lambda folder: _change(folder, lambda stored: stored.update({"model.norm.weight": torch.ones(3)})),
    "integers": lambda folder: _change(
        folder, lambda stored: stored.update({"model.norm.weight": stored["model.norm.weight"].int()})
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_unusual_files_are_left_to_transformers(folder, case):
    LEFT[case](folder)
    assert _open(folder) is None


def test_odd_addresses_are_read(folder):
    expected = {name: value.clone() for name, value in _open(folder).items()}
    _shift(folder)
    assert all(torch.equal(value, expected[name]) for name, value in _open(folder).items())


@pytest.mark.parametrize("content", [b"\x99\0\0\0\0\0\0\0{", b"", b"?"])
def test_damaged_files_are_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(OutriderError, match=r"model.safetensors cannot be read \(.*\); copy the checkpoint again"):
        _open(folder)


# Models beside dense text models.
OTHERS = (*("mixtral", "qwen3_moe", "qwen3_moe not normalized", "olmoe"), *TEXT_PARTS)
_WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "moe_intermediate_size": 32}


def wide_config(name):
    """The configuration of a model whose sizes the kernels take."""
    if name in MIXTURES:
        return MIXTURES[name]
    small = gemma3() if name == "gemma3" else MULTIMODAL[name]()
    settings = small.to_dict()
    return type(small)(
        **settings | {"text_config": settings["text_config"] | _WIDE, "tie_word_embeddings": "vl" in name}
    )


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    root = tmp_path_factory.mktemp("others")
    return {name: tiny.save(root / name.replace(" ", "-"), wide_config(name)) for name in OTHERS}


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OTHERS)
def test_bits_are_those_of_the_model_in_transformers(others, name, dtype):
    checkpoint = load_checkpoint(others[name], dtype=dtype, device="cpu")
    assert checkpoint.weights is not None
    whole = checkpoint.with_model(read_model(others[name], checkpoint.dtype))
    targets = [tiny.make_target(each, slots=2, context=64, kernels="native") for each in (checkpoint, whole)]
    logits = [_logits(target) for target in targets]
    assert torch.equal(*logits)
    assert targets[0].weight_names() == targets[1].weight_names()
    check_target(targets[0], checkpoint)


def _logits(target):
    seq = tiny.admit(target, 0, tiny.text(random.Random(1), 12))
    return target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits


def _fuse(folder):
    """Write the experts of a layer as one tensor, as transformers has them in memory."""
    state = read_model(folder, torch.float32).state_dict()
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")


@needs_compiler
@pytest.mark.parametrize("exchanged", [False, True])
def test_experts_may_be_one_tensor(tmp_path, exchanged):
    folder = tiny.save(tmp_path, MIXTURES["qwen3_moe"])
    expected = {name: value.clone() for name, value in read_weights(folder, torch.float32).items()}
    _fuse(folder)
    if exchanged:
        experts = [name for name in expected if ".experts." in name]
        _change(folder, lambda stored: stored.update({name: stored[name].mT.contiguous() for name in experts}))
    weights = _open(folder)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@needs_compiler
def test_older_names_of_multimodal_models(others, tmp_path):
    folder = shutil.copytree(others["llava"], tmp_path, dirs_exist_ok=True)
    expected = _open(folder)
    older = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}

    def rename(stored):
        for name in list(stored):
            for new, old in older.items():
                if name.startswith(new):
                    stored[name.replace(new, old)] = stored.pop(name)

    _change(folder, rename)
    assert all(torch.equal(value, expected[name]) for name, value in _open(folder).items())


@needs_compiler
def test_a_mixture_that_lacks_an_expert_is_left_to_transformers(tmp_path):
    folder = tiny.save(tmp_path, MIXTURES["mixtral"])
    assert _open(folder) is not None
    _change(folder, lambda stored: stored.pop(next(name for name in stored if "experts.3" in name)))
    assert _open(folder) is None
