"""Find the class with which transformers runs a language model."""

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

from outrider.models.loader.speech import SPEECH


def auto_class(config: Any) -> Any:
    """Return the class of transformers that makes the model of a configuration, or loads it from a folder."""
    if config.model_type in SPEECH:
        return AutoModelForSpeechSeq2Seq
    if getattr(config, "is_encoder_decoder", False):
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForMultimodalLM


def causal_model_class(config: Any) -> Any:
    """Return the model class of a configuration; None if transformers has no causal language model for it.

    The text part of a multimodal model is one.
    """
    causal = concrete_class(MODEL_FOR_CAUSAL_LM_MAPPING, config)
    return causal or concrete_class(MODEL_FOR_MULTIMODAL_LM_MAPPING, config)


def concrete_class(mapping: Any, config: Any) -> Any:
    """Return the class of a configuration in a mapping of transformers; None if it has none."""
    if type(config) not in mapping:
        return None
    classes = mapping[type(config)]
    return classes[0] if isinstance(classes, tuple) else classes
