"""Whether the Triton kernels run on a device."""

from __future__ import annotations

import torch

from outrider.errors import UnsupportedModel

_OLDEST = (8, 0)  # compute capability of Ampere, the first with bfloat16


def check_device(device: torch.device) -> None:
    """Raise UnsupportedModel if the kernels do not run on a device, with the reason."""
    try:
        import triton
    except ImportError as error:
        raise UnsupportedModel("kernels triton needs the package triton; pip install triton") from error
    if triton.knobs.runtime.interpret:
        return  # Triton's interpreter runs the kernels on CPU tensors, for tests
    if device.type != "cuda":
        raise UnsupportedModel(f"the Triton kernels need an NVIDIA GPU, and the device is {device}")
    if torch.cuda.get_device_capability(device) < _OLDEST:
        raise UnsupportedModel("the Triton kernels need a GPU of compute capability 8.0 or newer")
