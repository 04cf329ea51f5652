"""Tests of the script that writes a GGUF file in another type."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.gguf_files import SIZES, write_gguf
from tests.helpers.scripts import run_script

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "real" / "requantize.py"


@pytest.fixture
def file(tmp_path):
    torch.manual_seed(3)
    config = tiny.make_config("LlamaConfig", **SIZES | {"head_dim": 32, "num_hidden_layers": 1})
    return write_gguf(tmp_path / "model.gguf", AutoModelForCausalLM.from_config(config), "F32")


def _read(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


@pytest.mark.parametrize(
    ("name", "wide", "error"), [("bf16", "BF16", 0.01), ("Q8_0", "Q8_0", 0.02), ("q4_0", "Q8_0", 0.2)]
)
def test_metadata_stays_and_matrices_change(file, tmp_path, name, wide, error):
    out = tmp_path / "out" / "model.gguf"
    assert run_script(SCRIPT, file, out, "--type", name).returncode == 0
    fields, tensors = _read(file)
    new_fields, new_tensors = _read(out)
    assert new_fields.pop("general.file_type") == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
    fields.pop("general.file_type", None)
    assert new_fields == fields
    assert list(new_tensors) == list(tensors)
    for tensor in tensors.values():
        new = new_tensors[tensor.name]
        kind = (
            "F32" if len(tensor.shape) == 1 else wide if tensor.name in ("token_embd.weight", "output.weight") else name
        )
        assert new.tensor_type.name == kind.upper()
        values = gguf.quants.dequantize(new.data, new.tensor_type)
        assert np.linalg.norm(values - tensor.data) <= error * np.linalg.norm(tensor.data)
