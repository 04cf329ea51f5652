"""A model made of some layers of another: the same weights, of which there is no second copy."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import nn

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.prepack import PackedLinear, can_prepack, prepack
from outrider.models.quantize import QuantizedLinear, quantize_model

_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks")


def make_submodel(model: Any, layers: Sequence[int]) -> Any:
    """A transformers model of these decoder layers, in this order, between the embedding and head of `model`.

    Whatever holds the layers is copied, and they themselves are, so that a hook or a wrapper around the one model is
    not around the other; what they are made of is shared.
    """
    path, stack = layer_stack(model)
    twins = _configs(model, layers)
    root = at = _shell(model, twins)
    *names, last = path.split(".")
    for name in names:
        at._modules[name] = at = _shell(at._modules[name], twins)
    at._modules[last] = nn.ModuleList(_shell(stack[i], {}) for i in layers)
    return root


def requantized_model(model: Any, bits: int) -> Any:
    """A copy of a transformers model in bfloat16 whose linear layers have 8 or 4 bits.

    What is in bfloat16 already and not quantised is shared.

    Raises:
        OutriderError: the model is not on a CPU, or has no more bits as it is.
        UnsupportedModel: it cannot be quantised here.
    """
    table = model.get_input_embeddings().weight
    if table.device.type != "cpu":
        raise OutriderError("a quantised draft needs a CPU; use device cpu, or draft:DIR, exit:N or ngram")
    held = [module.bits for module in model.modules() if isinstance(module, QuantizedLinear)]
    refuse_wider(bits, min(held, default=16))
    copied = _unpacked(model, table.dtype)
    quantize_model(copied, bits)
    if can_prepack(torch.device("cpu"), torch.bfloat16):
        prepack(copied)
    return copied


def refuse_wider(bits: int, held: int) -> None:
    """Stop where a copy of the target would be no smaller than the target."""
    if bits >= held:
        raise OutriderError(
            f"a draft of {bits} bits is no smaller than this target of {held}; use fewer bits, or leave quantize out"
        )


def refuse_weight_update(source: object | None) -> None:
    """Stop where weights are loaded into what is made of `source`."""
    if source is not None:
        raise OutriderError("this draft is made of the target's own weights, and follows them; swap the target's")


def shared_weights(model: Any) -> SharedWeights:
    """The tables of a transformers model (see `WeightSharer`)."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    stack = layer_stack(model)[0].rpartition(".")[0]
    norm = getattr(model.get_submodule(stack), "norm", None)
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    named = type(norm).__name__
    plain = getattr(head, "bias", None) is None and "RMSNorm" in named
    if norm is None or epsilon is None or not plain or re.search("Gemma(?!3n|4)", named):  # whose weights count from 1
        kind = model.config.model_type
        raise OutriderError(f"drafts cannot be trained on the states of {kind}: its final norm or head is not Llama's")
    table = embedding.weight * getattr(embedding, "embed_scale", 1.0)
    return SharedWeights(embedding=table, head=head.weight, norm=norm.weight, epsilon=float(epsilon))


def layer_stack(model: Any) -> tuple[str, nn.ModuleList]:
    """Name and modules of the stack of decoder layers: the first list as long as the configuration says.

    Raises:
        UnsupportedModel: there is no such list.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    inside = {id(module) for module in model.get_decoder().modules()}
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and id(module) in inside
    ]
    if not stacks:
        kind = model.config.model_type
        raise UnsupportedModel(f"{kind}: there is no list of {count} decoder layers in it, as its configuration says")
    return stacks[0]


def _configs(model: Any, layers: Sequence[int]) -> Mapping[int, Any]:
    """Configurations of a model of these layers, by the identity of those that they stand for."""
    old = model.config
    new = deepcopy(old)
    text = new.get_text_config(decoder=True)
    text.num_hidden_layers = len(layers)
    if kinds := getattr(text, "layer_types", None):
        text.layer_types = [kinds[i] for i in layers]
    return {id(old): new, id(old.get_text_config(decoder=True)): text}


def _shell(module: nn.Module, twins: Mapping[int, Any]) -> Any:
    """A copy that shares its children and weights, with no hooks and no wrapper around its `forward`."""
    out = copy(module)
    out._modules = dict(module._modules)
    for hooks in _HOOKS:
        setattr(out, hooks, OrderedDict())
    out.__dict__.pop("forward", None)
    if id(getattr(out, "config", None)) in twins:
        out.config = twins[id(out.config)]
    return out


def _unpacked(module: nn.Module, wide: torch.dtype) -> Any:
    """A copy down to the leaves: packed linear layers are plain ones again, and what was `wide` is in bfloat16.

    Other weights are shared.
    """
    if isinstance(module, PackedLinear | QuantizedLinear):
        outputs, inputs = module.shape
        plain = nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")
        plain.weight = nn.Parameter(module.weight, requires_grad=False)
        if module.bias is not None:
            plain.bias = nn.Parameter(module.bias, requires_grad=False)
        return plain
    out = _shell(module, {})
    if wide != torch.bfloat16:
        out._parameters = {
            name: nn.Parameter(weight.bfloat16(), requires_grad=False)
            if weight is not None and weight.dtype == wide
            else weight
            for name, weight in module._parameters.items()
        }
    for name, child in out._modules.items():
        out._modules[name] = child if child is None else _unpacked(child, wide)
    return out
