"""Check that a model fits into the free memory before it is loaded."""

from pathlib import Path

import torch

from outrider.errors import OutriderError
from outrider.runtime.machine import free_memory


def check_memory(path: Path, size: int, device: torch.device) -> None:
    """Check that weights fit into the free memory of a device.

    Args:
        path: the model, for the message.
        size: bytes of its weights in the type in which they are loaded.
        device: where they are loaded.

    Raises:
        OutriderError: they do not fit.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if free is not None and size > free:
        raise OutriderError(
            f"the weights of {path} take {gigabytes(size)} in memory, and {gigabytes(free)} are free; free some memory,"
            " use a smaller model or --quantize, or a machine with more memory"
        )


def weight_bytes(path: Path, stored: torch.dtype, loaded: torch.dtype) -> int:
    """Return the bytes that the safetensors of a folder take in memory if they are loaded in another type."""
    return safetensors_bytes(path) * loaded.itemsize // stored.itemsize


def safetensors_bytes(path: Path) -> int:
    """Return the bytes of the safetensors of a folder."""
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def gigabytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e9:.3g} GB"
