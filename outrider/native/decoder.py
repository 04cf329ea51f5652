"""A Llama-like model in the kernels' hands: its shape, its weights, and one pass."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from outrider.cache.paged import PagedCache
from outrider.core.types import SharedWeights
from outrider.errors import OutriderError, UnsupportedModel
from outrider.models.submodel import refuse_weight_update
from outrider.native.abi import MOST_DIM, MOST_SHARING, CLayer, CModel
from outrider.native.calls import Passes
from outrider.native.library import Library
from outrider.native.pack import WHOLE, Arena, PackedWeight, interleave, pack, separate, unpack

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # one block: norm, rotary attention, norm, gated SiLU
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head"
_TOGETHER: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "out": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """What the kernels must know of a model besides its weights."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    dim: int
    ffn: int
    epsilon: float
    scale: float
    rotary_scale: float
    windows: tuple[int, ...]  # [layers]; 0 sees everything

    @classmethod
    def of(cls, model: Any) -> Dimensions:
        """Read it off a transformers model.

        Raises:
            UnsupportedModel: the kernels cannot run this model.
        """
        config = model.config
        if config.model_type not in FAMILIES:
            raise UnsupportedModel(f"{config.model_type}: the kernels know {', '.join(sorted(FAMILIES))}")
        attention = model.model.layers[0].self_attn
        shape = cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            key_heads=config.num_key_value_heads,
            dim=attention.head_dim,
            ffn=config.intermediate_size,
            epsilon=config.rms_norm_eps,
            scale=attention.scaling,
            rotary_scale=model.model.rotary_emb.attention_scaling,
            windows=_windows(config),
        )
        odd = [name for name in ("hidden", "dim", "ffn") if getattr(shape, name) % 16]
        if odd or shape.dim > MOST_DIM or config.hidden_act != "silu" or getattr(config, "mlp_bias", False):
            raise UnsupportedModel(
                f"{config.model_type}: the kernels need sizes that are multiples of 16, heads of at most {MOST_DIM}"
                " and a SiLU without bias"
            )
        if shape.heads > MOST_SHARING * shape.key_heads:
            raise UnsupportedModel(
                f"{config.model_type}: the kernels take at most {MOST_SHARING} query heads for a key head, not"
                f" {shape.heads} for {shape.key_heads}"
            )
        return shape


def _windows(config: Any) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) or 0
    every = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or (every,) * config.num_hidden_layers
    if odd := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise UnsupportedModel(f"{config.model_type}: the kernels do not know layers of type {', '.join(odd)}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


class Decoder(Passes):
    """The packed weights of a model, and one pass over them."""

    def __init__(self, model: Any, library: Library, *, bits: int = 16) -> None:
        """Pack the weights of a transformers model, which is not needed afterwards.

        Args:
            model: of one of `FAMILIES`.
            library: the compiled kernels.
            bits: of a weight in a linear layer: 32 is float32, 16 bfloat16; 8 and 4 are quantised.

        Raises:
            UnsupportedModel: the kernels cannot run this model.
        """
        self.shape = Dimensions.of(model)
        super().__init__(library.code, hidden=self.shape.hidden)
        self._bits, self._arena = bits, Arena()
        state = {name: value.detach() for name, value in model.state_dict().items()}
        self._shapes = {name: value.shape for name, value in state.items()}
        self._tied = bool(model.config.tie_word_embeddings)
        self._norms = {name: value.float().clone() for name, value in state.items() if name.endswith("norm.weight")}
        self._frequency = model.model.rotary_emb.inv_freq.float().clone()
        self._packed = {name: self._pack(name, parts, state) for name, parts in self._groups().items()}
        self.dtype = WHOLE[32 if bits == 32 else 16]  # of the embedding, of keys and of values
        self._embedding = self._arena.keep(self._embed(state[_EMBEDDING]))
        self._stack: Sequence[int] = range(self.shape.layers)  # the layers that run, in this order
        self._source: Decoder | None = None  # whose weights these are, or are made from
        self._kin: weakref.WeakSet[Decoder] = weakref.WeakSet()  # made from this one
        self._memory: PagedCache | None = None
        self._close: weakref.finalize[[int], Decoder] | None = None

    @property
    def vocab(self) -> int:
        return self._packed[_HEAD].shape[0]

    def make_submodel(self, layers: Sequence[int]) -> Decoder:
        """Some of its layers, in this order, between its embedding and its head: the same weights, after `load` too."""
        other = copy(self)
        other._stack, other._source = tuple(layers), self
        other._kin, other._memory, other._close = weakref.WeakSet(), None, None
        self._kin.add(other)
        return other

    def make_requantized(self, bits: int) -> Decoder:
        """The same model in weights of 8 or 4 bits, which follow those here when they are loaded anew."""
        other = self.make_submodel(self._stack)
        other._bits, other._arena, other._packed = bits, Arena(), {}
        other._follow(self._groups())
        return other

    @property
    def bits(self) -> int:
        """Of a weight in a linear layer."""
        return self._bits

    def attach(self, memory: PagedCache) -> None:
        """Read and write this cache, which is of `dtype` and has at least as many layers as run."""
        self._memory = memory
        self._open()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace weights by the names that transformers gives them, all or none."""
        refuse_weight_update(self._source)
        for name, value in weights.items():
            if name not in self._shapes:
                raise OutriderError(f"the model has no weight {name!r}; use the names of its state_dict")
            if value.shape != self._shapes[name]:
                raise OutriderError(f"{name} has shape {tuple(value.shape)}; give {tuple(self._shapes[name])}")
        new = {name: value.detach() for name, value in weights.items()}
        if self._tied:
            both = new.get(_EMBEDDING, new.get(f"{_HEAD}.weight"))
            new |= {} if both is None else {_EMBEDDING: both, f"{_HEAD}.weight": both}
        self._norms |= {name: new[name].float().clone() for name in self._norms.keys() & new.keys()}
        stale = []
        for name, parts in self._groups().items():
            if any(f"{part}.{kind}" in new for part in parts for kind in ("weight", "bias")):
                self._packed[name] = self._pack(name, parts, {**self._unpacked(name, parts), **new})
                stale.append(name)
        if _EMBEDDING in new:
            self._embedding.copy_(self._embed(new[_EMBEDDING]))
        self._open()
        for other in self._kin:
            other._follow(stale)

    def quantised(self) -> dict[str, torch.Tensor]:
        """The weights that the kernels really multiply by, by the names that transformers gives them."""
        groups = self._groups().items()
        return {name: value for group, parts in groups for name, value in self._unpacked(group, parts).items()}

    def tables(self) -> SharedWeights:
        """What drafts trained on its states share with it."""
        return SharedWeights(
            embedding=self._embedding,
            head=unpack(self._packed[_HEAD]),
            norm=self._norms["model.norm.weight"],
            epsilon=self.shape.epsilon,
            packed=self._packed[_HEAD],
        )

    def bytes(self) -> int:
        """Memory of the weights; where some are another decoder's, of the others."""
        if self._source is None:
            tensors = (self._embedding, self._frequency, *self._norms.values(), *self._packed.values())
            return sum(tensor.nbytes for tensor in tensors)
        return 0 if self._packed is self._source._packed else sum(weight.nbytes for weight in self._packed.values())

    def read_bytes(self) -> tuple[tuple[int, ...], int]:
        """What a pass reads of weights: of each layer's, and of the head's."""
        layers = (sum(self._packed[f"{i}.{name}"].nbytes for name in _TOGETHER) for i in range(self.shape.layers))
        return tuple(layers), self._packed[_HEAD].nbytes

    def _follow(self, names: Iterable[str]) -> None:
        """The source has packed these weights anew."""
        assert self._source is not None
        if self._packed is not self._source._packed:
            groups = self._groups()
            for name in names:
                self._packed[name] = self._pack(name, groups[name], self._source._unpacked(name, groups[name]))
        self._open()

    def _groups(self) -> dict[str, tuple[str, ...]]:
        """Which layers of the model are multiplied together."""
        groups: dict[str, tuple[str, ...]] = {_HEAD: (_HEAD,)}
        for i in range(self.shape.layers):
            for name, parts in _TOGETHER.items():
                groups[f"{i}.{name}"] = tuple(f"model.layers.{i}.{part}" for part in parts)
        return groups

    def _embed(self, table: torch.Tensor) -> torch.Tensor:
        """What tokens are looked up in: where the head is the same table, what is left of it there."""
        return (unpack(self._packed[_HEAD]) if self._tied else table).to(self.dtype)

    def _pack(self, name: str, parts: Sequence[str], state: Mapping[str, torch.Tensor]) -> PackedWeight:
        weights = [state[f"{part}.weight"] for part in parts]
        biases = [state.get(f"{part}.bias") for part in parts]
        weight = interleave(*weights) if name.endswith("gate_up") else torch.cat(weights)
        bias = torch.cat([bias for bias in biases if bias is not None]) if biases[0] is not None else None
        # The head decides between tokens: four bits are too few there.
        bits = max(self._bits, 8) if name == _HEAD else self._bits
        return pack(weight, bias, bits=bits, arena=self._arena)

    def _unpacked(self, name: str, parts: Sequence[str]) -> dict[str, torch.Tensor]:
        packed = self._packed[name]
        sizes = [self._shapes[f"{part}.weight"][0] for part in parts]
        weight = unpack(packed)
        weights = separate(weight) if name.endswith("gate_up") else torch.split(weight, sizes)
        out = {f"{part}.weight": weight for part, weight in zip(parts, weights, strict=True)}
        if packed.bias is not None:
            out |= {f"{part}.bias": b for part, b in zip(parts, torch.split(packed.bias, sizes), strict=True)}
        return out

    def _open(self) -> None:
        """Hand the addresses of everything over, anew whenever something has moved."""
        if self._close is not None:
            self._close()
        if self._memory is None:
            return
        self._memory.forget()
        layers = (CLayer * len(self._stack))(*map(self._layer, self._stack))
        shape = self.shape
        sizes = (len(layers), shape.hidden, shape.heads, shape.key_heads, shape.dim, shape.ffn)
        tensors = (self._embedding, self._norms["model.norm.weight"], self._frequency)
        model = CModel(
            layers,
            *(tensor.data_ptr() for tensor in tensors),
            0,
            0,
            self._memory.address(),
            self._packed[_HEAD].c(),
            *sizes,
            torch.get_num_threads(),
            shape.epsilon,
            shape.scale,
            shape.rotary_scale,
        )
        self._handle, self._layers = self._code.outrider_open(ctypes.byref(model)), layers
        self._close = weakref.finalize(self, self._code.outrider_close, self._handle)

    def _layer(self, i: int) -> CLayer:
        """Layer `i` of the model."""

        def norm(name: str) -> int:
            weight = self._norms.get(f"model.layers.{i}.{name}.weight")
            return 0 if weight is None else weight.data_ptr()

        return CLayer(
            *(self._packed[f"{i}.{name}"].c() for name in _TOGETHER),
            *(norm(name) for name in ("input_layernorm", "post_attention_layernorm")),
            *(norm(f"self_attn.{name}") for name in ("q_norm", "k_norm")),
            self.shape.windows[i],
        )
