"""Tell devices apart."""

import torch


def is_cpu(device: torch.device) -> bool:
    """Return whether the host can read a tensor of this device without waiting."""
    return device.type == "cpu"
