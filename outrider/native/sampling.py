"""Laws in the kernels' hands: what `outrider.verify.sampling.shape` says, without sorting a vocabulary."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from outrider.errors import UnsupportedModel
from outrider.native.abi import CLaws
from outrider.native.library import Library, load_library
from outrider.verify.sampling import ProbsFunction, SamplingTensors, target_probs


def fastest_sampling(device: torch.device) -> ProbsFunction:
    """`sampling.shape`; on a CPU with kernels, made by them."""
    if device.type != "cpu":
        return target_probs
    try:
        return partial(_shape, load_library())
    except UnsupportedModel:
        return target_probs  # no compiler here, and the reference says the same


def _shape(library: Library, logits: torch.Tensor, knobs: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    law = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    wants, (rows, nodes, vocab) = knobs.draw_params[of].contiguous(), law.shape
    library.code.outrider_shape(ctypes.byref(CLaws(law.data_ptr(), wants.data_ptr(), rows * nodes, vocab, nodes)))
    return law
