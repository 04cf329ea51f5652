"""Kernels that are compiled for older processors, which have smaller registers and fewer instructions."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from outrider.models.native.builds import own_flags

# Computes probabilities with kernels that are compiled for the processor in the first argument, and saves them. It runs
# in its own process, because a process can load only one library.
SCRIPT = """
import sys, torch
from outrider.core import tree
from outrider.core.config import EngineConfig
from outrider.engine.build import load_target
from outrider.models.loader.embedded import embedded
from outrider.models.native.builds import own_flags
from outrider.core.types import Batch, DraftBudget, SequenceState

level, out = sys.argv[1:]
library.own_flags = lambda: (f"-march={level}",)
tokens = tuple(torch.randint(5, 12000, (45,), generator=torch.Generator().manual_seed(3)).tolist())
probs = {}
for kind in ("float32", "bfloat16", "int8", "int4"):
    precision = {"dtype": "auto", "quantize": kind} if kind.startswith("int") else {"dtype": kind, "quantize": None}
    options = {"target": embedded("nano"), "kernels": "native", "device": "cpu", "max_num_seqs": 1, "max_model_len": 64}
    target = load_target(EngineConfig(**options, **precision)).model
    kind_probs = []
    for size in (1, 2, 3, 5, 11, 13, 45):  # tiles of different numbers of rows
        feed = tokens[:size]
        target.cache.admit(0, feed)
        batch = Batch(seqs=(SequenceState.of(feed),), start=(0,), feed=(feed,), budget=DraftBudget((0,)))
        logits = target.score(batch, tree.empty(1, target.device)).logits[0, 0]
        kind_probs.append(logits.float().softmax(-1))
        target.cache.release(0)
    probs[kind] = torch.stack(kind_probs)
torch.save(probs, out)
"""


def _run(level, folder):
    """Return the probabilities [N, V] by kind of weights, with kernels for a processor level."""
    out = folder / f"{level}.pt"
    command = [sys.executable, "-c", SCRIPT, level, str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "bad value" in result.stderr:
        pytest.skip(f"the compiler does not know {level}")
    assert result.returncode == 0, result.stderr
    return torch.load(out)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this processor cannot run code that is compiled for AVX2",
)
def test_probabilities_agree_across_instruction_sets(tmp_path):
    assert own_flags() == ("-march=native",)
    native = _run("native", tmp_path)
    levels = ["x86-64-v3", "x86-64"]
    info = Path("/proc/cpuinfo")
    if info.is_file() and "avx_vnni" in info.read_text().split():
        levels.append("alderlake")
    others = [_run(level, tmp_path) for level in levels]
    for kind, probs in native.items():
        for other in others:
            overlap = torch.minimum(probs, other[kind]).sum(-1)
            assert overlap.min() > (0.9999 if kind == "float32" else 0.98), kind
