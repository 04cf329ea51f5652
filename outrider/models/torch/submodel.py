"""Make models from some layers of another model without copying weights, and quantized copies."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import nn

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.torch.prepack import PackedLinear, can_prepack, prepack
from outrider.models.torch.quantize import QuantizedLinear, quantize_model
from outrider.runtime.ranks import whole

_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm", "final_norm")
_TWO_CACHED = frozenset({"longcat_flash"})  # each layer has two attention modules; num_hidden_layers counts both
_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks")


def make_submodel(model: Any, layers: Sequence[int]) -> Any:
    """Return a model of these decoder layers, in this order, with the embedding and LM head of `model`.

    Modules are copied, so that hooks and wrappers are separate. Weights are shared.
    """
    path, stack = layer_stack(model)
    configs = _configs(model, layers)
    root = _copy_module(model, configs)
    module = root
    *names, last = path.split(".")
    for name in names:
        child = _copy_module(module._modules[name], configs)
        module._modules[name] = child
        module = child
    module._modules[last] = nn.ModuleList(_copy_module(stack[i], {}) for i in layers)
    return root


def requantized_model(model: Any, bits: int) -> Any:
    """Return a bfloat16 copy of a model with linear layers of 8 or 4 bits. Other bfloat16 weights are shared.

    Raises:
        OutriderError: the model is not on a CPU, or its weights do not have more bits.
        UnsupportedModel: the model cannot be quantized.
    """
    table = model.get_input_embeddings().weight
    if table.device.type != "cpu":
        raise OutriderError("a quantized draft needs a CPU; use device cpu, or draft:DIR, exit:N or ngram")
    layer_bits = [module.bits for module in model.modules() if isinstance(module, QuantizedLinear)]
    refuse_wider(bits, min(layer_bits, default=16))
    quantized = _unpacked(model, table.dtype)
    quantize_model(quantized, bits)
    if can_prepack(torch.device("cpu"), torch.bfloat16):
        prepack(quantized)
    return quantized


def refuse_wider(bits: int, held: int) -> None:
    """Raise if a quantized draft would not be smaller than the target."""
    if bits >= held:
        raise OutriderError(
            f"a draft with {bits} bits is not smaller than this target with {held}; use fewer bits,"
            " or leave --quantize out"
        )


def refuse_weight_update(source: object | None) -> None:
    """Raise if weights are loaded into a model that was made from `source`."""
    if source is not None:
        raise OutriderError("this draft uses the weights of the target; update those of the target")


def shared_weights(model: Any) -> SharedWeights:
    """Return the weights of a model that draft heads share (see `WeightSharer`)."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    decoder = model.get_submodule(layer_stack(model)[0].rpartition(".")[0])
    norm = next((norm for name in _FINAL_NORMS if (norm := getattr(decoder, name, None)) is not None), None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    norm_class = type(norm).__name__
    is_rms_norm = "RMSNorm" in norm_class
    has_bias = getattr(head, "bias", None) is not None
    if norm is None or epsilon is None or not is_rms_norm or has_bias:
        model_type = model.config.model_type
        raise OutriderError(
            f"draft heads do not support {model_type}: its final norm or LM head differs from"
            " Llama's; use a draft model, ngram or suffix"
        )
    # Each rank of tensor parallelism runs the whole draft head.
    table = whole(embedding.weight)
    if (scale := getattr(embedding, "embed_scale", None)) is not None:  # of Gemma, rounded as in its own pass
        table = table * torch.as_tensor(scale).to(table)
    # A quantized LM head is expanded to the type of the embedding.
    return SharedWeights(
        embedding=table,
        head=whole(head.weight).to(table.dtype),
        norm=_norm_factors(norm, epsilon),
        epsilon=float(epsilon),
        softcap=getattr(model.config.get_text_config(), "final_logit_softcapping", None),
    )


@torch.no_grad()
def _norm_factors(norm: Any, epsilon: float) -> torch.Tensor:
    """Return the factors by which an RMS norm multiplies. Gemma, Qwen3-Next and Qwen3.5 store them minus 1."""
    weight: torch.Tensor = norm.weight
    expected = weight.float()
    measured = norm(torch.ones_like(expected)).float() * (1 + epsilon) ** 0.5
    if torch.allclose(measured, expected, rtol=1e-2, atol=1e-3):
        return weight
    if torch.allclose(measured, expected + 1, rtol=1e-2, atol=1e-3):
        return expected + 1
    raise OutriderError(f"draft heads do not support the final norm {type(norm).__name__}; use --proposer suffix")


def layer_stack(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the name and the modules of the list of decoder layers.

    Raises:
        UnsupportedModel: no module list has the number of layers of the configuration.
    """
    config = model.config.get_text_config(decoder=True)
    count = _layer_count(config)
    decoder_modules = set(map(id, model.get_decoder().modules()))
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in decoder_modules
    ]
    if not stacks:
        raise UnsupportedModel(f"{model.config.model_type}: it has no list of {count} decoder layers")
    return stacks[0]


def _layer_count(config: Any) -> int:
    """Return the number of decoder layers of a text configuration."""
    if count := getattr(config, "num_decoder_layers", None):  # T5, whose other names count the encoder
        return int(count)
    if config.model_type in _TWO_CACHED:
        return int(config.num_layers)
    return int(config.num_hidden_layers)


def _configs(model: Any, layers: Sequence[int]) -> Mapping[int, Any]:
    """Return the configurations of a model with these layers, by the id of the original ones."""
    old = model.config
    new = deepcopy(old)
    text = new.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers) * (2 if text.model_type in _TWO_CACHED else 1)
    if layer_types := getattr(text, "layer_types", None):
        text.layer_types = [layer_types[i] for i in layers]
    return {id(old): new, id(old.get_text_config(decoder=True)): text}


def _copy_module(module: nn.Module, configs: Mapping[int, Any]) -> Any:
    """Return a copy of a module that shares children and weights, without hooks and wrappers of `forward`.

    `configs` maps the id of a configuration to the one that replaces it.
    """
    out = copy(module)
    out._modules = dict(module._modules)
    for hooks in _HOOKS:
        setattr(out, hooks, OrderedDict())
    if not hasattr(module, "_is_hooked"):  # the wrapper of tensor parallelism, which belongs to the shared weights
        out.__dict__.pop("forward", None)
    if id(getattr(out, "config", None)) in configs:
        out.config = configs[id(out.config)]
    return out


def _unpacked(module: nn.Module, wide: torch.dtype) -> Any:
    """Return a deep copy with plain linear layers and weights of dtype `wide` in bfloat16.

    Other weights are shared.
    """
    if isinstance(module, PackedLinear | QuantizedLinear):
        outputs, inputs = module.shape
        linear = nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")
        linear.weight = nn.Parameter(module.weight, requires_grad=False)
        if module.bias is not None:
            linear.bias = nn.Parameter(module.bias, requires_grad=False)
        return linear
    out = _copy_module(module, {})
    if wide != torch.bfloat16:
        out._parameters = dict(module._parameters)
        for name, weight in module._parameters.items():
            if weight is not None and weight.dtype == wide:
                out._parameters[name] = nn.Parameter(weight.bfloat16(), requires_grad=False)
    for name, child in out._modules.items():
        out._modules[name] = child if child is None else _unpacked(child, wide)
    return out
