"""Make a model of transformers whose weights stay in mapped files, in the type or blocks of the file."""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from outrider.models.loader.model_class import auto_class
from outrider.models.native.support import FAMILIES
from outrider.models.torch.attention import NAME, attend, receive_mask_rule
from outrider.models.torch.gguf_linear import BlockEmbedding, BlockLinear, DenseWeight
from outrider.models.torch.gguf_made import BlockExperts, DenseInputExperts, ExpertWeight, SeparateExperts
from outrider.models.torch.weights import Weight, Weights

OWN_ATTENTION: Mapping[str, str] = MappingProxyType({"attn_implementation": NAME})
_log = logging.getLogger("outrider")


def register_attention() -> None:
    """Let models of transformers use the attention over Outrider's caches."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, receive_mask_rule)


def fill_model(
    config: Any,
    weights: Weights,
    dtype: torch.dtype,
    attention: Mapping[str, str] = OWN_ATTENTION,
    *,
    factors: list[float] | None = None,
    widen: bool = False,
) -> Any:
    """Make a model. Quantized matrices stay in their blocks.

    Args:
        config: the configuration of transformers.
        dtype: the type in which the model computes, and of all weights that are not in quantized blocks.
        attention: the arguments that choose the attention of the model.
        factors: divisors of the rotary frequencies [R / 2]; None: there are none.
        widen: whether dense matrices keep their type, too. Parts of them are converted to `dtype`
            when they are used, so the model takes little memory.

    Raises:
        OutriderError: a weight is missing, or has the wrong shape.
    """
    register_attention()
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype, **attention)
    _restore_buffers(model, factors)
    head = model.get_output_embeddings()
    prefix = next(name for name, module in model.named_modules() if module is head)
    tied = bool(model.config.tie_word_embeddings)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    if config.get_text_config(decoder=True) is not config:
        shapes = {name: shape for name, shape in shapes.items() if name.startswith((f"{weights.body}.", f"{prefix}."))}
        _clear(model)
    if tied:
        del shapes[f"{prefix}.weight"]
    weights.check(shapes)
    filler = _Filler(model, weights, dtype, widen=widen)
    with weights.reading(shapes) as count:
        for name in shapes:
            filler.fill(*name.rpartition(".")[::2])
            count(name)
    if tied:
        filler.tie_head(prefix)
    return model.eval()


class _Filler:
    """Replaces the parameters of a model on the meta device."""

    def __init__(self, model: Any, weights: Weights, dtype: torch.dtype, *, widen: bool) -> None:
        self._model = model
        self._weights = weights
        self._dtype = dtype
        self._widen = widen

    def fill(self, prefix: str, key: str) -> None:
        """Set the parameter or buffer `key` of the module `prefix`."""
        module = self._model.get_submodule(prefix)
        value = self._value(f"{prefix}.{key}", module, key)
        if isinstance(value, ExpertWeight):
            self._fill_experts(prefix, key, value)
            return
        if not isinstance(value, torch.Tensor):
            if (replacement := self._in_blocks(module, value)) is not None:
                self._model.set_submodule(prefix, replacement)
                return
            _log.info("%s.%s: weights of type %s are expanded to %s", prefix, key, value.kind, self._dtype)
            value = value.dequantize()
        if (buffer := module._buffers.get(key)) is not None:
            module._buffers[key] = value.to(self._dtype).view(buffer.shape)
        else:
            setattr(module, key, nn.Parameter(value.to(self._dtype), requires_grad=False))

    def _value(self, name: str, module: nn.Module, key: str) -> Weight:
        value = self._weights[name]
        is_matrix = (isinstance(module, nn.Linear) or type(module) is nn.Embedding) and key == "weight"
        if not self._widen or not isinstance(value, torch.Tensor):
            return value
        if is_matrix:
            return DenseWeight(value, release=lambda: self._weights.release(name))
        if ".experts." in name and value.dim() == 3:
            return SeparateExperts([[expert] for expert in value], release=lambda _: None)
        return value

    def _in_blocks(self, module: Any, value: Any) -> nn.Module | None:
        """Return a module in place of `module` whose weight stays in blocks; None: there is none of its kind."""
        scale = getattr(module, "scalar_embed_scale", 1.0)
        on_torch = self._model.config.model_type not in FAMILIES
        if isinstance(module, nn.Linear):
            linear = BlockLinear(value, None, self._dtype)
            linear._parameters["bias"] = module.bias
            return linear
        if type(module) is nn.Embedding or (scale != 1.0 and on_torch):
            return BlockEmbedding(value, self._dtype, scale=scale)
        return None

    def _fill_experts(self, prefix: str, key: str, value: ExpertWeight) -> None:
        module = self._model.get_submodule(prefix)
        del module._parameters[key]
        module.add_module(key, BlockExperts(value, self._dtype))
        if type(module).__name__ == "Llama4TextExperts" and key == "down_proj":
            self._model.set_submodule(prefix, DenseInputExperts(module))

    def tie_head(self, prefix: str) -> None:
        table = self._model.get_input_embeddings()
        if isinstance(table, BlockEmbedding):
            self._model.set_submodule(prefix, BlockLinear(table.blocks, None, table.dtype))
        else:
            self._model.get_submodule(prefix).weight = table.weight


def _clear(model: Any) -> None:
    """Set all parameters to zeros that take no memory. Image encoders keep these zeros."""
    for module in model.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                zeros = torch.zeros((), dtype=weight.dtype, device="cpu").expand(weight.shape)
                module._parameters[key] = nn.Parameter(zeros, requires_grad=False)


def _restore_buffers(model: Any, factors: list[float] | None) -> None:
    """Compute the buffers, which are on the meta device: the rotary frequencies, divided by factors."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.zeros_like(buffer, device="cpu")
    model.initialize_weights()  # does nothing to parameters, which are on the meta device
    if factors is None:
        return
    for module in model.modules():
        if "inv_freq" in module._buffers:
            module.inv_freq /= torch.tensor(factors).view(module.inv_freq.shape)
