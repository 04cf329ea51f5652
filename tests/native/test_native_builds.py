"""The kernels as they are compiled for lesser processors, whose registers and instructions make other loops of them."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from outrider.native import library

# What a process says whose kernels were compiled for the processor in its first argument; a process takes one library.
SAYS = """
import sys, torch
from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.engine.build import load_target
from outrider.loader.embedded import embedded
from outrider.native import library
from outrider.core.types import Batch, SequenceState

level, out = sys.argv[1:]
library._FLAGS = tuple(f"-march={level}" if flag.startswith("-march") else flag for flag in library._FLAGS)
text = tuple(torch.randint(5, 12000, (45,), generator=torch.Generator().manual_seed(3)).tolist())
said = {}
for kind in ("float32", "bfloat16", "int8", "int4"):
    how = {"dtype": "auto", "quantize": kind} if kind.startswith("int") else {"dtype": kind, "quantize": None}
    where = {"target": embedded("nano"), "kernels": "native", "device": "cpu", "max_num_seqs": 1, "max_model_len": 64}
    target = load_target(EngineConfig(**where, **how)).model
    laws = []
    for size in (1, 2, 3, 5, 11, 13, 45):  # tiles of many heights
        target.cache.admit(0, text[:size])
        batch = Batch(seqs=(SequenceState.of(text[:size]),), start=(0,), feed=(text[:size],), draft_budget=(0,))
        laws.append(target.score(batch, tree.empty(1, target.device)).logits[0, 0].float().softmax(-1))
        target.cache.release(0)
    said[kind] = torch.stack(laws)
torch.save(said, out)
"""


def _says(level, folder):
    out = folder / f"{level}.pt"
    done = subprocess.run([sys.executable, "-c", SAYS, level, str(out)], capture_output=True, text=True, check=False)
    if "bad value" in done.stderr:
        pytest.skip(f"the compiler does not know {level}")
    assert done.returncode == 0, done.stderr
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this processor does not run what is compiled for AVX2",
)
def test_other_processors_say_the_same(tmp_path):
    assert "-march=native" in library._FLAGS
    own, others = _says("native", tmp_path), [_says(level, tmp_path) for level in ("x86-64-v3", "x86-64")]
    for kind, laws in own.items():
        for other in others:
            assert torch.minimum(laws, other[kind]).sum(-1).min() > (0.9999 if kind == "float32" else 0.98), kind
