"""The weights that a model of the native kernels has, from its configuration."""

from typing import Any

from outrider.models.native.dimensions import Dimensions

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(config: Any) -> Shapes:
    """Return the shape of each weight of a text model, by its name in the `state_dict` of transformers.

    Raises:
        UnsupportedModel: the kernels do not support this model.
    """
    shape = Dimensions.of(config)
    table = (config.vocab_size, shape.hidden)
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (shape.hidden,), "lm_head.weight": table}
    common = _attention_shapes(config, shape)
    routing = shape.routing
    for i in range(shape.layers):
        routed = routing is not None and i in routing.layers
        layer = common | (_expert_shapes(shape) if routed else _mlp_shapes(shape))
        shapes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return shapes


def _attention_shapes(config: Any, shape: Dimensions) -> Shapes:
    """Return the weights of the attention and the norms of a layer."""
    family, hidden = shape.family, shape.hidden
    queries, keys = shape.heads * shape.dim, shape.key_heads * shape.dim
    bias = getattr(config, "attention_bias", False)
    rows = (queries, keys, keys) if len(family.attention) > 1 else (queries + 2 * keys,)
    layer: Shapes = {}
    for part, size in zip(family.attention, rows, strict=True):
        layer[f"{part}.weight"] = (size, hidden)
        if bias or family.biases:
            layer[f"{part}.bias"] = (size,)
    layer["self_attn.o_proj.weight"] = (hidden, queries)
    if getattr(config, "attention_out_bias", bias):
        layer["self_attn.o_proj.bias"] = (hidden,)
    norms = (family.attention_norm, family.attention_post_norm, family.mlp_norm, family.mlp_post_norm)
    layer |= {f"{norm}.weight": (hidden,) for norm in norms if norm is not None}
    if family.head_norms:
        layer["self_attn.q_norm.weight"] = (queries if family.wide_norms else shape.dim,)
        layer["self_attn.k_norm.weight"] = (keys if family.wide_norms else shape.dim,)
    return layer


def _mlp_shapes(shape: Dimensions) -> Shapes:
    parts = shape.family.mlp
    layer: Shapes = {f"{part}.weight": (2 * shape.ffn // len(parts), shape.hidden) for part in parts}
    return layer | {"mlp.down_proj.weight": (shape.hidden, shape.ffn)}


def _expert_shapes(shape: Dimensions) -> Shapes:
    routing = shape.routing
    assert routing is not None
    return {
        "mlp.gate.weight": (routing.experts, shape.hidden),
        "mlp.experts.gate_up_proj": (routing.experts, 2 * routing.ffn, shape.hidden),
        "mlp.experts.down_proj": (routing.experts, shape.hidden, routing.ffn),
    }
