"""How the layers of a model on the native kernels choose experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import UnsupportedModel
from outrider.models.native.support import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the layers of a model choose experts."""

    experts: int  # of a layer
    top: int  # experts of a token
    ffn: int  # of an expert
    normalized: bool  # whether the weights of a token's experts add up to 1
    layers: frozenset[int]  # with experts; the others have one MLP

    @classmethod
    def of(cls, config: Any) -> Routing | None:
        """Read the sizes of experts from a text configuration.

        Returns:
            The sizes; None if no layer has experts.

        Raises:
            UnsupportedModel: the kernels do not support these experts.
        """
        if not FAMILIES[config.model_type].routed:
            return None
        if getattr(config, "clip_qkv", None) is not None:
            raise UnsupportedModel(f"{config.model_type}: the native kernels do not support clip_qkv")
        layers = _routed_layers(config)
        if not layers:
            return None
        experts = config.num_local_experts if config.model_type == "mixtral" else config.num_experts
        top = config.num_experts_per_tok
        if top > experts:
            raise UnsupportedModel(
                f"{config.model_type}: num_experts_per_tok is {top}, but a layer has {experts} experts"
            )
        return cls(
            experts=experts,
            top=top,
            ffn=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
            normalized=bool(getattr(config, "norm_topk_prob", True)),
            layers=layers,
        )


def _routed_layers(config: Any) -> frozenset[int]:
    """Return the layers with experts. Qwen3 names layers without, and the distance of layers with experts."""
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = getattr(config, "mlp_only_layers", None) or ()
    layers = range(config.num_hidden_layers)
    return frozenset(i for i in layers if (i + 1) % step == 0 and i not in dense)
