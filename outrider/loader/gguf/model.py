"""Make the configuration and the model of transformers that a GGUF file describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from outrider.loader.dtype import gguf_dtype
from outrider.loader.fill import fill_model
from outrider.loader.gguf.architectures import architecture_of, settings_of
from outrider.loader.gguf.file import GGUFFile, read_gguf
from outrider.loader.gguf.weights import GGUFWeights


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
    return CONFIG_MAPPING[kind](**settings, dtype=gguf_dtype(file))


def load_model(file: GGUFFile, config: Any, weights: GGUFWeights, dtype: torch.dtype, *, widen: bool = False) -> Any:
    """Make the model. Quantized matrices stay in their blocks.

    Args:
        file: the file.
        config: its configuration.
        weights: its weights.
        dtype: the type of all weights that are not in quantized blocks.
        widen: as in `fill_model`.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
    """
    return fill_model(config, weights, dtype, factors=file.rotary_factors(), widen=widen)
