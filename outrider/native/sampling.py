"""Laws in the kernels' hands: what `outrider.verify.sampling.shape` says, without sorting a vocabulary."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

from outrider.errors import UnsupportedModel
from outrider.native.abi import CLaws
from outrider.native.library import Library, load_library
from outrider.verify.sampling import Knobs, Shaper, shape


def fastest_shape(device: torch.device) -> Shaper:
    """`sampling.shape`; on a CPU with kernels, made by them."""
    if device.type != "cpu":
        return shape
    try:
        return partial(_shape, load_library())
    except UnsupportedModel:
        return shape  # no compiler here, and the reference says the same


def _shape(library: Library, logits: torch.Tensor, knobs: Knobs, of: torch.Tensor | slice) -> torch.Tensor:
    law = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    wants, (rows, nodes, vocab) = knobs.wants[of].contiguous(), law.shape
    library.code.outrider_shape(ctypes.byref(CLaws(law.data_ptr(), wants.data_ptr(), rows * nodes, vocab, nodes)))
    return law
