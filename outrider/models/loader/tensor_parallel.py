"""Check that a model can be split over the ranks of tensor parallelism, from its config."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.loader.model_class import causal_model_class

_KEY_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "query_key_value")  # their outputs are key/value heads


def check_plan(config: Any, size: int, *, recurrent: bool) -> None:
    """Check that transformers can split a model over `size` ranks, and that Outrider's attention can run a part of it.

    Raises:
        UnsupportedModel: the architecture has no plan, or other layers than attention.
        OutriderError: the ranks do not divide the heads, or a package is missing.
    """
    model_type = config.model_type
    remedy = f"use tp 1 for {model_type}, or another model"
    if getattr(config, "is_encoder_decoder", False) or recurrent:
        kind = "recurrent layers" if recurrent else "an encoder"
        raise UnsupportedModel(f"{model_type} has {kind}, which Outrider does not split over ranks; {remedy}")
    plan = tensor_parallel_plan(config)
    if not plan:
        raise UnsupportedModel(
            f"{model_type} has no plan for tensor parallelism in this version of transformers; {remedy}"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False):
        raise UnsupportedModel(
            f"{model_type} has layers of different sizes, which Outrider does not split over ranks; {remedy}"
        )
    counts = {"attention heads": getattr(text, "num_attention_heads", None)}
    if any(name.rpartition(".")[2] in _KEY_PROJECTIONS for name in plan):
        counts["key/value heads"] = getattr(text, "num_key_value_heads", None)
    for what, count in counts.items():
        if isinstance(count, int) and count % size:
            raise OutriderError(
                f"tp {size} does not divide the {count} {what} of this {model_type}; use a tp that does"
            )
    if find_spec("accelerate") is None:  # transformers places the parts of a model with it
        raise OutriderError('tensor parallelism needs accelerate; run pip install "outrider[tp]"')


def tensor_parallel_plan(config: Any) -> Mapping[str, str]:
    """Return how transformers splits the modules of a model, by name; empty if it has no plan."""
    text = config.get_text_config(decoder=True)
    plan = dict(getattr(text, "base_model_tp_plan", None) or getattr(config, "base_model_tp_plan", None) or {})
    if plan:
        plan |= getattr(causal_model_class(config), "_tp_plan", None) or {}
    return plan
