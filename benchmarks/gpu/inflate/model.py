"""Inflates a small trained Llama to the dimensions of a large one: the cost of the large, the text of the small.

The gain of speculation depends on the cost of the models and on how often they agree. Random weights of the right size
have the cost without the agreement. A model that is inflated here has both, and needs no download.

The method is Net2Net (Chen et al. 2016, arXiv:1511.05641) for a whole transformer. Every unit is *copied*. A weight
that multiplies c copies is divided into c shares, which are powers of two and add up to 1.

- Residual channels are copied so that their mean square is that of the small model times a known factor (`Stream`).
  Weights after a norm are multiplied by the root of this factor, and eps is scaled with it.
- MLP neurons, value dimensions, query heads and key-value heads are copied. down_proj and o_proj have the shares.
- Rotary pair i of a head of d goes to pair i D/d of a head of D, which rotates at the same frequency. Queries are
  multiplied by sqrt(D/d), because attention divides by more. Queries of other pairs are random, and their keys are
  zero.
- Added layers are random and add zero: neighboring neurons, and neighboring value dimensions, are equal pairs, and
  the output weights of a pair are opposite.
- Added tokens are copies of real ones with much lower logits: one channel has the same constant for every token, and
  only the LM head rows of added tokens multiply it. The square of the constant is subtracted from eps.

In exact arithmetic the real tokens have the logits of the small model. In floating point, copies and powers of two are
exact, and weights in the precision of the checkpoint are copied without rounding. Two things round: the norm's factor
and sqrt(D/d) if they are not powers of two, to a fraction of an ulp (`Stream.read`); and the sums that cancel in added
layers, as much as any other sum.

Only these weights are zero: the keys of added rotary pairs, because queries must not match them at any distance; the
weights of spare channels, of which there are three at most, because they would change the norm of the residual; and the
output weights of the last neuron of an added layer if their number is odd. Only the added tokens use the constant
channel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from inflate.layers import Read, WeightBuilder, constant
from inflate.wiring import make_stream
from outrider.errors import OutriderError

_PER_FREQUENCY = frozenset({"default", "linear", "llama3"})  # rotary types that treat each frequency separately
_CONFIG_KEYS = MappingProxyType(
    {
        "hidden": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Dimensions of the large model. None: that of the small model."""

    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    untie: bool = False  # give a model with tied embeddings a separate LM head


# Llama 3, with the small model's vocabulary. The vocabulary of Llama 3 has 128256 tokens.
PRESETS: Mapping[str, Dims] = MappingProxyType(
    {
        "8b": Dims(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, untie=True),
        "1b": Dims(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192),
    }
)


def inflate(
    model: Any, dims: Dims, *, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Return configuration and weights of a larger LlamaForCausalLM with the logits of `model`.

    Raises:
        OutriderError: the dimensions cannot hold the small model; the message says which to change.
    """
    config = inflate_config(model.config, dims, dtype=dtype)
    return config, dict(inflate_tensors(model.config, config, model.state_dict().__getitem__, seed=seed))


def inflate_config(config: Any, dims: Dims, *, dtype: torch.dtype | None = None) -> LlamaConfig:
    """Return the configuration of the large model. Without `dtype`, it has that of the small model.

    Raises:
        OutriderError: the dimensions cannot hold the small model; the message says which to change.
    """
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise OutriderError("only a Llama without biases can be inflated; give a model of model_type llama")
    sizes = {}
    for name, key in _CONFIG_KEYS.items():
        size = getattr(dims, name)
        sizes[key] = getattr(config, key) if size is None else size
    _check_sizes(config, sizes)
    _check_heads(config, sizes)
    has_added_tokens = sizes["vocab_size"] > config.vocab_size
    tied = config.tie_word_embeddings and not dims.untie
    if has_added_tokens and tied:
        raise OutriderError("a larger vocabulary needs a separate LM head; give untie, or --untie")
    stream = make_stream(config.hidden_size, sizes["hidden_size"], constant=has_added_tokens)
    squares = stream.energy * config.hidden_size * config.rms_norm_eps - constant(config, stream) ** 2
    others = {
        "rms_norm_eps": squares / sizes["hidden_size"],
        "tie_word_embeddings": tied,
        "dtype": dtype or config.dtype or torch.float32,
    }
    return LlamaConfig.from_dict(config.to_dict() | sizes | others)


def inflate_tensors(small: Any, large: Any, read: Read, *, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights, one at a time and layer by layer, in the precision of the large configuration.

    Args:
        small: configuration of the trained model.
        large: result of `inflate_config`.
        read: returns a weight of the trained model by its name.
        seed: of random weights.
    """
    builder = WeightBuilder(small=small, large=large, read=read, seed=seed)
    num_small = small.num_hidden_layers
    num_large = large.num_hidden_layers
    # The copied layers are spread evenly among the added ones.
    sources = {(2 * i + 1) * num_large // (2 * num_small): i for i in range(num_small)}
    yield "model.embed_tokens.weight", builder.embedding()
    for layer in range(num_large):
        prefix = f"model.layers.{layer}."
        if layer in sources:
            weights = builder.copied_layer(f"model.layers.{sources[layer]}.")
        else:
            weights = builder.identity_layer(prefix)
        yield from ((prefix + name, weight) for name, weight in weights)
    yield "model.norm.weight", builder.last_norm()
    if not large.tie_word_embeddings:
        yield "lm_head.weight", builder.head()


def _check_sizes(small: Any, sizes: Mapping[str, int]) -> None:
    for name, key in _CONFIG_KEYS.items():
        smallest = getattr(small, key)
        if sizes[key] < smallest:
            raise OutriderError(f"{name} {sizes[key]} is less than the small model's; give {smallest} or more")
    if sizes["head_dim"] % small.head_dim:
        raise OutriderError(
            f"heads of {sizes['head_dim']} lack the rotary frequencies of heads of {small.head_dim}; give a multiple of"
            f" {small.head_dim} as head_dim"
        )
    rope_type = small.rope_parameters["rope_type"]
    if sizes["head_dim"] > small.head_dim and rope_type not in _PER_FREQUENCY:
        raise OutriderError(f"rotary type {rope_type} depends on the size of heads; leave head_dim at {small.head_dim}")


def _check_heads(small: Any, sizes: Mapping[str, int]) -> None:
    hidden = sizes["hidden_size"]
    heads = sizes["num_attention_heads"]
    kv_heads = sizes["num_key_value_heads"]
    if hidden % heads or heads % kv_heads:
        raise OutriderError(
            f"{kv_heads} kv_heads must divide {heads} heads, which must divide hidden {hidden}; change one of them"
        )
    small_group = small.num_attention_heads // small.num_key_value_heads
    group = heads // kv_heads
    if kv_heads // small.num_key_value_heads * group < small_group:
        raise OutriderError(
            f"{kv_heads} kv_heads with {group} heads each cannot hold {small.num_key_value_heads} with {small_group}"
            f" each; give {small.num_key_value_heads} kv_heads, or more heads"
        )
