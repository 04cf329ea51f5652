"""A Llama-like model on the native kernels: its dimensions, its packed weights, and its forward pass."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch.nn import functional

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.models.cache.paged import PagedCache
from outrider.models.native.blocks import PackedBlocks, can_pack_together, dequantize_blocks, half_blocks, pack_blocks
from outrider.models.native.calls import Passes
from outrider.models.native.columns import Columns
from outrider.models.native.dimensions import Dimensions
from outrider.models.native.experts import PackedExperts, pack_experts
from outrider.models.native.library import Library
from outrider.models.native.low_rank import LowRankHead, factorize
from outrider.models.native.pack import (
    FLOAT_DTYPES,
    PANEL,
    Arena,
    PackedWeight,
    Refill,
    interleave,
    pack,
    pack_parts,
    quantize,
    separate,
)
from outrider.models.native.rows import can_pack_rows, pack_rows
from outrider.models.native.structures import CLayer, CLinear, CModel, address
from outrider.models.torch.gguf_linear import BlockWeight, use_dequantizer
from outrider.models.torch.gguf_made import ExpertWeight
from outrider.models.torch.submodel import layer_stack, refuse_weight_update
from outrider.models.torch.weights import Weight, Weights, check_weights, tied_weight
from outrider.runtime.grouping import instances

_HEAD = "lm_head"
_VALUES_AT_ONCE = 1 << 20  # of a packed weight that is unpacked: 4 MiB of float32
_DAMPING = 0.01  # share of the mean importance that is added to that of each input
_WHOLE = frozenset({"bias", "order"})  # parts of a packed weight that do not belong to its panels
Packed = PackedWeight | PackedBlocks
_log = logging.getLogger("outrider")
_OUT, _DOWN = "self_attn.o_proj", "mlp.down_proj"
# The parts of a layer with experts, by the name of the packed weight.
_EXPERTS = {"router": ("mlp.gate",), "gate_up": ("mlp.experts.gate_up_proj",), "down": ("mlp.experts.down_proj",)}


def _split_values(state: Weights, shape: Dimensions) -> frozenset[int]:
    """Return the layers whose value projection has another block type than the query and key projections."""
    split = set()
    if len(shape.family.attention) == 1:  # one layer for queries, keys and values
        return frozenset()
    for i in range(shape.layers):
        key, value = (state[f"{state.body}.layers.{i}.{part}.weight"] for part in shape.family.attention[1:])
        if isinstance(key, BlockWeight) and isinstance(value, BlockWeight) and key.kind != value.kind:
            split.add(i)
    return frozenset(split)


def _weight_name(part: str) -> str:
    """Return the name of the weight of a linear layer, or of the weights of all experts."""
    return part if ".experts." in part else f"{part}.weight"


def _dense(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def _parts(packed: Packed) -> Iterator[torch.Tensor]:
    """Yield the rows of a packed weight. Only some panels at a time are unpacked."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    panels = max(_VALUES_AT_ONCE // (PANEL * packed.shape[1]), 1)
    for first in range(0, len(packed.words), panels):
        part: dict[str, Any] = {name: tensors[name][first : first + panels] for name in tensors.keys() - _WHOLE}
        rows = min(panels * PANEL, packed.shape[0] - first * PANEL)
        yield replace(packed, shape=(rows, packed.shape[1]), **part).unpack()


def _expand(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return a packed weight as a matrix [outputs, inputs]."""
    matrix = torch.empty(packed.shape, dtype=dtype)
    first = 0
    for part in _parts(packed):
        matrix[first : first + len(part)] = part
        first += len(part)
    return matrix


def _requantized(
    packed: Packed, bits: int, arena: Arena | Refill, importance: torch.Tensor | None = None
) -> PackedWeight:
    if bits not in FLOAT_DTYPES:
        return quantize(packed.c(), packed.shape, packed.bias, bits=bits, arena=arena, importance=importance)
    return pack_parts(_parts(packed), packed.shape, packed.bias, bits=bits, arena=arena)


def _interleaved_rows(size: int) -> torch.Tensor:
    """Return the order of rows in which `interleave` puts two matrices of `size` rows, one above the other."""
    numbers = torch.arange(2 * size)[:, None]
    return interleave(numbers[:size], numbers[size:]).flatten()


def body_name(model: Any) -> str:
    """Return the name of the module with the decoder layers of a model of transformers."""
    return layer_stack(model)[0].rpartition(".")[0]


class Decoder(Passes):
    """The packed weights of a model and its forward pass."""

    def __init__(self, weights: Weights, config: Any, library: Library, *, bits: int = 16) -> None:
        """Pack the weights of a model. They are not needed afterward.

        Args:
            weights: the weights of a model of one of `FAMILIES`.
            config: its configuration.
            library: the compiled kernels.
            bits: bits per weight of linear layers: 32 (float32), 16 (bfloat16), 8 or 4 (quantized).

        Raises:
            UnsupportedModel: the kernels do not support this model.
        """
        self._body = weights.body
        self.shape = Dimensions.of(config.get_text_config(decoder=True))
        super().__init__(library.code, hidden=self.shape.hidden)
        self._bits = bits
        self._arena = Arena()
        use_dequantizer(dequantize_blocks)
        names = [name for name in weights if name.startswith((f"{self._body}.", f"{_HEAD}."))]
        self._shapes = {name: weights.shape(name) for name in names}
        self._tied = bool(config.tie_word_embeddings)
        self._split_values = _split_values(weights, self.shape)
        self._norms = {
            name: self._norm_factors(value)
            for name in names
            if name.endswith("norm.weight") and isinstance(value := weights[name], torch.Tensor)
        }
        self._packed: dict[str, Packed | PackedExperts] = {}
        groups = self._groups()
        with weights.reading([_weight_name(part) for parts in groups.values() for part in parts]) as count:
            for name, parts in groups.items():
                self._packed[name] = self._pack(name, parts, weights)
                for part in parts:
                    weights.release(_weight_name(part))
                    count(_weight_name(part))
        self.dtype = FLOAT_DTYPES[32 if bits == 32 else 16]  # of the embedding
        table = weights[self._embedding_name]
        self._table = self._pack_table(table)  # the embedding, if it is the LM head or in blocks
        self._embedding = None if self._table else self._arena.keep(self._scaled(_dense(table).to(self.dtype)))
        weights.release(self._embedding_name)
        self.types = weights.types  # of GGUF, if weights are in blocks
        self._stack: Sequence[int] = range(self.shape.layers)  # indices of the layers that run, in order
        self._source: Decoder | None = None  # the decoder that this one shares weights with or was quantized from
        self._derived: weakref.WeakSet[Decoder] = weakref.WeakSet()  # decoders made from this one
        self._memory: PagedCache | None = None
        self._close: weakref.finalize[[int], Decoder] | None = None
        self._ids: torch.Tensor | None = None  # [Vd] int32 ids of the tokens that have logits; None: all
        self._factors: LowRankHead | None = None  # chooses the tokens with exact logits; None: all have them
        self._importance: Mapping[str, torch.Tensor] = {}  # [inputs] of each packed weight, for its quantization
        self._candidates = 0  # panels of 32 tokens that get exact logits, if there are factors

    @property
    def _embedding_name(self) -> str:
        return f"{self._body}.embed_tokens.weight"

    @property
    def vocab(self) -> int:
        return self._packed_head.shape[0]

    @property
    def _packed_head(self) -> Packed:
        head = self._packed[_HEAD]
        assert not isinstance(head, PackedExperts)
        return head

    def make_submodel(self, layers: Sequence[int]) -> Decoder:
        """Return a decoder of some layers, in this order. It shares the weights, also after `load`."""
        other = copy(self)
        other._stack = tuple(layers)
        other._source = self
        other._derived = weakref.WeakSet()
        other._memory = None
        other._close = None
        self._derived.add(other)
        return other

    def make_requantized(self, bits: int, moments: Mapping[str, torch.Tensor]) -> Decoder:
        """Return a copy with weights of 8 or 4 bits. `load` updates the copy, too.

        Args:
            bits: of the copy.
            moments: as `input_moments` returns them. Weights without any have scales that follow from their range.
        """
        other = self.make_submodel(self._stack)
        other._bits = bits
        other._importance = {name: value + _DAMPING * value.mean() for name, value in moments.items()}
        other._arena = Arena()
        other._packed = {}
        other._update_from_source(self._groups())
        return other

    @property
    def bits(self) -> int:
        """Bits per weight of linear layers."""
        return self._bits

    @property
    def _head_bits(self) -> int:
        """Bits per weight of the LM head: at least 8, because 4 would change the output too much."""
        return max(self._bits, 8)

    def keep_tokens(self, ids: torch.Tensor) -> None:
        """Compute logits for the tokens `ids` [Vd] only, which ascend. Weights cannot be replaced any more."""
        head = self._packed_head
        bias = None if head.bias is None else head.bias[ids]
        rows = pack(head.unpack()[ids], bias, bits=self._head_bits, arena=self._arena)
        self._packed = {**self._packed, _HEAD: rows}
        self._ids = ids.to(torch.int32)
        self._open()

    def input_moments(self, passes: Iterable[Columns]) -> dict[str, torch.Tensor]:
        """Return the sums of the squares of the inputs [inputs] of each packed weight, in passes over typical texts.

        The first token of a text does not count. Experts have no moments, as each sees other tokens.
        """
        shape = self.shape
        sizes = {"qkv": shape.hidden, "out": shape.heads * shape.dim, "gate_up": shape.hidden, "down": shape.ffn}
        sums = torch.zeros(len(self._stack), sum(sizes.values()))
        for columns in passes:
            self.run(columns, moments=sums)
        moments = {}
        for i, row in zip(self._stack, sums, strict=True):
            parts = dict(zip(sizes, row.split(list(sizes.values())), strict=True))
            for part, value in (*parts.items(), ("value", parts["qkv"])):
                if isinstance(self._packed.get(f"{i}.{part}"), Packed):
                    moments[f"{i}.{part}"] = value.clone()
        return moments

    def factorize_head(self, states: torch.Tensor) -> LowRankHead:
        """Return low-rank factors of the LM head. `states` [N, hidden] are outputs of the last layer to fit."""
        norm = self._norms[f"{self._body}.norm.weight"]
        inputs = functional.rms_norm(states, norm.shape, norm, self.shape.epsilon)
        head = self._packed_head
        return factorize(_parts(head), head.bias, inputs)

    def rank_tokens(self, factors: LowRankHead, candidates: int) -> None:
        """Compute exact logits for the likeliest tokens only. Weights cannot be replaced any more.

        Args:
            factors: of the LM head. They give the other logits, and choose which panels of 32 tokens are exact.
            candidates: the number of panels.
        """
        self._factors = factors
        self._candidates = min(candidates, -(-self.vocab // PANEL))
        self._open()

    def key_offset(self) -> torch.Tensor:
        """Return the biases [layers, key heads, dim] of key dimensions that hardly turn; 0 for the others.

        A term that all keys of a head share changes no attention weight, so a cache may leave it
        out, unless scores are capped or keys are normalized after the bias.
        """
        shape = self.shape
        offset = torch.zeros(len(self._stack), shape.key_heads, shape.dim)
        begin = shape.heads * shape.dim
        for i, keys in zip(self._stack, offset, strict=True):
            packed = self._packed[f"{i}.qkv"]
            assert not isinstance(packed, PackedExperts)
            bias = packed.bias
            if bias is None or shape.score_cap or f"{self._body}.layers.{i}.self_attn.k_norm.weight" in self._norms:
                continue
            keys += bias[begin : begin + keys.numel()].view_as(keys)
            keys *= shape.rotary.still_factors(i, shape.dim)
        return offset

    def attach(self, memory: PagedCache) -> None:
        """Use this KV cache. It has at least as many layers as this decoder."""
        self._memory = memory
        self._open()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights, by their names in transformers. Nothing changes if one of them does not fit.

        The new values take the memory of the old ones.

        Raises:
            OutriderError: a weight does not fit, or the weights of this decoder cannot change.
        """
        refuse_weight_update(self._source)
        if self._ids is not None or self._factors is not None:
            raise OutriderError("a draft model with a reduced LM head takes no new weights; load it again")
        if self.types:
            raise OutriderError(
                f"this target keeps its {', '.join(self.types)} weights and takes no new ones; use"
                " the folder of the unquantized model"
            )
        check_weights(weights, self._shapes)
        new = {name: value.detach() for name, value in weights.items()}
        if self._tied and (tied := tied_weight(new, self._embedding_name, f"{_HEAD}.weight")) is not None:
            new[self._embedding_name] = tied
            new[f"{_HEAD}.weight"] = tied
        for name in self._norms.keys() & new.keys():
            self._norms[name] = self._norm_factors(new[name])
        stale = []
        for name, parts in self._groups().items():
            keys = {key for part in parts for key in (_weight_name(part), f"{part}.bias") if key in self._shapes}
            if changed := keys & new.keys():
                state = new if changed == keys else {**self._unpacked(name, parts), **new}
                self._packed[name] = self._pack(name, parts, state)
                stale.append(name)
        if self._embedding is None:
            self._table = self._packed_head
        elif self._embedding_name in new:
            self._embedding.copy_(self._scaled(new[self._embedding_name].to(self.dtype)))
        self._open()
        for other in self._derived:
            other._update_from_source(stale)

    def discard(self) -> None:
        """Free the memory of the linear layers and the embedding, which `load` must fill before the next pass."""
        self._arena.discard()
        for other in self._derived:
            other._arena.discard()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the kernels read, by name."""
        tensors: dict[str, torch.Tensor | None] = {"embedding": self._embedding, **self._norms}
        for name, value in self._packed.items():
            packed = value.packed if isinstance(value, PackedExperts) else value
            tensors |= {f"{name}.{part}": getattr(packed, part) for part in ("words", "scale", "minimum", "bias")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @property
    def names(self) -> frozenset[str]:
        """The names of all weights, as `load` takes them."""
        return frozenset(self._shapes)

    def quantized_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights after quantization, by their names in transformers."""
        weights = {}
        for group, parts in self._groups().items():
            weights.update(self._unpacked(group, parts))
        return weights

    def touched_experts(self) -> float | None:
        """Return the distinct experts that the last pass used, the mean over layers with experts; None: no experts."""
        layers = self._routed_layers
        return self._code.outrider_touched_experts(self._handle) / layers if layers else None

    def chosen_experts(self, columns: int) -> list[torch.Tensor]:
        """Return the experts [columns, top] that each column of the last pass chose, for each layer with experts."""
        routing = self.shape.routing
        if routing is None or not self._routed_layers:
            return []
        choices = torch.empty(self._routed_layers, columns, routing.top, dtype=torch.int32)
        self._code.outrider_copy_choices(self._handle, choices.data_ptr())
        return list(choices.long())

    @property
    def _routed_layers(self) -> int:
        """Number of layers with experts, among those that run."""
        return 0 if self.shape.routing is None else sum(i in self.shape.routing.layers for i in self._stack)

    def share_weights(self) -> SharedWeights:
        """Return the weights that draft heads share. Quantized tables are expanded to `dtype`."""
        packed = self._packed_head
        head = _expand(packed, self.dtype)
        embedding = self._embedding
        if embedding is None:
            assert self._table is not None
            embedding = self._scaled(head if self._table is packed else _expand(self._table, self.dtype))
        return SharedWeights(
            embedding=embedding,
            head=head,
            norm=self._norms[f"{self._body}.norm.weight"],
            epsilon=self.shape.epsilon,
            softcap=self.shape.logit_cap or None,
            packed=packed,
        )

    def bytes(self) -> int:
        """Return the bytes of the weights, without those of the decoder that this one was made from."""
        if self._source is None:
            separate_table = self._table if self._table is not self._packed[_HEAD] else None
            tensors = (
                self._embedding,
                separate_table,
                self.shape.rotary.frequency,
                *self._norms.values(),
                *self._packed.values(),
                self._factors,
            )
            return sum(tensor.nbytes for tensor in tensors if tensor is not None)
        if self._packed is self._source._packed:
            return 0
        return sum(weight.nbytes for weight in (*self._packed.values(), self._factors) if weight is not None)

    def expert_bytes(self) -> int:
        """Return the bytes of all experts of all layers. 0: no layer has experts."""
        return sum(packed.nbytes for packed in self._packed.values() if isinstance(packed, PackedExperts))

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Return the bytes of weights that a pass over one token reads: of each layer, and of the LM head."""
        layers = [0] * self.shape.layers
        routing = self.shape.routing
        for name, packed in self._packed.items():
            if name == _HEAD:
                continue
            size = packed.nbytes
            if isinstance(packed, PackedExperts):
                assert routing is not None
                size = size * routing.top // routing.experts
            layers[int(name.partition(".")[0])] += size
        head = self._packed_head.nbytes
        if self._factors is not None:
            head = self._factors.nbytes + head * self._candidates * PANEL // self.vocab
        return tuple(layers), head

    def _update_from_source(self, names: Iterable[str]) -> None:
        """Update weights that the source has packed again."""
        assert self._source is not None
        if self._packed is not self._source._packed:
            for name in names:
                self._packed[name] = self._requantize(name, self._source._packed[name])
            self._factors = None  # those of the old LM head
        self._open()

    def _requantize(self, name: str, source: Packed | PackedExperts) -> Packed | PackedExperts:
        """Return a weight of the source with the bits of this decoder."""
        if isinstance(source, PackedExperts):
            return replace(source, packed=_requantized(source.packed, self._bits, self._memory_for(name)))
        # No later layer reduces the error of the last one, which is a small part of the weights.
        bits = self._head_bits if name == f"{self._stack[-1]}.down" else self._bits_of(name)
        return _requantized(source, bits, self._memory_for(name), self._importance.get(name))

    def _bits_of(self, name: str) -> int:
        """Return the bits per weight of linear layers that are packed together."""
        if name.endswith("router"):
            return 32  # with rounded weights, tokens would choose other experts
        return self._head_bits if name == _HEAD else self._bits

    def _memory_for(self, name: str) -> Arena | Refill:
        """Return memory for a weight: that of its older value if there is one."""
        old = self._packed.get(name)
        packed = old.packed if isinstance(old, PackedExperts) else old
        return Refill(packed) if isinstance(packed, PackedWeight) else self._arena

    def _groups(self) -> dict[str, tuple[str, ...]]:
        """Return the linear layers that are packed together, by the name of the packed weight."""
        groups: dict[str, tuple[str, ...]] = {_HEAD: (_HEAD,)}
        for i in range(self.shape.layers):
            has_experts = self.shape.routing is not None and i in self.shape.routing.layers
            family = self.shape.family
            packed = {"qkv": family.attention, "out": (_OUT,), "gate_up": family.mlp, "down": (_DOWN,)}
            for name, parts in (packed | _EXPERTS if has_experts else packed).items():
                groups[f"{i}.{name}"] = tuple(f"{self._body}.layers.{i}.{part}" for part in parts)
            if i in self._split_values:
                *query_key, value = groups[f"{i}.qkv"]
                groups[f"{i}.qkv"] = tuple(query_key)
                groups[f"{i}.value"] = (value,)
        return groups

    def _norm_factors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of what a norm multiplies by."""
        return weight.float() + 1 if self.shape.family.norms_plus_one else weight.float().clone()

    def _scaled(self, table: torch.Tensor) -> torch.Tensor:
        """Return an embedding table with its factor."""
        scale = self.shape.table_scale
        return table if scale == 1 else table * torch.tensor(scale, dtype=self.dtype)

    def _pack_table(self, table: Weight) -> Packed | None:
        """Return the embedding table in panels, which is the LM head if they are tied; None: it is dense."""
        if self._tied:
            return self._packed_head
        if not isinstance(table, BlockWeight) or not can_pack_together([table]):
            return None
        return pack_blocks([table], arena=self._arena)

    def _pack(self, name: str, parts: Sequence[str], state: Mapping[str, Weight]) -> Packed | PackedExperts:
        """Pack the linear layers `parts` together. GGUF blocks of one type stay as they are.

        An older value of the same name is overwritten, so that its memory is used again.
        """
        weights = [state[_weight_name(part)] for part in parts]
        arena = self._memory_for(name)
        gate_up = name.endswith("gate_up")
        if ".experts." in parts[0]:
            experts = weights[0]
            assert isinstance(experts, torch.Tensor | ExpertWeight)
            return pack_experts(experts, gated=gate_up, bits=self._bits, arena=arena)
        biases = [bias for part in parts if isinstance(bias := state.get(f"{part}.bias"), torch.Tensor)]
        bias = torch.cat(biases) if biases else None
        blocks = instances(weights, BlockWeight)
        types = {weight.kind for weight in blocks}
        order = _interleaved_rows(sum(weight.shape[0] for weight in weights) // 2) if gate_up else None
        if len(blocks) == len(weights) and can_pack_together(blocks):
            return pack_blocks(blocks, bias, order=order, arena=self._arena)
        if blocks:
            _log.info("%s: weights of type %s are converted to %d bits", name, ", ".join(sorted(types)), self._bits)
        dense = list(map(_dense, weights))
        if self._bits == 32 and all(weight.dtype == torch.float16 for weight in dense) and not name.endswith("router"):
            return pack_blocks(list(map(half_blocks, dense)), bias, order=order, arena=self._arena)
        bits = self._bits_of(name)
        if can_pack_rows(dense, bits):
            return pack_rows(dense, bias, bits=bits, order=order, arena=arena)
        weight = torch.cat(dense)
        if gate_up:
            weight = interleave(*weight.chunk(2))
        return pack(weight, bias, bits=bits, arena=arena)

    def _unpacked(self, name: str, parts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the weights and biases of the linear layers `parts` from their packed weight."""
        packed = self._packed[name]
        if isinstance(packed, PackedExperts):
            return {parts[0]: packed.unpack()}
        sizes = [self._shapes[f"{part}.weight"][0] for part in parts]
        weight = packed.unpack()
        if name.endswith("gate_up"):
            weight = torch.cat(separate(weight))
        weights = torch.split(weight, sizes)
        state = {f"{part}.weight": weight for part, weight in zip(parts, weights, strict=True)}
        if packed.bias is not None:
            for part, bias in zip(parts, torch.split(packed.bias, sizes), strict=True):
                state[f"{part}.bias"] = bias
        return state

    def _open(self) -> None:
        """Open the model in the kernels. This is called again whenever an address has changed."""
        if self._close is not None:
            self._close()
        if self._memory is None:
            return
        self._memory.forget()
        layers = (CLayer * len(self._stack))(*map(self._layer, self._stack))
        shape = self.shape
        is_rounded = isinstance(self._table, PackedWeight)
        model = CModel(
            layer=ctypes.addressof(layers),
            embedding=address(self._embedding),
            norm=self._norms[f"{self._body}.norm.weight"].data_ptr(),
            frequency=shape.rotary.frequency.data_ptr(),
            rotary_scale=shape.rotary.scale.data_ptr(),
            id=address(self._ids),
            pool=self._memory.address(),
            head=self._packed[_HEAD].c(),
            table=self._table.c() if self._table else CLinear(),
            reduce=self._factors.reduce.c() if self._factors else CLinear(),
            rank=self._factors.rank.c() if self._factors else CLinear(),
            candidates=self._candidates,
            bits=8 * self.dtype.itemsize,
            layers=len(layers),
            hidden=shape.hidden,
            heads=shape.heads,
            key_heads=shape.key_heads,
            dim=shape.dim,
            ffn=shape.ffn,
            threads=torch.get_num_threads(),
            rotaries=len(shape.rotary.frequency),
            rotary_dim=shape.rotary.dim,
            gelu=shape.gelu,
            epsilon=shape.epsilon,
            scale=shape.scale,
            rounds_table=is_rounded,
            table_scale=float(torch.tensor(shape.table_scale, dtype=self.dtype if is_rounded else torch.float32)),
            embedding_scale=shape.embedding_scale,
            residual_scale=shape.residual_scale,
            logit_divisor=shape.logit_divisor,
            score_cap=shape.score_cap,
            logit_cap=shape.logit_cap,
        )
        self._handle = self._code.outrider_open(ctypes.byref(model))
        self._layers = layers  # the kernels keep its address
        self._close = weakref.finalize(self, self._code.outrider_close, self._handle)

    def _layer(self, i: int) -> CLayer:
        def norm(name: str | None) -> int:
            return address(self._norms.get(f"{self._body}.layers.{i}.{name}.weight"))

        family = self.shape.family
        routing = self.shape.routing
        router = self._packed.get(f"{i}.router")
        return CLayer(
            qkv=self._packed[f"{i}.qkv"].c(),
            out=self._packed[f"{i}.out"].c(),
            gate_up=self._packed[f"{i}.gate_up"].c(),
            down=self._packed[f"{i}.down"].c(),
            value=self._packed[f"{i}.value"].c() if i in self._split_values else CLinear(),
            router=router.c() if router else CLinear(),
            attention_norm=norm(family.attention_norm),
            mlp_norm=norm(family.mlp_norm),
            attention_post_norm=norm(family.attention_post_norm),
            mlp_post_norm=norm(family.mlp_post_norm),
            query_norm=norm("self_attn.q_norm"),
            key_norm=norm("self_attn.k_norm"),
            window=self.shape.windows[i],
            wide_norms=family.wide_norms,
            rotary=self.shape.rotary.table[i],
            top=routing.top if routing else 0,
            normalized=routing.normalized if routing else 0,
        )
