"""Choose the dtype in which a model runs."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from outrider.errors import OutriderError, either
from outrider.models.loader.gguf.file import GGUFFile
from outrider.models.native.support import may_run

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
_GGUF_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"F16": torch.float16, "BF16": torch.bfloat16})


class DtypeChoice(NamedTuple):
    """A type, and why it was chosen."""

    dtype: torch.dtype
    reason: str


def stored_dtype(config: Any) -> torch.dtype:
    """Return the type in which a checkpoint is stored; float32 if the config does not say."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def gguf_dtype(file: GGUFFile) -> torch.dtype:
    """Return the type of the matrices of a GGUF file, except for the few in float32, such as routers.

    If the matrices have several types or quantized blocks, it is float32.
    """
    kinds = set(file.types) - {"F32"}
    return _GGUF_DTYPES.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32


def choose_dtype(name: str, config: Any, device: torch.device, *, kernels: str, quantized: bool = False) -> DtypeChoice:
    """Choose the fastest type that keeps the precision of the checkpoint.

    Args:
        name: auto, float32, bfloat16 or float16.
        config: the configuration of the model, with the type of its weights.
        device: where the model runs.
        kernels: auto, native, triton or torch.
        quantized: whether the weights of the checkpoint are quantized.

    Raises:
        OutriderError: the name is unknown.
    """
    if name != "auto":
        if name not in _DTYPES:
            raise OutriderError(f"dtype {name!r} is unknown; use {either(['auto', *_DTYPES])}")
        return DtypeChoice(_DTYPES[name], "as asked for")
    own = stored_dtype(config)
    if quantized and (kernels == "triton" or (device.type == "cpu" and kernels != "torch" and may_run(config))):
        return DtypeChoice(torch.bfloat16, "with quantized weights")  # of keys, values and dense weights
    as_stored = DtypeChoice(own, "as the checkpoint is stored")
    if device.type != "cpu" or own == torch.float32 or kernels == "triton":
        return as_stored
    if own != torch.bfloat16:
        return DtypeChoice(torch.float32, "as CPUs have no fast float16")
    if kernels != "torch" and may_run(config):
        return as_stored  # the kernels widen bfloat16 in registers on CPUs without instructions for it
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return as_stored
    return DtypeChoice(torch.float32, "as torch has no fast bfloat16 on this CPU")
