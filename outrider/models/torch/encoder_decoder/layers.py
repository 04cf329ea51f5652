"""The attention of a decoder, in place of that of transformers while Outrider runs a pass."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from outrider.models.torch.attention import CacheReader, MaskRule, PositionBias, Scoring, attend_group, attend_layer
from outrider.models.torch.encoder_decoder.sources import Sources
from outrider.models.torch.rotary import rotate

# Names of the attention modules in a decoder layer.
_SELF_ATTENTION = ("self_attn", "layer.0.SelfAttention")
_CROSS_ATTENTION = ("encoder_attn", "cross_attn", "layer.1.EncDecAttention")
_THREE_OUTPUTS = frozenset({"t5", "mt5"})  # model types whose attention returns the position bias as well


class DecoderPass:
    """The data that a decoder's attention layers read during a pass: the cache and the sources."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.reader: CacheReader | None = None  # None: no pass of Outrider is running
        self._masks: list[torch.Tensor | None] | None = None  # of the sources, for all layers

    @contextmanager
    def running(self, reader: CacheReader) -> Iterator[None]:
        """Run a pass over the cache of `reader`."""
        self.reader = reader
        self._masks = None
        try:
            yield
        finally:
            self.reader = None

    def source_masks(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """Return the mask of the sources of each group of sequences."""
        assert self.reader is not None
        if self._masks is None:
            self._masks = [self.sources.mask(group, dtype) for group in self.reader.groups]
        return self._masks


class _Attention:
    """Replaces `forward` of an attention module during a pass. It uses the module's own weights."""

    def __init__(self, module: Any, layer: int, current: DecoderPass, num_outputs: int) -> None:
        """Take over a module. `num_outputs` is the length of the tuple that its forward returns."""
        self._layer = layer
        self._current = current
        self._original: Callable[..., Any] = module.forward
        short = hasattr(module, "q")  # names of T5
        self._query = module.q if short else module.q_proj
        self._key = module.k if short else module.k_proj
        self._value = module.v if short else module.v_proj
        self._out = module.o if short else getattr(module, "o_proj", None) or module.out_proj
        self._dim = module.key_value_proj_dim if short else module.head_dim
        self._scale = 1.0 if short else float(module.scaling)  # T5 has the scale in its weights
        self._softcap: float | None = getattr(module, "attn_logit_softcapping", None)
        self._num_outputs = num_outputs
        module.forward = self.forward

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run over the hidden states [1, T, H] of a pass. Without a pass, run the module of transformers."""
        reader = self._current.reader
        if reader is None:
            return self._original(hidden_states, *args, **kwargs)
        attended = self.attend(reader, hidden_states, **kwargs)
        output = self._out(attended.flatten(2))
        return (output, *(None for _ in range(self._num_outputs - 1)))

    def attend(self, reader: CacheReader, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the attention output [1, T, heads, dim]."""
        raise NotImplementedError

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        """Split [1, T, heads * dim] into [1, heads, T, dim]."""
        return projected.view(*projected.shape[:2], -1, self._dim).transpose(1, 2)


class SelfAttention(_Attention):
    """Attention to the committed tokens and the ancestors of a token."""

    def __init__(
        self, module: Any, layer: int, current: DecoderPass, num_outputs: int, bias: PositionBias | None
    ) -> None:
        super().__init__(module, layer, current, num_outputs)
        self._bias = bias
        window: int | None = getattr(module, "sliding_window", None)
        self._mask_rule = MaskRule(sliding_window_causal_mask_function(window), window) if window else None

    def attend(
        self,
        reader: CacheReader,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        query = self._heads(self._query(hidden_states))
        key = self._heads(self._key(hidden_states))
        if position_embeddings is not None:
            cosine, sine = (each[:, None] for each in position_embeddings)  # [1, 1, T, D]
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        return attend_layer(
            reader,
            self._layer,
            query,
            key,
            self._heads(self._value(hidden_states)),
            Scoring(self._scale, self._softcap),
            mask_rule=self._mask_rule,
            bias=self._bias,
        )


class CrossAttention(_Attention):
    """Attention to the source of a sequence."""

    def attend(self, reader: CacheReader, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        query = self._heads(self._query(hidden_states))
        sources = self._current.sources
        out = query.new_empty(query.shape[2], query.shape[1], query.shape[3])
        for group, mask in zip(reader.groups, self._current.source_masks(query.dtype), strict=True):
            keys, values = sources.entries(self._layer, group)
            attend_group(out, group, query, keys, values, mask, Scoring(self._scale, self._softcap))
        return out[None]

    def encode(self, slot: int, encoded: torch.Tensor) -> None:
        """Store the keys and values of a source from the output of the encoder [1, S, H]."""
        keys = self._heads(self._key(encoded))[0]
        values = self._heads(self._value(encoded))[0]
        self._current.sources.write(self._layer, slot, keys, values)


class RelativeBias:
    """T5's bias of the attention scores: a learned value for each head and bucket of distances."""

    def __init__(self, module: Any) -> None:
        """Use the table of an attention module."""
        self._table = module.relative_attention_bias
        self._buckets = int(module.relative_attention_num_buckets)
        self._max_distance = int(module.relative_attention_max_distance)

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        distance = (query_positions[..., None] - key_positions[:, None]).clamp(min=0)  # later keys are masked
        bias: torch.Tensor = self._table(self._bucket(distance))
        return bias.permute(0, 3, 1, 2)

    def _bucket(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance. Half of the buckets hold one distance each, the others grow."""
        exact = self._buckets // 2
        growth = torch.log(distance.float() / exact) / math.log(self._max_distance / exact)
        # The logarithm of 0 is below every bucket, and such a distance has its own bucket.
        wide = exact + (growth.clamp(min=0) * (self._buckets - exact)).long()
        return torch.where(distance < exact, distance, wide.clamp(max=self._buckets - 1))


def replace_attention(layers: torch.nn.ModuleList, current: DecoderPass, model_type: str) -> list[CrossAttention]:
    """Replace the attention of all decoder layers during passes. Returns the cross-attention of each layer."""
    num_outputs = 3 if model_type in _THREE_OUTPUTS else 2
    crosses = []
    bias: PositionBias | None = None
    for number, layer in enumerate(layers):
        module = _find(layer, _SELF_ATTENTION)
        if getattr(module, "has_relative_attention_bias", False):  # T5 has one in its first layer, for all of them
            bias = RelativeBias(module)
        SelfAttention(module, number, current, num_outputs, bias)
        crosses.append(CrossAttention(_find(layer, _CROSS_ATTENTION), number, current, num_outputs))
    return crosses


def replace_positions(decoder: Any, current: DecoderPass) -> None:
    """Give the position embedding of a decoder the positions of the pass, if it has one."""
    module = getattr(decoder, "embed_positions", None)
    if module is None:
        return
    original = module.forward

    def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if current.reader is None:
            return original(tokens, *args, **kwargs)
        positions = current.reader.layout.positions
        if hasattr(module, "make_weights"):  # of M2M-100, where padding has the place before the first position
            padding: int = module.padding_idx
            return module.weights[torch.where(tokens == padding, padding, positions + padding + 1)]
        return original(tokens, position_ids=positions)

    module.forward = forward


def _find(layer: torch.nn.Module, names: tuple[str, ...]) -> Any:
    """Return the first submodule with one of these names."""
    modules = dict(layer.named_modules())
    return next(modules[name] for name in names if name in modules)
