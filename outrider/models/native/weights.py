"""The packed weights of a decoder: packed from a checkpoint, replaced by new values, or quantized from others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from outrider.core.types import SharedWeights
from outrider.models.native.arena import Arena
from outrider.models.native.blocks import PackedMatrix, can_pack_together, dequantize_blocks, pack_blocks
from outrider.models.native.dimensions import Dimensions
from outrider.models.native.experts import PackedExperts
from outrider.models.native.joined import (
    HEAD,
    MIN_SENSITIVE_BITS,
    bits_of,
    dense_weight,
    joined_layers,
    memory_of,
    pack_joined,
    unpack_joined,
    weight_name,
)
from outrider.models.native.pack import FLOAT_DTYPES, pack
from outrider.models.native.repack import repack, unpacked_matrix
from outrider.models.torch.gguf_linear import BlockWeight, use_dequantizer
from outrider.models.torch.weights import Weight, Weights, check_weights, tied_weight


class DecoderWeights:
    """The packed linear layers, the norms and the embedding of a decoder."""

    def __init__(self, weights: Weights, config: Any, shape: Dimensions, *, bits: int) -> None:
        """Pack the weights of a checkpoint, which are not needed afterward. The arguments are those of `Decoder`."""
        use_dequantizer(dequantize_blocks)
        self.shape = shape
        self.bits = bits
        self.types = weights.types  # of GGUF, if weights are in blocks
        self.dtype = FLOAT_DTYPES[32 if bits == 32 else 16]  # of the embedding
        self.packed: dict[str, PackedMatrix | PackedExperts] = {}
        self._body = weights.body
        self._arena = Arena()
        self._tied = bool(config.tie_word_embeddings)
        names = [name for name in weights if name.startswith((f"{self._body}.", f"{HEAD}."))]
        self.shapes = {name: weights.shape(name) for name in names}
        self.joined = joined_layers(weights, shape)
        self.norms = {
            name: self._norm_factors(value)
            for name in names
            if name.endswith("norm.weight") and isinstance(value := weights[name], torch.Tensor)
        }
        with weights.reading([weight_name(part) for parts in self.joined.values() for part in parts]) as count:
            for name, parts in self.joined.items():
                self.packed[name] = pack_joined(name, parts, weights, bits=bits, arena=self._arena)
                for part in parts:
                    weights.release(weight_name(part))
                    count(weight_name(part))
        table = weights[self._embedding_name]
        self.table = self._pack_table(table)  # the embedding, if it is the LM head or in blocks
        self.embedding = None if self.table else self._arena.keep(self._scaled(dense_weight(table).to(self.dtype)))
        weights.release(self._embedding_name)

    @property
    def _embedding_name(self) -> str:
        return f"{self._body}.embed_tokens.weight"

    @property
    def head(self) -> PackedMatrix:
        """The LM head."""
        head = self.packed[HEAD]
        assert not isinstance(head, PackedExperts)
        return head

    @property
    def final_norm(self) -> torch.Tensor:
        """[hidden] what the norm before the LM head multiplies by."""
        return self.norms[f"{self._body}.norm.weight"]

    def norm(self, layer: int, name: str | None) -> torch.Tensor | None:
        """Return what a norm of a layer multiplies by; None: the layer has no such norm."""
        return self.norms.get(f"{self._body}.layers.{layer}.{name}.weight")

    def with_tokens(self, ids: torch.Tensor) -> DecoderWeights:
        """Return the weights with an LM head for the tokens `ids` [Vd] only. The others are shared."""
        bias = None if self.head.bias is None else self.head.bias[ids]
        other = copy(self)
        rows = pack(self.head.unpack()[ids], bias, bits=bits_of(HEAD, self.bits), arena=self._arena)
        other.packed = {**self.packed, HEAD: rows}
        return other

    def empty_copy(self, bits: int) -> DecoderWeights:
        """Return a copy without linear layers, which `requantize` adds. It shares norms and embedding.

        `bits` are those of the linear layers.
        """
        other = copy(self)
        other.bits = bits
        other.packed = {}
        other._arena = Arena()
        return other

    def requantize(
        self, source: DecoderWeights, names: Iterable[str], importance: Mapping[str, torch.Tensor], *, last: int
    ) -> None:
        """Pack linear layers of `source` with the bits of these weights. An older value is overwritten.

        Args:
            source: the weights with more bits.
            names: of the packed weights.
            importance: [inputs] of packed weights, as in `quantize`.
            last: the last layer that runs.
        """
        for name in names:
            value = source.packed[name]
            memory = memory_of(self.packed.get(name), self._arena)
            if isinstance(value, PackedExperts):
                self.packed[name] = replace(value, packed=repack(value.packed, self.bits, memory))
                continue
            bits = bits_of(name, self.bits)
            if name == f"{last}.down":  # no later layer reduces its error, and it is a small part of the weights
                bits = max(bits, MIN_SENSITIVE_BITS)
            self.packed[name] = repack(value, bits, memory, importance.get(name))

    def load(self, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Replace weights, by their names in transformers, in the memory of the old ones.

        Returns:
            The names of the packed weights that have changed.

        Raises:
            OutriderError: a weight does not fit. Nothing has changed then.
        """
        check_weights(weights, self.shapes)
        new = {name: value.detach() for name, value in weights.items()}
        if self._tied and (tied := tied_weight(new, self._embedding_name, f"{HEAD}.weight")) is not None:
            new[self._embedding_name] = tied
            new[f"{HEAD}.weight"] = tied
        for name in self.norms.keys() & new.keys():
            self.norms[name] = self._norm_factors(new[name])
        changed = []
        for name, parts in self.joined.items():
            own = {key for part in parts for key in (weight_name(part), f"{part}.bias") if key in self.shapes}
            given = own & new.keys()
            if not given:
                continue
            old = self.packed[name]
            values = new if given == own else {**unpack_joined(name, parts, old, self.shapes), **new}
            self.packed[name] = pack_joined(name, parts, values, bits=self.bits, arena=self._arena, old=old)
            changed.append(name)
        if self.embedding is None:
            self.table = self.head
        elif self._embedding_name in new:
            self.embedding.copy_(self._scaled(new[self._embedding_name].to(self.dtype)))
        return changed

    def discard(self) -> None:
        """Free the memory of the linear layers and the embedding, which `load` must fill before the next pass."""
        self._arena.discard()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the kernels read, by name."""
        tensors: dict[str, torch.Tensor | None] = {"embedding": self.embedding, **self.norms}
        for name, value in self.packed.items():
            packed = value.packed if isinstance(value, PackedExperts) else value
            tensors |= {f"{name}.{part}": getattr(packed, part) for part in ("words", "scale", "minimum", "bias")}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def unpacked(self) -> dict[str, torch.Tensor]:
        """Return the linear layers after quantization, by their names in transformers."""
        weights = {}
        for name, parts in self.joined.items():
            weights.update(unpack_joined(name, parts, self.packed[name], self.shapes))
        return weights

    def share(self) -> SharedWeights:
        """Return the weights that draft heads share. Quantized tables are expanded to `dtype`."""
        head = unpacked_matrix(self.head, self.dtype)
        embedding = self.embedding
        if embedding is None:
            assert self.table is not None
            embedding = self._scaled(head if self.table is self.head else unpacked_matrix(self.table, self.dtype))
        return SharedWeights(
            embedding=embedding,
            head=head,
            norm=self.final_norm,
            epsilon=self.shape.epsilon,
            softcap=self.shape.logit_cap or None,
            packed=self.head,
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the linear layers."""
        return sum(packed.nbytes for packed in self.packed.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        table = self.table if self.table is not self.head else None
        tensors = (self.embedding, table, self.shape.rotary.frequency, *self.norms.values())
        return self.packed_bytes + sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts of all layers; 0: no layer has experts."""
        return sum(packed.nbytes for packed in self.packed.values() if isinstance(packed, PackedExperts))

    def read_bytes(self) -> list[int]:
        """Return the bytes [layers] of linear layers that a pass over one token reads, without the LM head."""
        layers = [0] * self.shape.layers
        routing = self.shape.routing
        for name, packed in self.packed.items():
            if name == HEAD:
                continue
            size = packed.nbytes
            if isinstance(packed, PackedExperts):
                assert routing is not None
                size = size * routing.top // routing.experts
            layers[int(name.partition(".")[0])] += size
        return layers

    def _norm_factors(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a float32 copy of what a norm multiplies by."""
        return weight.float() + 1 if self.shape.family.norms_plus_one else weight.float().clone()

    def _scaled(self, table: torch.Tensor) -> torch.Tensor:
        """Return an embedding table with its factor."""
        scale = self.shape.table_scale
        return table if scale == 1 else table * torch.tensor(scale, dtype=self.dtype)

    def _pack_table(self, table: Weight) -> PackedMatrix | None:
        """Return the embedding table in panels, which is the LM head if they are tied; None: it is dense."""
        if self._tied:
            return self.head
        if not isinstance(table, BlockWeight) or not can_pack_together([table]):
            return None
        return pack_blocks([table], arena=self._arena)
