"""Gemma 4's assistants: Gemma's own layers, of queries alone, over the keys and values of their target.

A layer looks at the target's last layer of its own kind, full or sliding: which one that is, the target tells. Where a
later layer of the target reuses an earlier one's keys, our cache holds them for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import (
    AuxStates,
    Body,
    FusionPoint,
    HeadDescription,
    InputFusion,
    Kind,
    Scaling,
    SharedKV,
)
from outrider.heads.formats.base import Config, Source, TargetInfo, Tensors, UnusedTensors, refuse
from outrider.heads.formats.llama import layer_tensors, rope_of, take_layer

_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "project.weight": "pre_projection.weight",
        "back.weight": "post_projection.weight",
        "norm.weight": "model.norm.weight",
    }
)
_TABLE = "model.embed_tokens.weight"  # which is its output layer; embeddings it takes from its target
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACT = "gelu_pytorch_tanh"
_POSITIONS = 131072  # as max_position_embeddings where nobody knows better


class Gemma4Assistant:
    """A config around that of Gemma's layers. A window of w is read as transformers does: w + 1 entries are seen."""

    name, title, file = "gemma4-assistant", "Gemma 4's assistants (Google, transformers, vLLM)", "model.safetensors"

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return {"pre_projection.weight", "post_projection.weight"} <= set(names)

    def module(self, names: Collection[str]) -> str | None:
        return None

    def read(self, source: Source) -> tuple[HeadDescription, Tensors]:
        config, text = source.config, source.config.table("text_config")
        layers, kinds = text.size("num_hidden_layers"), text.texts("layer_types")
        odd = [name for name in ("enable_moe_block", "use_double_wide_mlp", "attention_bias") if text.flag(name, False)]
        if odd or text.text("hidden_activation", _ACT) != _ACT or text.whole("hidden_size_per_layer_input", 0):
            raise OutriderError("its layers are not those of Gemma 4's assistants as they are known here")
        if len(kinds) != layers or not set(kinds) <= {_FULL, _SLIDING}:
            raise OutriderError(f"its layer_types are {', '.join(kinds)}, and it has {layers} layers; mend config.json")
        weights = {ours: source.take(theirs) for ours, theirs in _NAMES.items()}
        weights["head.weight"] = source.take("lm_head.weight" if "lm_head.weight" in source else _TABLE)
        source.ignore([_TABLE], "its output layer once more")
        clusters = [name for name in source.names if name.startswith("masked_embedding.")]
        source.ignore(clusters, "all tokens are scored here, and not those of the likeliest clusters alone")
        for i in range(layers):
            weights |= take_layer(source, f"model.layers.{i}.", f"layers.{i}.")
        views = tuple(
            _view(text, i, kinds[i], len(weights[f"layers.{i}.self_attn.q_norm.weight"]), source.partner)
            for i in range(layers)
        )
        count = source.target_layers()
        description = HeadDescription(
            kind=Kind.KV_SHARING,
            target_hidden=config.size("backbone_hidden_size"),
            target_layers=count,
            vocab=text.size("vocab_size"),
            aux_states=AuxStates(layers=(count - 1,), final=True),
            input_fusion=InputFusion(at=FusionPoint.PROJECTION, norms=False),
            body=Body(
                layers=layers,
                hidden=text.size("hidden_size"),
                heads=text.size("num_attention_heads"),
                key_heads=views[-1].key_heads,
                dim=views[-1].dim,
                ffn=text.size("intermediate_size"),
                epsilon=text.real("rms_norm_eps", 1e-6),
                head_norms=True,
                gemma=True,
            ),
            shared_kv=views,
            own_lm_head=True,
        )
        return description, weights

    def write(
        self, description: HeadDescription, weights: Tensors, partner: TargetInfo | None
    ) -> tuple[Config, Tensors]:
        it, body = description, description.body
        refuse(self.name, {f"is of kind {it.kind}": not it.shared_kv})
        assert body is not None
        refuse(self.name, _unfit(it, body, partner))
        tensors = {theirs: weights[ours] for ours, theirs in _NAMES.items()} | {_TABLE: weights["head.weight"]}
        for i in range(body.layers):
            tensors |= layer_tensors(weights, i, f"model.layers.{i}.")
        config = {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": it.target_hidden,
            "num_target_layers": it.target_layers,
            "use_ordered_embeddings": False,
            "tie_word_embeddings": True,
        }
        return {**config, "text_config": _written_text(it, body, partner)}, tensors


def _kinds(it: HeadDescription) -> tuple[str, ...]:
    """What Gemma 4 calls each layer."""
    return tuple(_SLIDING if view.window else _FULL for view in it.shared_kv)


def _unfit(it: HeadDescription, body: Body, partner: TargetInfo | None) -> dict[str, bool]:
    """Why Gemma 4's assistants cannot be what this is."""
    held = dict(zip(_kinds(it), it.shared_kv, strict=True))
    scaled = [view.rope is None or view.rope.scaling is Scaling.PROPORTIONAL for view in it.shared_kv]
    plain = it.input_fusion == InputFusion(at=FusionPoint.PROJECTION, norms=False) and it.own_lm_head and it.final_norm
    return {
        "has other layers than Gemma 4's": not (body.gemma and body.head_norms),
        "joins with norms or another order, or shares the target's output layer": not plain,
        "guesses a part of the vocabulary": bool(it.draft_vocab),
        "sees layers of one kind in more than one way": len(set(it.shared_kv)) > len(held),
        "has rotary positions that Gemma 4 has not": not all(scaled),
        "looks at other layers than the target's last ones": any(
            view.layer != _last(partner, kind) for kind, view in held.items()
        ),
    }


def _written_text(it: HeadDescription, body: Body, partner: TargetInfo | None) -> Config:
    """The table of the config that describes its layers."""
    held = dict(zip(_kinds(it), it.shared_kv, strict=True))
    full, near = held.get(_FULL, it.shared_kv[0]), held.get(_SLIDING, it.shared_kv[0])
    return {
        "model_type": "gemma4_text",
        "vocab_size": it.vocab,
        "hidden_size": body.hidden,
        "intermediate_size": body.ffn,
        "num_hidden_layers": body.layers,
        "num_kv_shared_layers": body.layers,
        "num_attention_heads": body.heads,
        "num_key_value_heads": near.key_heads,
        "num_global_key_value_heads": full.key_heads,
        "attention_k_eq_v": full.key_heads != near.key_heads,
        "head_dim": near.dim,
        "global_head_dim": full.dim,
        "hidden_activation": _ACT,
        "rms_norm_eps": body.epsilon,
        "layer_types": list(_kinds(it)),
        "sliding_window": max(near.window - 1, 1),
        "rope_parameters": {kind: _written(view) for kind, view in ((_SLIDING, near), (_FULL, full))},
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "max_position_embeddings": (partner.context if partner else None) or _POSITIONS,
    }


def _view(text: Settings, i: int, kind: str, dim: int, partner: TargetInfo | None) -> SharedKV:
    ropes = text.table("rope_parameters")
    if kind not in ropes:
        raise OutriderError(f"its text_config has no rope_parameters for {kind}; copy the draft again")
    theta, rope, rotary = rope_of(ropes.table(kind), text)
    heads = text.size("num_key_value_heads")
    if kind == _FULL and text.flag("attention_k_eq_v", False):
        heads = text.size("num_global_key_value_heads", heads)
    heads = text.table("per_layer_config").table(str(i)).size("num_key_value_heads", heads)
    window = text.size("sliding_window") + 1 if kind == _SLIDING else 0
    turned = {"theta": theta, "rotary": rotary}
    return SharedKV(layer=_last(partner, kind), key_heads=heads, dim=dim, rope=rope, window=window, **turned)


def _last(partner: TargetInfo | None, kind: str) -> int:
    """The target's last layer of this kind."""
    if partner is None or not partner.kinds:
        raise UnusedTensors("which layers it looks at follows from its target, Gemma 4; give that with --target DIR")
    found = [i for i, each in enumerate(partner.kinds) if each == kind]
    if not found:
        raise OutriderError(f"it looks at layers of {kind}, and the target given has none; give the one it belongs to")
    return found[-1]


def _written(view: SharedKV) -> Config:
    if view.rope is None:
        return {"rope_type": "default", "rope_theta": view.theta}
    return {
        "rope_type": str(view.rope.scaling),
        "rope_theta": view.theta,
        "partial_rotary_factor": view.rotary,
        "factor": view.rope.factor,
    }
