"""Compute the target distribution with the native kernels. They do not sort the vocabulary."""

import ctypes
from functools import partial

import torch

from outrider.errors import UnsupportedModel
from outrider.models.native.abi import CDistributions
from outrider.models.native.library import Library, load_library
from outrider.verify.sampling import ProbsFunction, SamplingTensors, target_probs


def fastest_sampling(device: torch.device) -> ProbsFunction:
    """Return the native `target_probs` if the device is a CPU and the kernels are available, else the torch one."""
    if device.type != "cpu":
        return target_probs
    try:
        return partial(_target_probs, load_library())
    except UnsupportedModel:
        return target_probs  # no compiler; the torch function computes the same


def _target_probs(
    library: Library, logits: torch.Tensor, sampling: SamplingTensors, of: torch.Tensor | slice
) -> torch.Tensor:
    logits = logits.to(torch.float32).contiguous()
    # The kernel copies the logits. Threads of torch that have copied them would go on waiting for work on a core.
    probs = torch.empty_like(logits)
    params = sampling.draw_params[of].contiguous()
    batch_size, nodes, vocab = probs.shape
    arguments = CDistributions(
        logits=logits.data_ptr(),
        probs=probs.data_ptr(),
        params=params.data_ptr(),
        count=batch_size * nodes,
        vocab=vocab,
        nodes=nodes,
    )
    library.code.outrider_target_probs(ctypes.byref(arguments))
    return probs
