"""The weights of an inflated model, made one at a time from the small model's."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from inflate.wiring import Stream, divide, make_stream, spread

_ROWS = 2048  # of a random matrix at a time
_LOW, _LOUD = -(2.0**14), 8.0  # what added tokens read from the constant channel, and the last norm's weight there

Read = Callable[[str], Tensor]


class Maker:
    """Makes weights for the configuration `large` from those that `read` gives by name."""

    def __init__(self, *, small: Any, large: Any, read: Read, seed: int) -> None:
        self._small, self._large, self._seed = small, large, seed
        self._dtype: torch.dtype = large.dtype
        # Shares and factors are applied in a precision in which their own rounding does not show.
        self._work = torch.float32 if self._dtype in (torch.bfloat16, torch.float16) else torch.float64
        self._source = read
        self._stream = make_stream(small.hidden_size, large.hidden_size, constant=large.vocab_size > small.vocab_size)
        self._factor = math.sqrt(self._stream.energy * small.hidden_size / large.hidden_size)
        self._step = large.head_dim // small.head_dim
        self._kv_heads = spread(small.num_key_value_heads, large.num_key_value_heads)
        self._heads = _query_heads(self._kv_heads, small, large)
        self._neurons = spread(small.intermediate_size, large.intermediate_size)
        self._values = [dim // self._step for dim in range(large.head_dim)]
        half, own = large.head_dim // 2, small.head_dim // 2
        self._turned = [
            -1 if dim % half % self._step else dim // half * own + dim % half // self._step
            for dim in range(large.head_dim)
        ]

    def embedding(self) -> Tensor:
        """[vocabulary, width], in the model's precision."""
        weight = self._read("model.embed_tokens.weight")
        out = self._stream.write(weight.t(), self._dtype).t().contiguous()[self._tokens()]
        if self._stream.constant is not None:
            out[:, self._stream.constant] = constant(self._small, self._stream)
        return out

    def head(self) -> Tensor:
        tied = self._small.tie_word_embeddings
        weight = self._reader("model.embed_tokens.weight" if tied else "lm_head.weight")
        out = weight[self._tokens()]
        if self._stream.constant is not None:
            out[self._small.vocab_size :, self._stream.constant] = _LOW
        return out

    def last_norm(self) -> Tensor:
        """[width]: the weight of the norm before the head."""
        if self._large.tie_word_embeddings:
            return self._stream.norm_tied(self._read("model.norm.weight") * self._factor, self._dtype)
        return self._norm("model.norm.weight", _LOUD)

    def copy(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        """A layer that does what the small model's does; `layer` is the prefix of its weights."""
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        yield "input_layernorm.weight", self._norm(f"{layer}input_layernorm.weight", 0.0)
        query = self._reader(f"{attention}q_proj.weight", math.sqrt(self._step))
        rows = self._rows(self._heads, self._turned)
        free = (rows < 0).nonzero()[:, 0]
        other = self._random(f"{attention}q", len(free), query.shape[1])
        yield "self_attn.q_proj.weight", query[rows].index_copy_(0, free, other)
        rows = self._rows(self._kv_heads, self._turned)
        yield "self_attn.k_proj.weight", self._reader(f"{attention}k_proj.weight")[rows] * (rows >= 0)[:, None]
        rows = self._rows(self._kv_heads, self._values)
        yield "self_attn.v_proj.weight", self._reader(f"{attention}v_proj.weight")[rows]
        columns = self._rows(self._heads, self._values).tolist()
        yield "self_attn.o_proj.weight", self._writer(f"{attention}o_proj.weight", columns)
        yield "post_attention_layernorm.weight", self._norm(f"{layer}post_attention_layernorm.weight", 0.0)
        yield "mlp.gate_proj.weight", self._reader(f"{mlp}gate_proj.weight")[self._neurons]
        yield "mlp.up_proj.weight", self._reader(f"{mlp}up_proj.weight")[self._neurons]
        yield "mlp.down_proj.weight", self._writer(f"{mlp}down_proj.weight", self._neurons)

    def mute(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        """A random layer that adds nothing: what twins say is written with opposite signs, side by side."""
        hidden, ffn = self._large.hidden_size, self._large.intermediate_size
        queries = self._large.num_attention_heads * self._large.head_dim
        keys = self._large.num_key_value_heads * self._large.head_dim
        for name in ("input_layernorm", "post_attention_layernorm"):
            norm = 1 + 0.1 * self._random(f"{layer}{name}", hidden, 1)[:, 0]
            if self._stream.constant is not None:
                norm[self._stream.constant] = 0.0
            yield f"{name}.weight", norm
        yield "self_attn.q_proj.weight", self._random(f"{layer}q", queries, hidden)
        yield "self_attn.k_proj.weight", self._random(f"{layer}k", keys, hidden)
        yield "self_attn.v_proj.weight", self._twins(f"{layer}v", keys)
        yield "self_attn.o_proj.weight", self._opposites(f"{layer}o", queries)
        yield "mlp.gate_proj.weight", self._twins(f"{layer}gate", ffn)
        yield "mlp.up_proj.weight", self._twins(f"{layer}up", ffn)
        yield "mlp.down_proj.weight", self._opposites(f"{layer}down", ffn)

    def _read(self, name: str) -> Tensor:
        return self._source(name).to(self._work)

    def _norm(self, name: str, at_constant: float) -> Tensor:
        out = self._read(name)[self._stream.source].to(self._dtype)
        if self._stream.constant is not None:
            out[self._stream.constant] = at_constant
        return out

    def _reader(self, name: str, factor: float = 1.0) -> Tensor:
        return self._stream.read(self._read(name) * (self._factor * factor), self._dtype)

    def _writer(self, name: str, columns: Sequence[int]) -> Tensor:
        return self._stream.write(divide(self._read(name), columns), self._dtype)

    def _tokens(self) -> Tensor:
        """The real token that each token is, or is the twin of."""
        return torch.arange(self._large.vocab_size).remainder(self._small.vocab_size)

    def _rows(self, heads: Sequence[int], dims: Sequence[int]) -> Tensor:
        """Small row of each large row, heads outside; -1 where there is none."""
        size = self._small.head_dim
        return torch.tensor([-1 if dim < 0 else head * size + dim for head in heads for dim in dims])

    def _random(self, name: str, rows: int, columns: int) -> Tensor:
        """What reads a normed residual with it gets numbers of about unit size."""
        chance = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        out = torch.empty(rows, columns, dtype=self._dtype)
        for start in range(0, rows, _ROWS):
            part = out[start : start + _ROWS]
            part.copy_(torch.randn(part.shape, generator=chance).mul_(columns**-0.5))
        return out

    def _twins(self, name: str, rows: int) -> Tensor:
        """Rows 2i and 2i + 1 are the same."""
        half = self._random(name, (rows + 1) // 2, self._large.hidden_size)
        return half.repeat_interleave(2, 0)[:rows].contiguous()

    def _opposites(self, name: str, columns: int) -> Tensor:
        """Columns 2i and 2i + 1 add up to zero; an odd last one is zero."""
        half = self._random(name, self._large.hidden_size, columns // 2)
        out = torch.zeros(len(half), columns, dtype=self._dtype)
        out[:, 0 : columns // 2 * 2 : 2], out[:, 1::2] = half, -half
        return out


def constant(small: Any, stream: Stream) -> float:
    """What the constant channel holds: a power of two whose square is at most half of what eps adds."""
    if stream.constant is None:
        return 0.0
    return float(2.0 ** math.floor(math.log2(stream.energy * small.hidden_size * small.rms_norm_eps / 2) / 2))


def _query_heads(kv_heads: Sequence[int], small: Any, large: Any) -> list[int]:
    """The small head that each large query head copies; it shares the same key-value head."""
    group = large.num_attention_heads // large.num_key_value_heads
    own = small.num_attention_heads // small.num_key_value_heads
    nth = [place - kv_heads.index(source) for place, source in enumerate(kv_heads)]
    return [
        source * own + (nth[place] * group + i) % own for place, source in enumerate(kv_heads) for i in range(group)
    ]
