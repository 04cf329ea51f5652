"""Folders that are opened for the native kernels, and those that are left to transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.loader.load import load_checkpoint, read_weights
from outrider.models.loader.model_config import read_native_config
from outrider.models.loader.native_checkpoint import open_weights
from tests.helpers import tiny


@pytest.fixture
def folder(tmp_path):
    return tiny.save(tmp_path / "model", tiny.make_config("LlamaConfig"))


def _open(folder):
    return open_weights(folder, read_native_config(folder), torch.float32)


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
    "odd address": _shift,
    "truncated": lambda folder: (folder / "model.safetensors").write_bytes(b"\x99\0\0\0\0\0\0\0{"),
    "no files": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("case", LEFT)
def test_unusual_files_are_left_to_transformers(folder, case):
    LEFT[case](folder)
    assert _open(folder) is None


def test_transformers_reads_what_is_left_to_it(folder):
    expected = {name: value.clone() for name, value in _open(folder).items()}
    _shift(folder)
    checkpoint = load_checkpoint(folder, dtype="float32", device="cpu")
    assert checkpoint.weights is None
    assert all(torch.equal(value, expected[name]) for name, value in checkpoint.model.state_dict().items())
