"""Gemma 4's assistants: Gemma layers with queries only, which attend to the keys and values of their target.

A layer attends to the target's last layer of its own type, full or sliding attention. The target's config tells which
layer that is. If a later layer of the target reuses the keys of an earlier one, Outrider's cache holds them for both.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import (
    AuxStates,
    Body,
    Centroids,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    Scaling,
    SharedKV,
)
from outrider.models.heads.formats.base import (
    Config,
    Format,
    Source,
    TargetInfo,
    TargetRequired,
    Tensors,
    Written,
    refuse,
    stored,
)
from outrider.models.heads.formats.llama import layer_tensors, rope_of, take_layer
from outrider.models.heads.modules.centroids import TOKEN_ORDER

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "project.weight": "pre_projection.weight",
        "back.weight": "post_projection.weight",
        "norm.weight": "model.norm.weight",
    }
)
_CENTROIDS: Mapping[str, str] = MappingProxyType(
    {
        "centroid_head.centroids.weight": "masked_embedding.centroids.weight",
        TOKEN_ORDER: "masked_embedding.token_ordering",
    }
)
_LM_HEAD = "model.embed_tokens.weight"  # the tied LM head; the embedding is the target's
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_ACTIVATION = "gelu_pytorch_tanh"
_DEFAULT_CONTEXT = 131072  # as max_position_embeddings if it is unknown


class Gemma4Assistant(Format):
    """A config with a nested config of the layers.

    As in transformers, a sliding window of w tokens means that w + 1 entries are visible.
    """

    name = "gemma4-assistant"
    title = "Gemma 4's assistants (Google, transformers, vLLM)"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return {"pre_projection.weight", "post_projection.weight"} <= set(names)

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config = source.config
        text = config.object("text_config")
        layer_types = _read_layer_types(text)
        num_layers = len(layer_types)
        weights = source.take_all(_NAMES)
        weights["head.weight"] = source.take("lm_head.weight" if "lm_head.weight" in source else _LM_HEAD)
        source.ignore([_LM_HEAD], "a copy of the LM head")
        centroids = None
        if config.boolean("use_ordered_embeddings", False):
            centroids = Centroids(count=config.size("num_centroids"), top_k=config.size("centroid_intermediate_top_k"))
            weights |= source.take_all(_CENTROIDS)
            weights[TOKEN_ORDER] = _clusters(weights[TOKEN_ORDER], centroids)
        for i in range(num_layers):
            weights |= take_layer(source, f"model.layers.{i}.", f"layers.{i}.")
        shared_kv = []
        for i, layer_type in enumerate(layer_types):
            head_dim = len(weights[f"layers.{i}.self_attn.q_norm.weight"])
            shared_kv.append(_shared_kv(text, i, layer_type, head_dim, source.target))
        target_layers = source.target_layers()
        description = HeadDescription(
            kind=Kind.KV_SHARING,
            target_hidden=config.size("backbone_hidden_size"),
            target_layers=target_layers,
            vocab=text.size("vocab_size"),
            aux_states=AuxStates(layers=(target_layers - 1,), final=True),
            input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False),
            body=_read_body(text, num_layers, shared_kv[-1]),
            shared_kv=tuple(shared_kv),
            centroids=centroids,
            own_lm_head=True,
        )
        return description, weights

    def write(self, description: HeadDescription, weights: Tensors, target: TargetInfo | None) -> Written:
        body = description.body
        refuse(self.name, {f"is of kind {description.kind}": not description.shared_kv})
        assert body is not None
        refuse(self.name, _reasons(description, body, target))
        tensors = stored(weights, _NAMES) | {_LM_HEAD: weights["head.weight"]}
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"model.layers.{i}.")
        config: Config = {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": description.target_hidden,
            "num_target_layers": description.target_layers,
            "use_ordered_embeddings": description.centroids is not None,
            "tie_word_embeddings": True,
            "text_config": _text_config(description, body, target),
        }
        if centroids := description.centroids:
            tensors |= stored(weights, _CENTROIDS)
            tensors[_CENTROIDS[TOKEN_ORDER]] = weights[TOKEN_ORDER].flatten()
            config |= {"num_centroids": centroids.count, "centroid_intermediate_top_k": centroids.top_k}
        return config, tensors


def _read_layer_types(text: ConfigReader) -> tuple[str, ...]:
    switches = ("enable_moe_block", "use_double_wide_mlp", "attention_bias")
    has_other_layers = (
        any(text.boolean(name, False) for name in switches)
        or text.string("hidden_activation", _ACTIVATION) != _ACTIVATION
        or text.integer("hidden_size_per_layer_input", 0)
    )
    if has_other_layers:
        raise OutriderError(
            "these layers are not those of Gemma 4's assistants; use a draft head without MoE,"
            f" double-wide MLP, attention bias and per-layer inputs, and with {_ACTIVATION}"
        )
    num_layers = text.size("num_hidden_layers")
    layer_types = text.strings("layer_types")
    if len(layer_types) != num_layers or not set(layer_types) <= {_FULL, _SLIDING}:
        raise OutriderError(
            f"layer_types is {', '.join(layer_types)}, but there are {num_layers} layers of type"
            f" {_FULL} or {_SLIDING}; correct config.json"
        )
    return layer_types


def _read_body(text: ConfigReader, num_layers: int, shared: SharedKV) -> Body:
    """Return the decoder layers, whose queries fit the keys of `shared`."""
    return Body(
        layers=num_layers,
        hidden=text.size("hidden_size"),
        heads=text.size("num_attention_heads"),
        key_heads=shared.key_heads,
        dim=shared.dim,
        ffn=text.size("intermediate_size"),
        epsilon=text.number("rms_norm_eps", 1e-6),
        head_norms=True,
        gemma=True,
    )


def _clusters(order: torch.Tensor, centroids: Centroids) -> torch.Tensor:
    """Return the tokens [C, V / C] of each cluster."""
    if order.numel() % centroids.count:
        raise OutriderError(
            f"its {order.numel()} tokens do not divide into {centroids.count} clusters of equal"
            " size; copy the draft head again"
        )
    return order.long().view(centroids.count, -1)


def _layer_types(description: HeadDescription) -> tuple[str, ...]:
    """Return the type of each layer, as Gemma 4 names them."""
    return tuple(_SLIDING if shared.window else _FULL for shared in description.shared_kv)


def _reasons(description: HeadDescription, body: Body, target: TargetInfo | None) -> dict[str, bool]:
    """Return why the format cannot represent a draft head."""
    by_type = dict(zip(_layer_types(description), description.shared_kv, strict=True))
    standard_rope = all(
        shared.rope is None or shared.rope.scaling is Scaling.PROPORTIONAL for shared in description.shared_kv
    )
    standard_fusion = description.input_fusion == InputFusion(at=FusionPoint.PROJECTION, norms=False)
    attends_elsewhere = any(shared.layer != _last_layer(target, layer_type) for layer_type, shared in by_type.items())
    return {
        "has other layers than Gemma 4": not (body.gemma and body.head_norms),
        "combines embeddings and states with norms or in another order, or has no final norm or LM head": not (
            standard_fusion and description.own_lm_head and description.final_norm
        ),
        "has a reduced draft vocabulary": bool(description.draft_vocab),
        "has layers of one type that attend to different keys and values": (
            len(set(description.shared_kv)) > len(by_type)
        ),
        "has rotary positions that Gemma 4 does not have": not standard_rope,
        "attends to other layers than the target's last ones": attends_elsewhere,
    }


def _text_config(description: HeadDescription, body: Body, target: TargetInfo | None) -> Config:
    """Return the nested config of the layers."""
    by_type = dict(zip(_layer_types(description), description.shared_kv, strict=True))
    full = by_type.get(_FULL, description.shared_kv[0])
    sliding = by_type.get(_SLIDING, description.shared_kv[0])
    return {
        "model_type": "gemma4_text",
        "vocab_size": description.vocab,
        "hidden_size": body.hidden,
        "intermediate_size": body.ffn,
        "num_hidden_layers": body.layers,
        "num_kv_shared_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": sliding.key_heads,
        "num_global_key_value_heads": full.key_heads,
        "attention_k_eq_v": full.key_heads != sliding.key_heads,
        "head_dim": sliding.dim,
        "global_head_dim": full.dim,
        "hidden_activation": _ACTIVATION,
        "rms_norm_eps": body.epsilon,
        "layer_types": list(_layer_types(description)),
        "sliding_window": max(sliding.window - 1, 1),
        "rope_parameters": {_SLIDING: _written_rope(sliding), _FULL: _written_rope(full)},
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": (target.context if target else None) or _DEFAULT_CONTEXT,
    }


def _shared_kv(text: ConfigReader, i: int, layer_type: str, head_dim: int, target: TargetInfo | None) -> SharedKV:
    """Return the keys and values that layer `i` attends to."""
    ropes = text.object("rope_parameters")
    if layer_type not in ropes:
        raise OutriderError(f"text_config has no rope_parameters for {layer_type}; copy the draft head again")
    theta, rope, rotary = rope_of(ropes.object(layer_type), text)
    key_heads = text.size("num_key_value_heads")
    if layer_type == _FULL and text.boolean("attention_k_eq_v", False):
        key_heads = text.size("num_global_key_value_heads", key_heads)
    key_heads = text.object("per_layer_config").object(str(i)).size("num_key_value_heads", key_heads)
    window = text.size("sliding_window") + 1 if layer_type == _SLIDING else 0
    return SharedKV(
        layer=_last_layer(target, layer_type),
        key_heads=key_heads,
        dim=head_dim,
        theta=theta,
        rope=rope,
        rotary=rotary,
        window=window,
    )


def _last_layer(target: TargetInfo | None, layer_type: str) -> int:
    if target is None or not target.layer_types:
        raise TargetRequired(
            "the layers that it attends to depend on its target, a Gemma 4 model; give the target with --target DIR"
        )
    layers = [i for i, kind in enumerate(target.layer_types) if kind == layer_type]
    if not layers:
        raise OutriderError(
            f"it attends to a layer of type {layer_type}, which the given target does not have; give its own target"
        )
    return layers[-1]


def _written_rope(shared: SharedKV) -> Config:
    """Return the value of `rope_parameters` for a type of layers."""
    if shared.rope is None:
        return {"rope_type": "default", "rope_theta": shared.theta}
    return {
        "rope_type": str(shared.rope.scaling),
        "rope_theta": shared.theta,
        "partial_rotary_factor": shared.rotary,
        "factor": shared.rope.factor,
    }
