"""A Llama-like model on the Triton kernels: its weights on the device, and its forward pass.

A layer runs seven kernels for up to 16 tokens: the product for queries, keys and values with the
norm before it; the rotary embedding and the write to the cache; attention, and the sum of its parts;
the output product with the residual; the product of gate and up with the norm before it; and the
product of down with the residual. For more tokens, a product takes two or three kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from outrider.core.config import FULL_BITS
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.native.dimensions import Dimensions
from outrider.models.torch.gguf_linear import BlockWeight
from outrider.models.torch.weights import Weight, Weights, check_weights, tied_weight
from outrider.models.triton.attention import attend, attend_prompt
from outrider.models.triton.expand import embed
from outrider.models.triton.layers import rms_norm, rotate_and_write
from outrider.models.triton.linear import Norm, linear
from outrider.models.triton.passes import MAX_COLUMNS, Rows
from outrider.models.triton.prompt_products import linear_by_role
from outrider.models.triton.quantized import JoinedWeight, Matrix, QuantizedWeight, from_weight, quantize, stacked

_HEAD = "lm_head"
_log = logging.getLogger("outrider")
_OUT, _DOWN = "self_attn.o_proj", "mlp.down_proj"
_MATRICES = ("qkv", "out", "gate_up", "down")  # of a layer
_BIASES = ("qkv_bias", "out_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The weights of a decoder layer. A norm that the layer does not have is None."""

    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None
    out_bias: torch.Tensor | None
    norms: Mapping[str, torch.Tensor]  # by the name of the module

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of the products."""
        return sum(weight.nbytes for weight in (self.qkv, self.out, self.gate_up, self.down))


class QueryNorms(NamedTuple):
    """Norms of the heads of queries and keys before the rotation."""

    query: torch.Tensor | None  # [dim]
    key: torch.Tensor | None  # [dim]
    epsilon: float


@dataclass(slots=True, kw_only=True, eq=False)
class Outputs:
    """What a pass returns besides its last hidden states."""

    layers: Sequence[int]  # whose outputs are exported
    states: dict[int, torch.Tensor] = field(default_factory=dict)  # [T, H]


class Decoder:
    """The weights of a model and its forward pass."""

    def __init__(
        self,
        weights: Weights,
        config: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        bits: int = FULL_BITS,
    ) -> None:
        """Copy the weights of a model to the device. They are not needed afterward.

        Args:
            weights: the weights of a model of one of `FAMILIES`.
            config: its configuration.
            dtype: type of activations, keys and values, and of weights that are not quantized.
            device: where the kernels run.
            context: tokens of a sequence.
            bits: bits per weight of linear layers: 16, or 8 or 4 (quantized).

        Raises:
            UnsupportedModel: the kernels do not support this model.
        """
        self.shape = Dimensions.of(config.get_text_config(decoder=True))
        _check(self.shape, config.model_type)
        self.dtype = dtype
        self.device = device
        self.bits = bits
        self.types = weights.types
        self._body = weights.body
        self._tied = bool(config.tie_word_embeddings)
        names = [name for name in weights if name.startswith((f"{self._body}.", f"{_HEAD}."))]
        self.shapes = {name: weights.shape(name) for name in names}
        self._layers: dict[int, _Layer] = {}
        self._embedding: torch.Tensor | QuantizedWeight
        with weights.reading(names) as count:
            for i in range(self.shape.layers):
                with self._releasing(weights, f"{self._body}.layers.{i}.", count):
                    self._layers[i] = self._make_layer(i, weights)
            with self._releasing(weights, f"{self._body}.embed_tokens.", count):
                self._load_embedding(weights)
            with self._releasing(weights, f"{_HEAD}.", count):
                self._head = self._make_head(weights)
            with self._releasing(weights, f"{self._body}.norm.", count):
                self._norm = self._norm_factors(weights[f"{self._body}.norm.weight"])
        self.stack: Sequence[int] = range(self.shape.layers)  # the layers that run, in order
        self._source: Decoder | None = None  # the decoder that this one was made from
        self._copies: WeakSet[Decoder] = WeakSet()  # quantized copies of this one
        self._angles = self._make_angles(context)

    @contextmanager
    def _releasing(self, weights: Weights, prefix: str, count: Any) -> Iterator[None]:
        """Release the weights of a module, and count them as read."""
        yield
        for name in self.shapes:
            if name.startswith(prefix):
                weights.release(name)
                count(name)

    @property
    def vocab(self) -> int:
        return self._head.shape[0]

    def forward(
        self,
        tokens: torch.Tensor,
        groups: Sequence[Rows],
        pages: torch.Tensor,
        outputs: Outputs,
        *,
        prompt_tokens: int = 0,
    ) -> torch.Tensor:
        """Return the hidden states [T, H] of all tokens before the last norm.

        Args:
            tokens: [T] int64.
            groups: the rows of the pass. They contain each token once.
            pages: [blocks, layers, heads, 2, BLOCK, dim] the KV cache.
            outputs: receives the outputs of its layers.
            prompt_tokens: the first tokens, whose products run in blocks of fixed size.
        """
        shape = self.shape
        scale = shape.table_scale * shape.embedding_scale
        hidden = embed(tokens, self._embedding, self.dtype)
        if scale != 1:
            hidden = hidden * torch.tensor(scale, dtype=self.dtype)
        for number, i in enumerate(self.stack):
            hidden = self._run(i, hidden, groups, pages[:, number], prompt_tokens)
            if i in outputs.layers:
                outputs.states[i] = hidden
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [K, V] float32 of hidden states [K, H] before the last norm."""
        logits = linear(hidden, self._head, norm=Norm(self._norm, self.shape.epsilon), out_dtype=torch.float32)
        if self.shape.logit_divisor != 1:
            logits = logits / self.shape.logit_divisor
        if self.shape.logit_cap:
            logits = self.shape.logit_cap * torch.tanh(logits / self.shape.logit_cap)
        return logits

    def _run(
        self, i: int, hidden: torch.Tensor, groups: Sequence[Rows], pages: torch.Tensor, prompt_tokens: int
    ) -> torch.Tensor:
        """Run decoder layer `i`. `pages` [blocks, heads, 2, BLOCK, dim] is its part of the cache."""
        layer = self._layers[i]
        shape, family = self.shape, self.shape.family
        linear = partial(linear_by_role, prompt_tokens)
        qkv = linear(hidden, layer.qkv, norm=self._factors(layer, family.attention_norm), bias=layer.qkv_bias)
        attended = attend_groups(
            qkv,
            groups,
            pages,
            self._angles[shape.rotary.table[i]],
            norms=QueryNorms(layer.norms.get("self_attn.q_norm"), layer.norms.get("self_attn.k_norm"), shape.epsilon),
            scale=shape.scale,
            window=shape.windows[i],
            softcap=shape.score_cap,
        )
        post_norm = layer.norms.get(family.attention_post_norm or "")
        hidden = self._added(linear, hidden, attended, layer.out, post_norm, layer.out_bias)
        norm = self._factors(layer, family.mlp_norm)
        gated = linear(hidden, layer.gate_up, norm=norm, gate="gelu_tanh" if shape.gelu else "silu")
        return self._added(linear, hidden, gated, layer.down, layer.norms.get(family.mlp_post_norm or ""))

    def _added(
        self,
        linear: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        inputs: torch.Tensor,
        weight: Matrix,
        post_norm: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the residual stream with the output of a product added."""
        scale = self.shape.residual_scale
        if post_norm is None and scale == 1:
            return linear(inputs, weight, residual=hidden, bias=bias)
        out = linear(inputs, weight, bias=bias)
        if post_norm is not None:
            out = rms_norm(out, post_norm, self.shape.epsilon)
        return torch.add(hidden, out, alpha=scale)

    def _factors(self, layer: _Layer, name: str | None) -> Norm | None:
        return None if name is None else Norm(layer.norms[name], self.shape.epsilon)

    def make_submodel(self, layers: Sequence[int]) -> Decoder:
        """Return a decoder of some layers, in this order. It shares the weights, also after `load`."""
        other = copy(self)
        other.stack = tuple(layers)
        other._source = self
        return other

    def make_requantized(self, bits: int) -> Decoder:
        """Return a copy with weights of 8 or 4 bits. `load` updates it, too."""
        other = self.make_submodel(self.stack)
        other.bits = bits
        other._layers = {i: _requantized(layer, bits) for i, layer in self._layers.items()}
        other._head = quantize(_expanded(self._head), 8)
        self._copies.add(other)
        return other

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights, by their names in transformers. Nothing changes if one of them does not fit.

        Raises:
            OutriderError: a weight does not fit, or the weights of this decoder cannot change.
        """
        if self._source is not None:
            raise OutriderError("load new weights into the target; its self-drafts follow")
        if self.types or self.bits < FULL_BITS:
            raise OutriderError("quantized weights on a GPU take no new ones; load the unquantized model")
        check_weights(weights, self.shapes)
        new = {name: value.detach().to(self.device, self.dtype) for name, value in weights.items()}
        table = f"{self._body}.embed_tokens.weight"
        if self._tied and (tied := tied_weight(new, table, f"{_HEAD}.weight")) is not None:
            new[table] = new[f"{_HEAD}.weight"] = tied
        for i in range(self.shape.layers):
            prefix = f"{self._body}.layers.{i}."
            if any(name.startswith(prefix) for name in new):
                _copy_layer(self._layers[i], self._make_layer(i, {**self._state(i), **new}))
        if table in new:
            _copy_weight(self._embedding, new[table])
        if f"{_HEAD}.weight" in new and not self._tied and isinstance(self._head, torch.Tensor):
            self._head.copy_(new[f"{_HEAD}.weight"])
        if f"{self._body}.norm.weight" in new:
            self._norm.copy_(self._norm_factors(new[f"{self._body}.norm.weight"]))
        for other in self._copies:
            other._update_from_source()

    def _update_from_source(self) -> None:
        """Quantize the weights of the source again."""
        assert self._source is not None
        for i, layer in self._source._layers.items():
            _copy_layer(self._layers[i], _requantized(layer, self.bits))
        _copy_weight(self._head, quantize(_expanded(self._source._head), 8))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the kernels read, by name."""
        parts: dict[str, Matrix | None] = {"embedding": self._embedding, "norm": self._norm, _HEAD: self._head}
        for i, layer in self._layers.items():
            parts |= {f"{i}.{name}": getattr(layer, name) for name in (*_MATRICES, *_BIASES)}
            parts |= {f"{i}.{name}": value for name, value in layer.norms.items()}
        tensors: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                tensors[name] = part
            elif part is not None:
                tensors |= {f"{name}.{field}": tensor for field, tensor in part.tensors().items()}
        return tensors

    def discard(self) -> None:
        """Free the memory of the weights. `restore` allocates it again, and `load` must fill it.

        Raises:
            OutriderError: a quantized copy would be lost.
        """
        if self._copies:
            raise OutriderError("the quantized copy of this target cannot be freed; use level 1")
        for tensor in self.tensors().values():
            tensor.data = torch.empty_like(tensor)  # in place of memory that may be a part of a file
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Allocate memory that `discard` has freed."""
        for tensor in self.tensors().values():
            if not tensor.untyped_storage().size():
                tensor.untyped_storage().resize_(tensor.nbytes)

    def bytes(self) -> int:
        """Return the bytes of the weights, without those of the decoder that this one was made from."""
        if self._source is not None and self._layers is self._source._layers:
            return 0
        layers, head = self.read_bytes()
        has_own_table = self._source is None and not (self._tied and self.bits == FULL_BITS)
        return sum(layers) + head + (self._embedding.nbytes if has_own_table else 0)

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Return the bytes of weights that a pass over one token reads: of each layer, and of the LM head."""
        return tuple(layer.nbytes for layer in self._layers.values()), self._head.nbytes

    def share_weights(self) -> SharedWeights:
        """Return the weights that draft heads share."""
        scale = self.shape.table_scale
        embedding = _expanded(self._embedding).to(self.dtype)
        embedding = embedding if scale == 1 else embedding * torch.tensor(scale, dtype=self.dtype)
        return SharedWeights(
            embedding=embedding,
            head=_expanded(self._head).to(self.dtype),
            norm=self._norm,
            epsilon=self.shape.epsilon,
            softcap=self.shape.logit_cap or None,
        )

    def _state(self, i: int) -> dict[str, torch.Tensor]:
        """Return the weights of a layer by their names in transformers."""
        layer = self._layers[i]
        family = self.shape.family
        prefix = f"{self._body}.layers.{i}"
        names = {family.attention: layer.qkv, (_OUT,): layer.out, family.mlp: layer.gate_up, (_DOWN,): layer.down}
        values = {parts: _expanded(weight) for parts, weight in names.items()}
        state: dict[str, torch.Tensor] = {}
        for parts, value in values.items():
            sizes = [self.shapes[f"{prefix}.{part}.weight"][0] for part in parts]
            state |= {f"{prefix}.{part}.weight": rows for part, rows in zip(parts, value.split(sizes), strict=True)}
        minus = 1 if family.norms_plus_one else 0
        return state | {f"{prefix}.{name}.weight": value - minus for name, value in layer.norms.items()}

    def _make_layer(self, i: int, state: Mapping[str, Weight]) -> _Layer:
        """Make a layer from weights by their names in transformers."""
        prefix = f"{self._body}.layers.{i}"
        family = self.shape.family
        names = (family.attention_norm, family.attention_post_norm, family.mlp_norm, family.mlp_post_norm)
        norms = [*(name for name in names if name), "self_attn.q_norm", "self_attn.k_norm"]
        stored = {name: state[key] for name in norms if (key := f"{prefix}.{name}.weight") in self.shapes}
        return _Layer(
            qkv=self._matrix(state, [f"{prefix}.{part}" for part in family.attention]),
            out=self._matrix(state, [f"{prefix}.{_OUT}"]),
            gate_up=self._matrix(state, [f"{prefix}.{part}" for part in family.mlp]),
            down=self._matrix(state, [f"{prefix}.{_DOWN}"]),
            qkv_bias=self._bias(state, [f"{prefix}.{part}" for part in family.attention]),
            out_bias=self._bias(state, [f"{prefix}.{_OUT}"]),
            norms={name: self._norm_factors(value) for name, value in stored.items()},
        )

    def _matrix(self, state: Mapping[str, Weight], parts: Sequence[str]) -> Matrix:
        """Return the weights of linear layers, one above the other. Supported quantized types stay quantized."""
        return stacked([self._part(part, state[f"{part}.weight"]) for part in parts])

    def _part(self, name: str, weight: Weight) -> torch.Tensor | QuantizedWeight:
        if isinstance(weight, BlockWeight):
            try:
                return from_weight(weight).to(self.device)
            except UnsupportedModel as reason:
                _log.info("%s: %s; it is expanded to %s", name, reason, self.dtype)
        dense = self._dense(weight)
        return dense if self.bits == FULL_BITS else quantize(dense, self.bits)

    def _dense(self, weight: Weight) -> torch.Tensor:
        """Return a weight on the device, in the type of the model."""
        value = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        return value.to(self.device, self.dtype)

    def _bias(self, state: Mapping[str, Weight], parts: Sequence[str]) -> torch.Tensor | None:
        biases = [self._dense(state[key]) for part in parts if (key := f"{part}.bias") in self.shapes]
        return torch.cat(biases) if biases else None

    def _norm_factors(self, weight: Weight) -> torch.Tensor:
        """Return what a norm multiplies by, in float32."""
        value = self._dense(weight).float()
        return value + 1 if self.shape.family.norms_plus_one else value

    def _load_embedding(self, weights: Weights) -> None:
        name = f"{self._body}.embed_tokens"
        weight = weights[f"{name}.weight"]
        self._embedding = self._part(name, weight) if isinstance(weight, BlockWeight) else self._dense(weight)

    def _make_head(self, weights: Weights) -> Matrix:
        """Return the LM head. It is the embedding if they are tied; with 4 bits it has 8."""
        if self._tied and self.bits == FULL_BITS:
            return self._embedding
        weight = weights[f"{_HEAD}.weight"]
        if isinstance(weight, BlockWeight):
            return self._part(_HEAD, weight)
        head = self._embedding if self._tied else self._dense(weight)
        return head if self.bits == FULL_BITS else quantize(_expanded(head), 8)

    def _make_angles(self, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cosines and sines [positions, R / 2] of each rotary table, and of layers without a rotation last."""
        rotary = self.shape.rotary
        positions = torch.arange(context + 1, device=self.device).float()
        angles = []
        for frequency, scale in zip(rotary.frequency, rotary.scale, strict=True):
            angle = positions[:, None] * frequency.to(self.device)
            angles.append((angle.cos() * float(scale), angle.sin() * float(scale)))
        still = torch.zeros(context + 1, rotary.dim // 2, device=self.device)
        return [*angles, (still + 1, still)]  # table -1 is the last


def attend_groups(
    qkv: torch.Tensor,
    groups: Sequence[Rows],
    pages: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    norms: QueryNorms | None = None,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Write the keys and values of a pass and return attention [T, heads * dim].

    Args:
        qkv: [T, (heads + 2 * key heads) * dim].
        groups: the rows of the pass. They contain each token once.
        pages: [blocks, key heads, 2, BLOCK, dim] the cache of the layer.
        angles: cosines and sines [positions, R / 2].
        norms: of queries and keys.
        scale: of the scores.
        window: tokens that a token sees, itself included; 0: all.
        softcap: of the scores; 0: none.
    """
    weights = norms or QueryNorms(None, None, 0.0)

    def attend_rows(values: torch.Tensor, rows: Rows) -> torch.Tensor:
        query = rotate_and_write(
            values,
            *angles,
            rows.position,
            rows.entry,
            rows.table,
            pages,
            query_norm=weights.query,
            key_norm=weights.key,
            epsilon=weights.epsilon,
        )
        run = attend_prompt if rows.is_prompt else attend
        out = run(
            query,
            pages,
            rows.table,
            rows.prefix,
            rows.bits,
            rows.position,
            scale=scale,
            window=window,
            softcap=softcap,
            rows=rows.rows,
            columns=rows.columns,
        )
        return out.flatten(1)

    if len(groups) == 1 and groups[0].take is None:
        return attend_rows(qkv, groups[0])
    _, key_heads, _, _, dim = pages.shape
    attended = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * key_heads * dim)
    for group in groups:
        assert group.take is not None
        assert group.real is not None
        part = attend_rows(qkv[group.take], group)
        attended[group.take[group.real]] = part[group.real]
    return attended


def _requantized(layer: _Layer, bits: int) -> _Layer:
    """Return a layer with weights of fewer bits."""
    weights: dict[str, Any] = {name: quantize(_expanded(getattr(layer, name)), bits) for name in _MATRICES}
    return replace(layer, **weights)


def _copy_layer(layer: _Layer, new: _Layer) -> None:
    """Copy new weights into the memory of a layer, which recorded passes read."""
    for name in _MATRICES:
        _copy_weight(getattr(layer, name), getattr(new, name))
    for name in _BIASES:
        if (bias := getattr(layer, name)) is not None:
            bias.copy_(getattr(new, name))
    for name, value in layer.norms.items():
        value.copy_(new.norms[name])


def _expanded(weight: Matrix) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _copy_weight(weight: Matrix, new: Matrix) -> None:
    """Copy the tensors of a weight into those of another of the same kind."""
    if isinstance(weight, torch.Tensor):
        assert isinstance(new, torch.Tensor)
        weight.copy_(new)
        return
    assert isinstance(new, QuantizedWeight | JoinedWeight)
    for name, tensor in weight.tensors().items():
        tensor.copy_(new.tensors()[name])


def _check(shape: Dimensions, model_type: str) -> None:
    """Raise UnsupportedModel if the kernels do not support a model that the native kernels do."""
    if shape.routing is not None:
        raise UnsupportedModel(f"{model_type}: the Triton kernels have no mixture of experts")
    if shape.family.wide_norms:
        raise UnsupportedModel(f"{model_type}: the Triton kernels do not normalize queries over all heads")
    if any(0 < window < MAX_COLUMNS for window in shape.windows):
        raise UnsupportedModel(f"{model_type}: the Triton kernels need windows of at least {MAX_COLUMNS} tokens")
