"""A draft that follows the target's states, in the native kernels' hands."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from outrider.cache.paged import PagedCache
from outrider.core.types import SharedWeights
from outrider.errors import UnsupportedModel
from outrider.heads.description import Body, Feedback, FusionPoint
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.modules.layers import Gated, Layer
from outrider.heads.rotary import frequencies
from outrider.native.abi import MAX_HEAD_DIM, MAX_QUERIES_PER_KEY_HEAD, CEntry, CLayer, CLinear, CModel
from outrider.native.calls import Passes
from outrider.native.library import Library
from outrider.native.pack import Arena, PackedWeight, interleave, pack


class HeadDecoder(Passes):
    """Packed weights, and one pass over them; the target's tables are not copied."""

    def __init__(self, module: AutoregressiveHead, tables: SharedWeights, library: Library, memory: PagedCache) -> None:
        """Pack a module that was lent `tables`; its entries are in `memory`. All are of one type.

        Raises:
            UnsupportedModel: the kernels cannot run it.
        """
        body, it = module.body, module.description
        _refuse(body, it.target_hidden)
        super().__init__(library.code, hidden=body.hidden)
        self._module, self._keep, self._arena = module, list[Any](), Arena()
        dtype = tables.embedding.dtype
        self._bits = 8 * dtype.itemsize
        shared = not it.own_lm_head and not it.draft_vocab  # the target's whole table, which lies packed already
        self._head = tables.packed if shared else self._pack(module.output_table())
        embedding = self._kept(module.embedding.weight.to(dtype) if it.own_embedding else tables.embedding)
        speeds, amplitude = frequencies(body)
        frequency, ids = self._kept(speeds), self._kept(module.ids.to(torch.int32))
        layers = (CLayer * body.layers)(*map(self._layer, range(body.layers)))
        entry = self._entry(tables)
        model = CModel(
            layer=layers,
            embedding=embedding.data_ptr(),
            norm=self._norm(module, "norm"),
            frequency=frequency.data_ptr(),
            entry=ctypes.addressof(entry),
            id=ids.data_ptr() if it.draft_vocab else 0,
            pool=memory.address(),
            head=self._head.c(),
            layers=body.layers,
            hidden=body.hidden,
            heads=body.heads,
            key_heads=body.key_heads,
            dim=body.dim,
            ffn=body.ffn,
            threads=torch.get_num_threads(),
            epsilon=body.epsilon,
            scale=body.dim**-0.5,
            rotary_scale=amplitude,
        )
        self._keep += [layers, entry, memory]
        self._handle = self._code.outrider_open(ctypes.byref(model))
        weakref.finalize(self, self._code.outrider_close, self._handle)

    @property
    def vocab(self) -> int:
        return self._head.shape[0]

    def _entry(self, tables: SharedWeights) -> CEntry:
        module, join, it = self._module, self._module.join, self._module.description
        fuse, project, size = CLinear(), CLinear(), it.target_hidden
        if it.aux_states.fused:
            fuse = self._pack(module.fuse.weight, module.fuse.bias).c()
        if join.at is FusionPoint.PROJECTION:
            project = self._pack(module.project.weight, module.project.bias).c()
        norms = [norm.weight.detach().float() for norm in getattr(module, "fuse_norm", ())]
        return CEntry(
            fuse=fuse,
            project=project,
            last_norm=self._kept(tables.norm.float()).data_ptr() if it.aux_states.final else 0,
            tap_norm=self._kept(torch.cat(norms)).data_ptr() if norms else 0,
            embedding_norm=self._norm(module, "embedding_norm"),
            state_norm=self._norm(module, "state_norm"),
            tapped=size * len(it.aux_states.layers),
            tap=size,
            normed=len(norms[0]) if norms else 0,
            embedding_first=join.embedding_first,
            zero_first=join.zero_first,
            residual_normed=join.residual_normed,
            recycle_normed=module.description.feedback is Feedback.NORMED,
        )

    def _layer(self, i: int) -> CLayer:
        layer = self._module.layers[i]
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        assert isinstance(mlp, Gated)
        parts = attention.q_proj, attention.k_proj, attention.v_proj
        biases = [part.bias for part in parts if part.bias is not None]
        weights: list[torch.Tensor] = [part.weight for part in parts]
        return CLayer(
            qkv=self._pack(torch.cat(weights), torch.cat([*biases]) if biases else None).c(),
            out=self._pack(attention.o_proj.weight, attention.o_proj.bias).c(),
            gate_up=self._pack(interleave(mlp.gate_proj.weight, mlp.up_proj.weight)).c(),
            down=self._pack(mlp.down_proj.weight).c(),
            attention_norm=self._norm(layer, "input_layernorm"),
            mlp_norm=self._norm(layer, "post_attention_layernorm"),
            query_norm=self._norm(attention, "q_norm"),
            key_norm=self._norm(attention, "k_norm"),
            window=0,
        )

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        given = None if bias is None else bias.detach()
        packed = pack(weight.detach(), given, bits=self._bits, arena=self._arena)
        self._keep.append(packed)
        return packed

    def _norm(self, of: torch.nn.Module, name: str) -> int:
        """The address of a norm's weights; 0 where there is none."""
        norm = getattr(of, name, None)
        return 0 if norm is None else self._kept(norm.weight.detach().float()).data_ptr()

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        self._keep.append(tensor.contiguous())
        return self._keep[-1]  # type: ignore[no-any-return]


def _refuse(body: Body, tapped: int) -> None:
    """Refuse decoder layers that the kernels do not know, on states of a width that they do not."""
    if tapped % 16 or body.hidden % 16 or body.dim % 16 or body.ffn % 16 or body.dim > MAX_HEAD_DIM:
        raise UnsupportedModel(f"the kernels need sizes that are multiples of 16 and heads of at most {MAX_HEAD_DIM}")
    if body.heads > MAX_QUERIES_PER_KEY_HEAD * body.key_heads:
        raise UnsupportedModel(
            f"the native kernels support at most {MAX_QUERIES_PER_KEY_HEAD} query heads per key head; this draft has"
            f" {body.heads} for {body.key_heads}"
        )
    if body.attention_gate or not body.gated or body.rotary != 1:
        raise UnsupportedModel("the kernels know whole rotary heads, attention without a gate and a gated perceptron")
