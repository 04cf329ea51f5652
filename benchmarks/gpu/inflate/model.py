"""A small trained Llama in the dimensions of a large one: the cost of the large, the text of the small.

What speculation gains depends on what the models cost and on how often they agree. Random weights of the right size
have the cost without the agreement; a model inflated here has both, and needs no download.

It is Net2Net (Chen et al. 2016, arXiv:1511.05641) for a whole transformer: everything is *copied*, and whoever reads c
copies gives each a share, a power of two; the shares add up to 1.

- Residual channels are copied so that their mean square is the small model's times a known factor (`Stream`). Whoever
  reads a norm is multiplied by its root, and eps is scaled with it.
- MLP neurons, dimensions of values, query heads and key-value heads are copied; down_proj and o_proj hold the shares.
- Rotary pair i of a head of d goes to pair i D/d of a head of D, which turns at the same frequency. Queries are
  multiplied by sqrt(D/d), by which attention divides more. Queries of other pairs are random, and their keys are zero.
- Added layers are random and mute: neighbouring neurons, and neighbouring dimensions of values, are twins, and what is
  written of the one is the opposite of what is written of the other.
- Added tokens are twins of real ones, less a lot: a channel that holds the same number for every token takes from their
  logits, and from theirs alone. The number's square is taken out of eps.

In exact arithmetic real tokens have the small model's logits. In floating point copies and powers of two are exact, and
weights of the checkpoint's own precision are copied without rounding. What rounds is the norm's factor and sqrt(D/d)
where they are no powers of two, to a fraction of an ulp (`Stream.read`), and sums that cancel in mute layers, by as
much as any other sum.

Zero are only: the keys of added rotary pairs, because no query may see them at any distance; what writes to and reads
from spare channels, of which there are three at most, because the residual would else have another norm; and what the
last neuron of a mute layer writes, if their number is odd. A constant channel is read by the added tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from inflate.layers import Maker, Read, constant
from inflate.wiring import make_stream
from outrider.errors import OutriderError

_PER_FREQUENCY = frozenset({"default", "linear", "llama3"})  # rotary types that treat each frequency by itself
_NAMES = MappingProxyType(
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
    """Dimensions of the large model; None is the small one's."""

    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    untie: bool = False  # give a model with tied embeddings a head of its own


PRESETS: Mapping[str, Dims] = MappingProxyType(  # Llama 3; the vocabulary stays, unless it is asked for (128256)
    {
        "8b": Dims(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, untie=True),
        "1b": Dims(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192),
    }
)


def inflate(
    model: Any, dims: Dims, *, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """The configuration and the weights of a larger LlamaForCausalLM with the logits of `model`.

    Raises:
        OutriderError: these dimensions cannot hold the small model; the message says which to change.
    """
    config = inflate_config(model.config, dims, dtype=dtype)
    return config, dict(inflate_tensors(model.config, config, model.state_dict().__getitem__, seed=seed))


def inflate_config(config: Any, dims: Dims, *, dtype: torch.dtype | None = None) -> LlamaConfig:
    """The large model's configuration; `dtype` is the small one's unless given.

    Raises:
        OutriderError: these dimensions cannot hold the small model; the message says which to change.
    """
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        raise OutriderError("only a Llama without biases can be inflated; give a model of model_type llama")
    given = {key: getattr(dims, name) for name, key in _NAMES.items()}
    large = {key: getattr(config, key) if value is None else value for key, value in given.items()}
    _check_sizes(config, large)
    _check_heads(config, large)
    grown = large["vocab_size"] > config.vocab_size
    tied = config.tie_word_embeddings and not dims.untie
    if grown and tied:
        raise OutriderError("a larger vocabulary needs a head of its own; give untie, or --untie")
    stream = make_stream(config.hidden_size, large["hidden_size"], constant=grown)
    squares = stream.energy * config.hidden_size * config.rms_norm_eps - constant(config, stream) ** 2
    rest = {
        "rms_norm_eps": squares / large["hidden_size"],
        "tie_word_embeddings": tied,
        "dtype": dtype or config.dtype or torch.float32,
    }
    return LlamaConfig.from_dict(config.to_dict() | large | rest)


def inflate_tensors(small: Any, large: Any, read: Read, *, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Names and weights, one at a time and layer by layer, in the precision that the large configuration names.

    Args:
        small: configuration of the trained model.
        large: from `inflate_config`.
        read: gives a weight of the trained model by its name.
        seed: of what is random.
    """
    maker = Maker(small=small, large=large, read=read, seed=seed)
    ours, theirs = small.num_hidden_layers, large.num_hidden_layers
    home = {(2 * i + 1) * theirs // (2 * ours): i for i in range(ours)}  # spread evenly among the mute ones
    yield "model.embed_tokens.weight", maker.embedding()
    for layer in range(theirs):
        prefix = f"model.layers.{layer}."
        made = maker.copy(f"model.layers.{home[layer]}.") if layer in home else maker.mute(prefix)
        yield from ((prefix + name, weight) for name, weight in made)
    yield "model.norm.weight", maker.last_norm()
    if not large.tie_word_embeddings:
        yield "lm_head.weight", maker.head()


def _check_sizes(small: Any, large: Mapping[str, int]) -> None:
    for name, key in _NAMES.items():
        least = getattr(small, key)
        if large[key] < least:
            raise OutriderError(f"{name} {large[key]} is less than the small model's; give {least} or more")
    if large["head_dim"] % small.head_dim:
        raise OutriderError(
            f"heads of {large['head_dim']} lack the rotary frequencies of heads of {small.head_dim}; give a multiple of"
            f" {small.head_dim} as head_dim"
        )
    kind = small.rope_parameters["rope_type"]
    if large["head_dim"] > small.head_dim and kind not in _PER_FREQUENCY:
        raise OutriderError(f"rotary type {kind} depends on the size of heads; leave head_dim at {small.head_dim}")


def _check_heads(small: Any, large: Mapping[str, int]) -> None:
    hidden, heads, kv_heads = large["hidden_size"], large["num_attention_heads"], large["num_key_value_heads"]
    if hidden % heads or heads % kv_heads:
        raise OutriderError(f"{kv_heads} kv_heads must divide {heads} heads, and these hidden {hidden}; change one")
    ours, theirs = small.num_attention_heads // small.num_key_value_heads, heads // kv_heads
    if kv_heads // small.num_key_value_heads * theirs < ours:
        raise OutriderError(
            f"{kv_heads} kv_heads with {theirs} heads each do not hold {small.num_key_value_heads} with {ours} each;"
            f" give {small.num_key_value_heads} kv_heads, or more heads"
        )
