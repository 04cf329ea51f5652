"""The weights of a decoder that draft heads share (see `WeightSharer`)."""

from typing import Any

import torch

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError

_FINAL_NORMS = ("final_layer_norm", "layer_norm", "norm")  # names in a decoder of pre-norm layers


def shared_weights(model: Any, layers: torch.nn.ModuleList) -> SharedWeights:
    """Return the embedding, the factors of the final norm and the LM head of a decoder with these layers.

    The states that heads read are the outputs of the whole decoder, after its final norm if it has
    one. The factor between them and the LM head, which T5 has, is in the LM head.

    Raises:
        OutriderError: the LM head has a bias.
    """
    decoder = model.get_decoder()
    config = model.config.get_text_config(decoder=True)
    head = model.get_output_embeddings()
    biases = (getattr(head, "bias", None), getattr(model, "final_logits_bias", None))
    if any(bias is not None and bool(bias.any()) for bias in biases):
        raise OutriderError(
            f"draft heads do not support this {model.config.model_type} model: its LM head has a"
            " bias; use ngram, suffix or draft:DIR"
        )
    embedding = decoder.get_input_embeddings()
    head_scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0
    norm = _final_norm(decoder, layers)
    epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
    return SharedWeights(
        embedding=embedding.weight * _embedding_scale(decoder, embedding),
        head=head.weight if head_scale == 1 else head.weight * head_scale,
        norm=norm.weight + 1 if "Gemma" in type(norm).__name__ else norm.weight,
        epsilon=float(epsilon),
        normed_states=True,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _final_norm(decoder: Any, layers: Any) -> Any:
    """Return the last norm before the LM head."""
    for name in _FINAL_NORMS:
        if hasattr(decoder, name):
            return getattr(decoder, name)
    return layers[-1].final_layer_norm  # of post-norm layers


def _embedding_scale(decoder: Any, embedding: Any) -> float:
    """Return the factor between the rows of the embedding and the input of the first layer."""
    if "Gemma" in type(decoder).__name__:
        return float(decoder.config.hidden_size**0.5)
    scale = getattr(embedding, "embed_scale", None) or getattr(decoder, "embed_scale", None)
    return 1.0 if scale is None else float(scale)
