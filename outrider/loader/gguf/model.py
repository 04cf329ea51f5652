"""Make the configuration and the model of transformers that a GGUF file describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING

from outrider.loader.fill import fill_model
from outrider.loader.gguf.architectures import architecture_of, settings_of
from outrider.loader.gguf.file import GGUFFile, read_gguf
from outrider.loader.gguf.weights import ROTARY_FACTORS, GGUFWeights

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"F16": torch.float16, "BF16": torch.bfloat16})


def read_config(path: Path) -> Any:
    """Return the configuration of transformers of a file. It names the type in which the file is stored.

    Raises:
        OutriderError: the file is missing or damaged.
        UnsupportedModel: the architecture, its rotary scaling, or a type of tensors is not supported.
    """
    return make_config(read_gguf(path))


def make_config(file: GGUFFile) -> Any:
    """Return the configuration of transformers of an open file. Errors are those of `read_config`."""
    settings = settings_of(file)
    kind = architecture_of(file).model_type
    return CONFIG_MAPPING[kind](**settings, dtype=stored_dtype(file))


def stored_dtype(file: GGUFFile) -> torch.dtype:
    """Return the type of all matrices of a file; float32 if they have several, or quantized blocks."""
    kinds = file.types
    return _DTYPES.get(kinds[0], torch.float32) if len(kinds) == 1 else torch.float32


def end_ids(file: GGUFFile) -> frozenset[int]:
    """Return the ids of tokens that end a generation."""
    ids = [file.field(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return frozenset(int(each) for each in ids if each is not None)


def load_model(file: GGUFFile, config: Any, weights: GGUFWeights, dtype: torch.dtype) -> Any:
    """Make the model. Quantized matrices stay in their blocks.

    Args:
        file: the file.
        config: its configuration.
        weights: its weights.
        dtype: the type of all weights that are not in quantized blocks.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
    """
    return fill_model(config, weights, dtype, factors=rotary_factors(file))


def rotary_factors(file: GGUFFile) -> torch.Tensor | None:
    """Return the divisors of the rotary frequencies [D / 2], or None."""
    tensor = file.tensors.get(ROTARY_FACTORS)
    return None if tensor is None else torch.from_numpy(tensor.data.view(np.float32).copy())
