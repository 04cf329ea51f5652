"""The dimensions of a model that the native kernels run, read from a model of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import UnsupportedModel
from outrider.native.abi import MAX_HEAD_DIM, MAX_QUERIES_PER_KEY_HEAD
from outrider.native.experts import Routing
from outrider.native.support import FAMILIES, Family

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of gates
_NO_ROTARY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The rotary embedding of queries and keys. Layers may have different tables."""

    frequency: torch.Tensor  # [tables, R / 2] float32; R leading dimensions of a head are rotated
    scale: torch.Tensor  # [tables] float32, factor of sine and cosine
    table: tuple[int, ...]  # [layers]; -1: no rotary embedding

    @classmethod
    def of(cls, body: Any, layer_types: tuple[str, ...]) -> Rotary:
        """Read the rotary embedding from the module with the decoder layers, which have these types."""
        module = body.rotary_emb
        if hasattr(module, "inv_freq"):
            prefixes = {"": 0}
            table = [0] * len(layer_types)
        else:
            prefixes = {f"{name}_": i for i, name in enumerate(sorted(set(layer_types)))}
            table = [prefixes[f"{name}_"] for name in layer_types]
        for i, layer in enumerate(body.layers):
            if not getattr(layer.self_attn, "use_rope", True):
                table[i] = _NO_ROTARY
        return cls(
            frequency=torch.stack([getattr(module, f"{prefix}inv_freq").float() for prefix in prefixes]),
            scale=torch.tensor([getattr(module, f"{prefix}attention_scaling") for prefix in prefixes]).float(),
            table=tuple(table),
        )

    @property
    def dim(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return 2 * self.frequency.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The dimensions of a model."""

    family: Family
    layers: int
    hidden: int
    heads: int
    key_heads: int
    dim: int  # of a head
    ffn: int  # of an MLP
    epsilon: float
    scale: float
    rotary: Rotary
    windows: tuple[int, ...]  # [layers]; 0: full attention
    gelu: bool  # whether gates use GELU instead of SiLU
    table_scale: float  # factor of the embedding table
    embedding_scale: float  # factor of embeddings that is not one of the table: draft heads read them without it
    residual_scale: float  # factor of the outputs of attention and MLP
    logit_divisor: float
    score_cap: float  # limits of attention scores and of logits; 0: none
    logit_cap: float
    routing: Routing | None  # of the experts, if there are any

    @classmethod
    def of(cls, config: Any, body: Any) -> Dimensions:
        """Read the dimensions from a text configuration and the module of transformers with the decoder layers.

        Raises:
            UnsupportedModel: the kernels do not support this model.
        """
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(f"{config.model_type}: the native kernels support {', '.join(sorted(FAMILIES))}")
        attention = body.layers[0].self_attn
        layer_types = _layer_types(config)
        window = getattr(config, "sliding_window", None) or 0
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        shape = cls(
            family=FAMILIES[config.model_type],
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            dim=attention.head_dim,
            ffn=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
            rotary=Rotary.of(body, layer_types),
            windows=tuple(window if layer_type == "sliding_attention" else 0 for layer_type in layer_types),
            gelu=activation == "gelu_pytorch_tanh",
            table_scale=float(getattr(body.embed_tokens, "embed_scale", 1.0)),
            embedding_scale=getattr(config, "embedding_multiplier", 1.0),
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            logit_divisor=getattr(config, "logits_scaling", 1.0),
            score_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            routing=Routing.of(config, body),
        )
        shape._check(config, activation)
        return shape

    def _check(self, config: Any, activation: str) -> None:
        """Raise UnsupportedModel if the kernels do not support these dimensions."""
        unaligned = any(size % 16 for size in (self.hidden, self.dim, *self.mlp_sizes))
        if unaligned or self.dim > MAX_HEAD_DIM or activation not in _ACTIVATIONS or getattr(config, "mlp_bias", False):
            raise UnsupportedModel(
                f"{config.model_type}: the native kernels need sizes that are multiples of 16, heads of at most"
                f" {MAX_HEAD_DIM}, and MLPs without bias with {' or '.join(_ACTIVATIONS)}"
            )
        if self.heads > MAX_QUERIES_PER_KEY_HEAD * self.key_heads:
            raise UnsupportedModel(
                f"{config.model_type}: the native kernels support at most {MAX_QUERIES_PER_KEY_HEAD} query heads per"
                f" key head; this model has {self.heads} for {self.key_heads}"
            )

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The sizes of the MLPs and of the experts that the layers have."""
        if self.routing is None:
            return (self.ffn,)
        return (self.routing.ffn,) if len(self.routing.layers) == self.layers else (self.ffn, self.routing.ffn)


def _layer_types(config: Any) -> tuple[str, ...]:
    """Return the type of attention of each layer."""
    default_type = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    layer_types = tuple(getattr(config, "layer_types", None) or (default_type,) * config.num_hidden_layers)
    if unsupported := sorted(set(layer_types) - {"sliding_attention", "full_attention"}):
        raise UnsupportedModel(
            f"{config.model_type}: the native kernels do not support layers of type {', '.join(unsupported)}"
        )
    return layer_types
