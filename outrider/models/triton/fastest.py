"""Choose the fastest kernels of a device for verification: Triton on a GPU, C++ on a CPU, else torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from outrider.core import noise
from outrider.models.native import rules, sampling
from outrider.verify.rules import Verifier
from outrider.verify.sampling import SamplingKernels


def fastest_verifier(verifier: Verifier, device: torch.device) -> Verifier:
    """Return the verifier with its fastest implementation for the device. All give the same results."""
    if _has_triton(device):
        from outrider.models.triton.rules import on_device

        return on_device(verifier)
    return rules.fastest_verifier(verifier, device)


def fastest_sampling(device: torch.device) -> SamplingKernels:
    """Return the fastest functions for the device. All give the same results, up to rounding."""
    if _has_triton(device):
        from outrider.models.triton.sampling import target_probs

        return SamplingKernels(probs=target_probs)
    return sampling.fastest_sampling(device)


def fastest_inverse_cdf(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the fastest `inverse_cdf` for the device, for rows [B, V] and numbers [B]."""
    if _has_triton(device):
        from outrider.models.triton.sampling import inverse_cdf

        return inverse_cdf
    return noise.inverse_cdf


def _has_triton(device: torch.device) -> bool:
    """Return whether Triton can be imported and has kernels for the device: an NVIDIA GPU from Ampere on."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
