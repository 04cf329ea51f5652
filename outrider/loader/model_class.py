"""Find the class with which transformers runs a causal language model."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING


def causal_model_class(config: Any) -> Any:
    """Return the model class of a configuration; None if transformers has no causal language model for it."""
    return concrete_class(MODEL_FOR_CAUSAL_LM_MAPPING, config)


def concrete_class(mapping: Any, config: Any) -> Any:
    """Return the class of a configuration in a mapping of transformers; None if it has none."""
    if type(config) not in mapping:
        return None
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes
