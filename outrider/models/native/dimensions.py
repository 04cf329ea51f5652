"""The dimensions of a model that the native kernels run, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from outrider.errors import UnsupportedModel
from outrider.models.native.rotary import Rotary
from outrider.models.native.routing import Routing
from outrider.models.native.support import (
    ACTIVATIONS,
    FAMILIES,
    MAX_HEAD_DIM,
    MAX_QUERIES_PER_KEY_HEAD,
    Family,
)


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
    def of(cls, config: Any) -> Dimensions:
        """Read the dimensions from a text configuration.

        Raises:
            UnsupportedModel: the kernels do not support this model.
        """
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(f"{config.model_type}: the native kernels support {', '.join(sorted(FAMILIES))}")
        family = FAMILIES[config.model_type]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layer_types = _layer_types(config)
        window = getattr(config, "sliding_window", None) or 0
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        shape = cls(
            family=family,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            dim=dim,
            ffn=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            scale=_score_scale(config, dim),
            rotary=Rotary.of(config, layer_types, dim),
            windows=tuple(window if layer_type == "sliding_attention" else 0 for layer_type in layer_types),
            gelu=activation == "gelu_pytorch_tanh",
            table_scale=float(torch.tensor(config.hidden_size**0.5)) if family.scaled_table else 1.0,
            embedding_scale=getattr(config, "embedding_multiplier", 1.0),
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            logit_divisor=getattr(config, "logits_scaling", 1.0),
            score_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            routing=Routing.of(config),
        )
        shape._check(config, activation)
        return shape

    def _check(self, config: Any, activation: str) -> None:
        """Raise UnsupportedModel if the kernels do not support these dimensions."""
        unaligned = any(size % 16 for size in (self.hidden, self.dim, *self.mlp_sizes))
        if unaligned or self.dim > MAX_HEAD_DIM or activation not in ACTIVATIONS or getattr(config, "mlp_bias", False):
            raise UnsupportedModel(
                f"{config.model_type}: the native kernels need sizes that are multiples of 16,"
                f" heads of at most {MAX_HEAD_DIM}, and MLPs without bias with"
                f" {' or '.join(ACTIVATIONS)}"
            )
        if self.heads > MAX_QUERIES_PER_KEY_HEAD * self.key_heads:
            raise UnsupportedModel(
                f"{config.model_type}: the native kernels support at most"
                f" {MAX_QUERIES_PER_KEY_HEAD} query heads per key head; this model has {self.heads}"
                f" for {self.key_heads}"
            )

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The sizes of the MLPs and of the experts that the layers have."""
        if self.routing is None:
            return (self.ffn,)
        return (self.routing.ffn,) if len(self.routing.layers) == self.layers else (self.ffn, self.routing.ffn)


def _score_scale(config: Any, dim: int) -> float:
    """Return the factor of attention scores."""
    if (multiplier := getattr(config, "attention_multiplier", None)) is not None:  # Granite
        return float(multiplier)
    scalar = getattr(config, "query_pre_attn_scalar", None) or dim  # Gemma 2 and 3
    return float(scalar**-0.5)


def _layer_types(config: Any) -> tuple[str, ...]:
    default_type = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    layer_types = tuple(getattr(config, "layer_types", None) or (default_type,) * config.num_hidden_layers)
    if unsupported := sorted(set(layer_types) - {"sliding_attention", "full_attention"}):
        raise UnsupportedModel(
            f"{config.model_type}: the native kernels do not support layers of type {', '.join(unsupported)}"
        )
    return layer_types
