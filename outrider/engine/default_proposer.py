"""Choose the default proposer of a target."""

from pathlib import Path

from outrider.errors import OutriderError
from outrider.models.heads.mtp import has_mtp
from outrider.models.loader.embedded import embedded, model_folder
from outrider.models.loader.gguf.file import read_gguf
from outrider.models.loader.load import choose_device, read_model_config
from outrider.models.loader.paths import is_gguf
from outrider.models.loader.quantized.weights import integer_bits
from outrider.models.native.support import may_run
from outrider.runtime.machine import free_memory

_WIDE_TYPES = frozenset({"F32", "F16", "BF16", "Q8_0"})  # types of GGUF files with at least 8 bits
# Free memory that a target with a quantized copy of itself needs, as a multiple of the size of its files: the weights
# while they are loaded and packed, the copy with 4 bits, and some room for KV caches.
_MEMORY_FACTOR = 3
_COPY_BITS = 4
_LOOKUP = "suffix:100000"  # keeps 100,000 tokens of past outputs, which is about 12 MB


def default_proposer(
    target: str | Path | None, *, device: str = "auto", kernels: str = "auto", quantize: str | None = None
) -> str:
    """Return the default proposer of a target.

    It is the first of these that fits: the embedded draft model for the embedded target; `best(suffix:100000,mtp)` if
    the target's checkpoint has a module for multi-token prediction; `best(suffix:100000,quantized:int4)` on the native
    kernels of a CPU, if memory is free for the copy; and `suffix:100000`, which needs no model.

    Args:
        target: folder of the target, or a GGUF file. None: the embedded target.
        device: as in `EngineConfig`.
        kernels: as in `EngineConfig`.
        quantize: as in `EngineConfig`.
    """
    folder = model_folder(target)
    if folder == embedded("mini"):
        return f"draft:{embedded('nano')}"
    if has_mtp(folder):
        return f"best({_LOOKUP},mtp)"
    if can_draft_for_itself(folder, device=device, kernels=kernels, quantize=quantize) and _copy_fits(folder):
        return f"best({_LOOKUP},quantized:int4)"
    return _LOOKUP


def can_draft_for_itself(folder: Path, *, device: str, kernels: str, quantize: str | None) -> bool:
    """Return whether a copy of the target with 4 bits per weight would be smaller and run on the native kernels."""
    if kernels == "torch" or quantize == "int4" or choose_device(device).type != "cpu":
        return False
    try:
        if is_gguf(folder) and not set(read_gguf(folder).types) <= _WIDE_TYPES:
            return False
        config = read_model_config(folder)
        return may_run(config) and integer_bits(config) > _COPY_BITS
    except OutriderError:  # loading the target gives the reason
        return False


def _copy_fits(folder: Path) -> bool:
    free = free_memory()
    files = [folder] if folder.is_file() else folder.glob("*.safetensors")
    return free is None or _MEMORY_FACTOR * sum(file.stat().st_size for file in files) < free
