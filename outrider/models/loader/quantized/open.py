"""Open a quantized checkpoint for a model and a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from outrider.models.loader.quantized.weights import QuantizedWeights
from outrider.models.native.support import FAMILIES, may_run


def open_quantized(
    folder: Path, config: Any, settings: Any, dtype: torch.dtype, device: torch.device, *, kernels: str
) -> QuantizedWeights:
    """Open the weights of a quantized checkpoint.

    Integers that the native kernels multiply stay as they are if these kernels may run the model in bfloat16. In every
    other case all weights are dequantized.

    Args:
        folder: the checkpoint.
        config: its configuration.
        settings: how it is quantized.
        dtype: the type of weights that are dequantized.
        device: where the model runs.
        kernels: auto, native or torch.

    Raises:
        OutriderError: the files are missing or damaged.
        UnsupportedModel: the quantization is not read.
    """
    native = device.type == "cpu" and kernels != "torch" and dtype == torch.bfloat16
    if native and _takes_blocks(config):
        weights = QuantizedWeights(folder, settings, dtype, blocks=True)
        if weights.has_blocks and _names(config) <= set(weights):
            return weights
    return QuantizedWeights(folder, settings, dtype)


def _takes_blocks(config: Any) -> bool:
    """Return whether the kernels may run a model, and each of its matrices belongs to one linear layer."""
    kind = config.model_type
    return kind in FAMILIES and not FAMILIES[kind].routed and may_run(config)


def _names(config: Any) -> set[str]:
    """Return the names of the weights of a model that a checkpoint must have."""
    with torch.device("meta"):
        names = set(AutoModelForCausalLM.from_config(config).state_dict())
    return names - {"lm_head.weight"} if config.tie_word_embeddings else names
