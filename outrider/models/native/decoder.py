"""A Llama-like model on the native kernels: its weights, and the passes over some or all of its layers."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch.nn import functional

from outrider.errors import OutriderError
from outrider.models.cache.paged import PagedCache
from outrider.models.native.blocks import PackedMatrix
from outrider.models.native.columns import Columns
from outrider.models.native.decoder_structures import layer_structures, model_structure
from outrider.models.native.dimensions import Dimensions
from outrider.models.native.experts import PackedExperts
from outrider.models.native.kernel_model import KernelModel
from outrider.models.native.library import Library
from outrider.models.native.low_rank import LowRankHead, factorize
from outrider.models.native.pack import PANEL
from outrider.models.native.repack import unpacked_parts
from outrider.models.native.structures import CLinear, address
from outrider.models.native.weights import DecoderWeights
from outrider.models.torch.submodel import refuse_weight_update
from outrider.models.torch.weights import Weights

_DAMPING = 0.01  # share of the mean importance that is added to that of each input


class Decoder(KernelModel):
    """A model with packed weights, a KV cache, and the layers that run.

    Decoders that were made from another one share its weights, or have copies with fewer bits.
    """

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
        self.shape = Dimensions.of(config.get_text_config(decoder=True))
        super().__init__(library.code, hidden=self.shape.hidden)
        self.weights = DecoderWeights(weights, config, self.shape, bits=bits)
        self._layers: Sequence[int] = range(self.shape.layers)  # indices of those that run, in order
        self._source: Decoder | None = None  # the decoder that this one shares weights with or was quantized from
        self._derived: weakref.WeakSet[Decoder] = weakref.WeakSet()  # decoders made from this one
        self._memory: PagedCache | None = None
        self._close: weakref.finalize[[int], Decoder] | None = None
        self._ids: torch.Tensor | None = None  # [Vd] int32 ids of the tokens that have logits; None: all
        self._factors: LowRankHead | None = None  # chooses the tokens with exact logits; None: all have them
        self._candidates = 0  # panels of 32 tokens that get exact logits, if there are factors
        self._importance: Mapping[str, torch.Tensor] = {}  # [inputs] of each packed weight, for its quantization

    @property
    def vocab(self) -> int:
        return self.weights.head.shape[0]

    def make_submodel(self, layers: Sequence[int]) -> Decoder:
        """Return a decoder of some layers, in this order. It shares the weights, also after `load`."""
        other = copy(self)
        other._layers = tuple(layers)
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
        other = self.make_submodel(self._layers)
        other._importance = {name: value + _DAMPING * value.mean() for name, value in moments.items()}
        other.weights = self.weights.empty_copy(bits)
        other._update_from_source(self.weights.joined)
        return other

    def keep_tokens(self, ids: torch.Tensor) -> None:
        """Compute logits for the tokens `ids` [Vd] only, which ascend. Weights cannot be replaced any more."""
        self.weights = self.weights.with_tokens(ids)
        self._ids = ids.to(torch.int32)
        self._open()

    def factorize_head(self, states: torch.Tensor) -> LowRankHead:
        """Return low-rank factors of the LM head. `states` [N, hidden] are outputs of the last layer to fit."""
        norm = self.weights.final_norm
        head = self.weights.head
        inputs = functional.rms_norm(states, norm.shape, norm, self.shape.epsilon)
        return factorize(unpacked_parts(head), head.bias, inputs)

    def rank_tokens(self, factors: LowRankHead, candidates: int) -> None:
        """Compute exact logits for the likeliest tokens only. Weights cannot be replaced any more.

        Args:
            factors: of the LM head. They give the other logits, and choose which panels of 32 tokens are exact.
            candidates: the number of panels.
        """
        self._factors = factors
        self._candidates = min(candidates, -(-self.vocab // PANEL))
        self._open()

    def input_moments(self, passes: Iterable[Columns]) -> dict[str, torch.Tensor]:
        """Return the sums of the squares of the inputs [inputs] of each packed weight, in passes over typical texts.

        The first token of a text does not count. Experts have no moments, as each sees other tokens.
        """
        shape = self.shape
        sizes = {"qkv": shape.hidden, "out": shape.heads * shape.dim, "gate_up": shape.hidden, "down": shape.ffn}
        sums = torch.zeros(len(self._layers), sum(sizes.values()))
        for columns in passes:
            self.run(columns, moments=sums)
        moments = {}
        for i, row in zip(self._layers, sums, strict=True):
            parts = dict(zip(sizes, row.split(list(sizes.values())), strict=True))
            for part, value in (*parts.items(), ("value", parts["qkv"])):
                if isinstance(self.weights.packed.get(f"{i}.{part}"), PackedMatrix):
                    moments[f"{i}.{part}"] = value.clone()
        return moments

    def key_offset(self) -> torch.Tensor:
        """Return the biases [layers, key heads, dim] of key dimensions that hardly turn; 0 for the others.

        A term that all keys of a head share changes no attention weight, so a cache may leave it
        out, unless scores are capped or keys are normalized after the bias.
        """
        shape = self.shape
        offset = torch.zeros(len(self._layers), shape.key_heads, shape.dim)
        begin = shape.heads * shape.dim
        for i, keys in zip(self._layers, offset, strict=True):
            packed = self.weights.packed[f"{i}.qkv"]
            assert not isinstance(packed, PackedExperts)
            bias = packed.bias
            if bias is None or shape.score_cap or self.weights.norm(i, "self_attn.k_norm") is not None:
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
        if types := self.weights.types:
            raise OutriderError(
                f"this target keeps its {', '.join(types)} weights and takes no new ones; use"
                " the folder of the unquantized model"
            )
        changed = self.weights.load(weights)
        self._open()
        for other in self._derived:
            other._update_from_source(changed)

    def discard(self) -> None:
        """Free the memory of the linear layers and the embedding, which `load` must fill before the next pass."""
        self.weights.discard()
        for other in self._derived:
            other.weights.discard()

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
        return 0 if self.shape.routing is None else sum(i in self.shape.routing.layers for i in self._layers)

    def bytes(self) -> int:
        """Return the bytes of the weights, without those of the decoder that this one was made from."""
        if self._source is not None and self.weights is self._source.weights:
            return 0
        own = self.weights.nbytes if self._source is None else self.weights.packed_bytes
        return own + (self._factors.nbytes if self._factors else 0)

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """Return the bytes of weights that a pass over one token reads: of each layer, and of the LM head."""
        head = self.weights.head.nbytes
        if self._factors is not None:
            head = self._factors.nbytes + head * self._candidates * PANEL // self.vocab
        return tuple(self.weights.read_bytes()), head

    def _update_from_source(self, names: Iterable[str]) -> None:
        """Update weights that the source has packed again."""
        assert self._source is not None
        if self.weights is not self._source.weights:
            self.weights.requantize(self._source.weights, names, self._importance, last=self._layers[-1])
            self._factors = None  # those of the old LM head
        self._open()

    def _open(self) -> None:
        """Open the model in the kernels. This is called again whenever an address has changed."""
        if self._close is not None:
            self._close()
        if self._memory is None:
            return
        self._memory.forget()
        layers = layer_structures(self.weights, self._layers)
        model = model_structure(
            self.weights,
            layers,
            pool=self._memory.address(),
            id=address(self._ids),
            reduce=self._factors.reduce.c() if self._factors else CLinear(),
            rank=self._factors.rank.c() if self._factors else CLinear(),
            candidates=self._candidates,
        )
        self._handle = self._code.outrider_open(ctypes.byref(model))
        self._layer_structures = layers  # the kernels keep its address
        self._close = weakref.finalize(self, self._code.outrider_close, self._handle)
