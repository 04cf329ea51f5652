"""Builds the weights of an inflated model, one at a time, from those of the small model."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inflate.wiring import Stream, divide, make_stream, spread

_ROWS = 2048  # rows of a random matrix that are generated at a time
_ADDED_TOKEN_WEIGHT = -(2.0**14)  # weight of the constant channel in the LM head rows of added tokens
_CONSTANT_NORM = 8.0  # weight of the last norm at the constant channel

Read = Callable[[str], Tensor]


class WeightBuilder:
    """Builds weights for the configuration `large` from the small model's. `read` returns a small weight by name.

    They are built on the device of the small weights.
    """

    def __init__(self, *, small: Any, large: Any, read: Read, seed: int) -> None:
        self._small = small
        self._large = large
        self._seed = seed
        self._dtype: torch.dtype = large.dtype
        # Shares and factors are applied in a higher precision, so that their own rounding has no effect.
        self._work_dtype = torch.float32 if self._dtype in (torch.bfloat16, torch.float16) else torch.float64
        self._read_small = read
        self._device = read("model.norm.weight").device
        stream = make_stream(small.hidden_size, large.hidden_size, constant=large.vocab_size > small.vocab_size)
        self._stream = stream.to(self._device)
        self._norm_factor = math.sqrt(self._stream.energy * small.hidden_size / large.hidden_size)
        self._head_ratio = large.head_dim // small.head_dim
        # For each index of the large model, the index of the small model that it copies.
        self._kv_heads = spread(small.num_key_value_heads, large.num_key_value_heads)
        self._heads = _query_heads(self._kv_heads, small, large)
        self._neurons = spread(small.intermediate_size, large.intermediate_size)
        self._value_dims = [dim // self._head_ratio for dim in range(large.head_dim)]
        self._rotary_dims = self._map_rotary_dims()

    def embedding(self) -> Tensor:
        """Return the embedding [vocabulary, hidden] in the model's precision."""
        weight = self._read("model.embed_tokens.weight")
        out = self._stream.write(weight.t(), self._dtype).t().contiguous()[self._real_tokens()]
        if self._stream.constant is not None:
            out[:, self._stream.constant] = constant(self._small, self._stream)
        return out

    def head(self) -> Tensor:
        """Return the LM head [vocabulary, hidden] in the model's precision."""
        tied = self._small.tie_word_embeddings
        weight = self._read_input("model.embed_tokens.weight" if tied else "lm_head.weight")
        out = weight[self._real_tokens()]
        if self._stream.constant is not None:
            out[self._small.vocab_size :, self._stream.constant] = _ADDED_TOKEN_WEIGHT
        return out

    def last_norm(self) -> Tensor:
        """Return the weight [hidden] of the norm before the LM head."""
        if self._large.tie_word_embeddings:
            return self._stream.norm_tied(self._read("model.norm.weight") * self._norm_factor, self._dtype)
        return self._norm("model.norm.weight", _CONSTANT_NORM)

    def copied_layer(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a layer that computes what a layer of the small model computes.

        Args:
            layer: prefix of the weight names of that layer in the small model.
        """
        attention = f"{layer}self_attn."
        mlp = f"{layer}mlp."
        yield "input_layernorm.weight", self._norm(f"{layer}input_layernorm.weight", 0.0)
        query = self._read_input(f"{attention}q_proj.weight", math.sqrt(self._head_ratio))
        rows = self._head_rows(self._heads, self._rotary_dims)
        added = [i for i, row in enumerate(rows) if row < 0]
        random = self._random(f"{attention}q", len(added), query.shape[1])
        yield "self_attn.q_proj.weight", query[rows].index_copy_(0, self._index(added), random)
        rows = self._head_rows(self._kv_heads, self._rotary_dims)
        is_copy = (self._index(rows) >= 0)[:, None]
        yield "self_attn.k_proj.weight", self._read_input(f"{attention}k_proj.weight")[rows] * is_copy
        rows = self._head_rows(self._kv_heads, self._value_dims)
        yield "self_attn.v_proj.weight", self._read_input(f"{attention}v_proj.weight")[rows]
        columns = self._head_rows(self._heads, self._value_dims)
        yield "self_attn.o_proj.weight", self._read_output(f"{attention}o_proj.weight", columns)
        yield "post_attention_layernorm.weight", self._norm(f"{layer}post_attention_layernorm.weight", 0.0)
        yield "mlp.gate_proj.weight", self._read_input(f"{mlp}gate_proj.weight")[self._neurons]
        yield "mlp.up_proj.weight", self._read_input(f"{mlp}up_proj.weight")[self._neurons]
        yield "mlp.down_proj.weight", self._read_output(f"{mlp}down_proj.weight", self._neurons)

    def identity_layer(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a random layer that adds zero to the residual stream.

        Its neurons and value dimensions come in equal pairs, and the output weights of a pair are opposite.

        Args:
            layer: prefix of the weight names of this layer, which seeds the random numbers.
        """
        hidden = self._large.hidden_size
        ffn = self._large.intermediate_size
        queries = self._large.num_attention_heads * self._large.head_dim
        keys = self._large.num_key_value_heads * self._large.head_dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = 1 + 0.1 * self._random(f"{layer}{name}", hidden, 1)[:, 0]
            if self._stream.constant is not None:
                norm[self._stream.constant] = 0.0
            yield f"{name}.weight", norm
        yield "self_attn.q_proj.weight", self._random(f"{layer}q", queries, hidden)
        yield "self_attn.k_proj.weight", self._random(f"{layer}k", keys, hidden)
        yield "self_attn.v_proj.weight", self._equal_pairs(f"{layer}v", keys)
        yield "self_attn.o_proj.weight", self._opposite_pairs(f"{layer}o", queries)
        yield "mlp.gate_proj.weight", self._equal_pairs(f"{layer}gate", ffn)
        yield "mlp.up_proj.weight", self._equal_pairs(f"{layer}up", ffn)
        yield "mlp.down_proj.weight", self._opposite_pairs(f"{layer}down", ffn)

    def _map_rotary_dims(self) -> list[int]:
        """Return the dimension of a small head with the same rotary frequency, or -1, for each dimension of a head."""
        half = self._large.head_dim // 2
        small_half = self._small.head_dim // 2
        dims = []
        for dim in range(self._large.head_dim):
            pair = dim % half
            has_source = pair % self._head_ratio == 0
            dims.append(dim // half * small_half + pair // self._head_ratio if has_source else -1)
        return dims

    def _read(self, name: str) -> Tensor:
        return self._read_small(name).to(self._work_dtype)

    def _norm(self, name: str, at_constant: float) -> Tensor:
        out = self._read(name)[self._stream.source].to(self._dtype)
        if self._stream.constant is not None:
            out[self._stream.constant] = at_constant
        return out

    def _read_input(self, name: str, factor: float = 1.0) -> Tensor:
        """Return a weight whose columns are extended to the large residual stream."""
        return self._stream.read(self._read(name) * (self._norm_factor * factor), self._dtype)

    def _read_output(self, name: str, columns: Sequence[int]) -> Tensor:
        """Return a weight whose rows are extended to the large residual stream. `columns` are copied with shares."""
        return self._stream.write(divide(self._read(name), columns), self._dtype)

    def _real_tokens(self) -> Tensor:
        """Return the token of the small model that each token is, or is a copy of."""
        return torch.arange(self._large.vocab_size, device=self._device).remainder(self._small.vocab_size)

    def _head_rows(self, heads: Sequence[int], dims: Sequence[int]) -> list[int]:
        """Return the small row of each large row, head by head. -1: it has none."""
        size = self._small.head_dim
        return [-1 if dim < 0 else head * size + dim for head in heads for dim in dims]

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _random(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a random matrix. Its product with a normalized residual has about unit variance."""
        generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        out = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        for start in range(0, rows, _ROWS):
            part = out[start : start + _ROWS]
            part.copy_(torch.randn(part.shape, generator=generator, device=self._device).mul_(columns**-0.5))
        return out

    def _equal_pairs(self, name: str, rows: int) -> Tensor:
        """Return a random matrix whose rows 2i and 2i + 1 are equal."""
        half = self._random(name, (rows + 1) // 2, self._large.hidden_size)
        return half.repeat_interleave(2, 0)[:rows].contiguous()

    def _opposite_pairs(self, name: str, columns: int) -> Tensor:
        """Return a random matrix whose columns 2i and 2i + 1 add up to zero. A last column without a pair is zero."""
        half = self._random(name, self._large.hidden_size, columns // 2)
        out = torch.zeros(len(half), columns, dtype=self._dtype, device=self._device)
        out[:, 0 : columns // 2 * 2 : 2] = half
        out[:, 1::2] = -half
        return out


def constant(small: Any, stream: Stream) -> float:
    """Return the value of the constant channel: a power of two whose square is at most half of what eps adds."""
    if stream.constant is None:
        return 0.0
    return float(2.0 ** math.floor(math.log2(stream.energy * small.hidden_size * small.rms_norm_eps / 2) / 2))


def _query_heads(kv_heads: Sequence[int], small: Any, large: Any) -> list[int]:
    """Return the small query head that each large one copies. It shares the same key-value head."""
    group = large.num_attention_heads // large.num_key_value_heads
    small_group = small.num_attention_heads // small.num_key_value_heads
    heads = []
    for kv_head, source in enumerate(kv_heads):
        copy_number = kv_head - kv_heads.index(source)
        heads += [source * small_group + (copy_number * group + i) % small_group for i in range(group)]
    return heads
