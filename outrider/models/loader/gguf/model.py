"""Make the configuration and the model of transformers that a GGUF file describes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from outrider.models.loader.dtype import gguf_dtype
from outrider.models.loader.fill import OWN_ATTENTION, fill_model
from outrider.models.loader.gguf.architectures import settings_of
from outrider.models.loader.gguf.file import GGUFFile, read_gguf
from outrider.models.loader.gguf.weights import GGUFWeights


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
    kind = settings.pop("model_type")
    return CONFIG_MAPPING[kind](**settings, dtype=gguf_dtype(file))


def load_model(
    file: GGUFFile,
    config: Any,
    weights: GGUFWeights,
    dtype: torch.dtype,
    attention: Mapping[str, str] = OWN_ATTENTION,
    *,
    widen: bool = False,
) -> Any:
    """Make the model. Quantized matrices stay in their blocks.

    Args:
        config: its configuration.
        dtype: the type of all weights that are not in quantized blocks.
        attention: the arguments that choose the attention of the model.
        widen: as in `fill_model`.

    Raises:
        OutriderError: a tensor is missing, or has the wrong shape.
        UnsupportedModel: the model does not use a tensor.
    """
    if file.quantized or widen:  # other functions read all experts at once
        attention = {**attention, "experts_implementation": "eager"}
    factors = None if file.architecture == "gemma4" else file.rotary_factors()
    model = fill_model(config, weights, dtype, attention, factors=factors, widen=widen)
    weights.check_used(model.state_dict().keys() | _names_of_blocks(model))
    return model


def _names_of_blocks(model: Any) -> set[str]:
    """Return the names of the weights that stay in blocks."""
    names = {name for name, module in model.named_modules() if hasattr(module, "blocks")}
    return names | {f"{name}.weight" for name in names}
