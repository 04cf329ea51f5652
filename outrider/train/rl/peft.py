"""The weights of a policy under the names of its base model, with a LoRA adapter of PEFT merged."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from outrider.errors import OutriderError
from outrider.runtime.grouping import instances

_LORA = "LORA"
_MERGE = "give the state_dict of what merge_and_unload() returns for a copy of the model"


def merged_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model for `RolloutEngine.update_weights`.

    The names are those of the base model's `state_dict`. The active LoRA adapters are merged, and the layers of
    `modules_to_save` replace those of the base model. The model itself does not change: one layer at a time is copied
    and merged, so that no rounding of a merge and its reversal remains in the weights that are trained.

    Args:
        model: a model of transformers, a `PeftModel` around one, or one with `add_adapter`.

    Raises:
        OutriderError: an adapter is not LoRA, or the base model is quantized.
    """
    configs = getattr(model, "peft_config", None)
    if configs is None:
        return {name: value.detach() for name, value in model.state_dict().items()}
    for config in configs.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if kind != _LORA:
            raise OutriderError(
                f"the policy has an adapter of type {kind}, which is not LoRA; use LoraConfig, or {_MERGE}"
            )
    base: Any = model
    return dict(_weights(base.get_base_model() if hasattr(base, "get_base_model") else base, ""))


def _weights(module: nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and values of a module and its children."""
    module = _merged(module, prefix)
    temporary = module._non_persistent_buffers_set
    buffers = {name: value for name, value in module._buffers.items() if name not in temporary}
    for name, value in {**module._parameters, **buffers}.items():
        if value is not None:
            yield prefix + name, value.detach()
    for name, child in module._modules.items():
        if child is not None:
            yield from _weights(child, f"{prefix}{name}.")


def _merged(module: nn.Module, prefix: str) -> Any:
    """Return a module of the base model that computes what a module with its adapter does."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    name = prefix.removesuffix(".")
    if isinstance(module, ModulesToSaveWrapper):
        if module.disable_adapters or not module.active_adapters:
            return module.original_module
        return module.modules_to_save[module.active_adapters[0]]
    if isinstance(module, LoraLayer):
        if not all(weight.is_floating_point() for weight in module.get_base_layer().parameters()):
            raise OutriderError(f"{name} is quantized; load the base model in float32 or bfloat16 without quantization")
        copy = deepcopy(module)
        layers = instances(copy.modules(), LoraLayer)
        for layer in layers:  # several, if LoRA is on several parameters of one module
            if not layer.disable_adapters:
                layer.merge()
        return copy.get_base_layer()
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        raise OutriderError(f"{name} is a {type(module).__name__}, which is not LoRA; use LoraConfig, or {_MERGE}")
    return module
