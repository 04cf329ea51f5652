"""Find the class with which transformers runs a causal language model."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING


def causal_model_class(config: Any) -> Any:
    """Return the model class of a configuration; None if transformers has no causal language model for it."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    classes = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes
