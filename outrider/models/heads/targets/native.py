"""Load an autoregressive draft head into the native kernels."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch

from outrider.core.config import FULL_BITS
from outrider.core.types import SharedWeights
from outrider.errors import UnsupportedModel
from outrider.models.cache.paged import PagedCache
from outrider.models.heads.description import Body, Feedback, FusionPoint
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.modules.layers import GatedMLP, Layer
from outrider.models.heads.rotary import frequencies
from outrider.models.native.arena import Arena
from outrider.models.native.kernel_model import KernelModel
from outrider.models.native.library import Library
from outrider.models.native.pack import PackedWeight, interleave, pack
from outrider.models.native.structures import CEntry, CLayer, CLinear, CModel
from outrider.models.native.support import MAX_HEAD_DIM, MAX_QUERIES_PER_KEY_HEAD


class HeadDecoder(KernelModel):
    """The packed weights of a draft head.

    It uses the target's embedding without a copy. It uses its LM head too if the target runs on the
    native kernels and the LM head has no more bits than the weights of the draft head.
    """

    def __init__(
        self,
        module: AutoregressiveHead,
        tables: SharedWeights,
        library: Library,
        kv_cache: PagedCache,
        *,
        window: int | None = None,
        bits: int = FULL_BITS,
    ) -> None:
        """Pack a module that shares `tables` and writes to `kv_cache`. The module has the dtype of `tables`.

        With `window`, each token attends only to the latest `window` tokens. With `bits` below 16
        the linear layers and the LM head are quantized.

        Raises:
            UnsupportedModel: the kernels cannot run this head.
        """
        _check_support(module.body, module.description.target_hidden)
        super().__init__(library.code, hidden=module.body.hidden)
        self._module = module
        self._window = window or 0
        self._keep_alive: list[Any] = []  # the kernels hold addresses of these
        self._arena = Arena()
        self._bits = bits if bits < FULL_BITS else 8 * tables.embedding.dtype.itemsize
        self._weights: list[PackedWeight] = []  # those that this decoder has packed
        self._head = self._lm_head(tables)
        model = self._model(tables, kv_cache)
        self._handle = self._code.outrider_open(ctypes.byref(model))
        weakref.finalize(self, self._code.outrider_close, self._handle)

    @property
    def vocab(self) -> int:
        return self._head.shape[0]

    def bytes(self) -> int:
        """Return the bytes of the linear layers, and of the LM head unless it is the target's."""
        return sum(weight.nbytes for weight in self._weights)

    def _lm_head(self, tables: SharedWeights) -> PackedWeight:
        """Return the packed LM head. The target's is used if it is the same and has no more bits."""
        description = self._module.description
        uses_target_head = not description.own_lm_head and not description.draft_vocab
        packed: PackedWeight | None = tables.packed
        if uses_target_head and packed is not None and packed.bits <= self._bits:
            return packed
        return self._pack(self._module.output_table())

    def _model(self, tables: SharedWeights, kv_cache: PagedCache) -> CModel:
        """Return the structure of the whole head. `_keep_alive` keeps the tensors that it points to."""
        module = self._module
        body = module.body
        embedding = tables.embedding
        if module.description.own_embedding:
            embedding = module.embedding.weight.to(embedding.dtype)
        radians_per_position, amplitude = frequencies(body)
        rotary_scale = torch.tensor([amplitude], dtype=torch.float32)
        ids = self._keep_tensor(module.ids.to(torch.int32))
        layers = (CLayer * body.layers)(*map(self._layer, range(body.layers)))
        entry = self._entry(tables)
        self._keep_alive += [layers, entry, kv_cache]
        return CModel(
            layer=ctypes.addressof(layers),
            embedding=self._keep_tensor(embedding).data_ptr(),
            norm=self._norm(module, "norm"),
            frequency=self._keep_tensor(radians_per_position).data_ptr(),
            rotary_scale=self._keep_tensor(rotary_scale).data_ptr(),
            entry=ctypes.addressof(entry),
            id=ids.data_ptr() if module.description.draft_vocab else 0,
            pool=kv_cache.address(),
            head=self._head.c(),
            bits=8 * embedding.dtype.itemsize,
            layers=body.layers,
            hidden=body.hidden,
            heads=body.heads,
            key_heads=body.key_heads,
            dim=body.dim,
            ffn=body.ffn,
            threads=torch.get_num_threads(),
            rotaries=1,
            rotary_dim=body.dim,
            epsilon=body.epsilon,
            scale=body.dim**-0.5,
            embedding_scale=1,
            residual_scale=1,
            logit_divisor=1,
        )

    def _entry(self, tables: SharedWeights) -> CEntry:
        """Return how the head combines embeddings and hidden states."""
        module = self._module
        fusion = module.fusion
        aux = module.description.aux_states
        fuse = CLinear()
        project = CLinear()
        if aux.fused:
            fuse = self._pack(module.fuse.weight, module.fuse.bias).c()
        if fusion.at is FusionPoint.PROJECTION:
            project = self._pack(module.project.weight, module.project.bias).c()
        fuse_norms = [norm.weight.detach().float() for norm in getattr(module, "fuse_norm", ())]
        target_hidden = module.description.target_hidden
        applies_norm = aux.final and not tables.normed_states
        return CEntry(
            fuse=fuse,
            project=project,
            last_norm=self._keep_tensor(tables.norm.float()).data_ptr() if applies_norm else 0,
            tap_norm=self._keep_tensor(torch.cat(fuse_norms)).data_ptr() if fuse_norms else 0,
            embedding_norm=self._norm(module, "embedding_norm"),
            state_norm=self._norm(module, "state_norm"),
            tapped=target_hidden * len(aux.layers),
            tap=target_hidden,
            normed=len(fuse_norms[0]) if fuse_norms else 0,
            embedding_first=fusion.embedding_first,
            zero_first=fusion.zero_first,
            residual_normed=fusion.residual_normed,
            recycle_normed=module.description.feedback is Feedback.NORMED,
        )

    def _layer(self, i: int) -> CLayer:
        """Return the packed weights of decoder layer `i`."""
        layer = self._module.layers[i]
        assert isinstance(layer, Layer)
        attention = layer.self_attn
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        weights: list[torch.Tensor] = [projection.weight for projection in projections]
        biases = [projection.bias for projection in projections if projection.bias is not None]
        return CLayer(
            qkv=self._pack(torch.cat(weights), torch.cat([*biases]) if biases else None).c(),
            out=self._pack(attention.o_proj.weight, attention.o_proj.bias).c(),
            gate_up=self._pack(interleave(mlp.gate_proj.weight, mlp.up_proj.weight)).c(),
            down=self._pack(mlp.down_proj.weight).c(),
            attention_norm=self._norm(layer, "input_layernorm"),
            mlp_norm=self._norm(layer, "post_attention_layernorm"),
            query_norm=self._norm(attention, "q_norm"),
            key_norm=self._norm(attention, "k_norm"),
            window=self._window,
        )

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        detached_bias = None if bias is None else bias.detach()
        packed = pack(weight.detach(), detached_bias, bits=self._bits, arena=self._arena)
        self._weights.append(packed)
        return packed

    def _norm(self, parent: torch.nn.Module, name: str) -> int:
        """Return the address of a norm's weights, or 0 if the norm does not exist."""
        norm = getattr(parent, name, None)
        return 0 if norm is None else self._keep_tensor(norm.weight.detach().float()).data_ptr()

    def _keep_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor that lives as long as the decoder."""
        contiguous = tensor.contiguous()
        self._keep_alive.append(contiguous)
        return contiguous


def _check_support(body: Body, target_hidden: int) -> None:
    """Raise UnsupportedModel if the kernels cannot run these decoder layers or hidden states."""
    sizes = (target_hidden, body.hidden, body.dim, body.ffn)
    if any(size % 16 for size in sizes) or body.dim > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"the native kernels need sizes that are multiples of 16 and attention heads of at most {MAX_HEAD_DIM}"
            f" dimensions; this draft head has sizes {', '.join(map(str, sizes))} and heads of {body.dim}"
        )
    if body.heads > MAX_QUERIES_PER_KEY_HEAD * body.key_heads:
        raise UnsupportedModel(
            f"the native kernels support at most {MAX_QUERIES_PER_KEY_HEAD} query heads per key"
            f" head; this draft head has {body.heads} for {body.key_heads}"
        )
    if body.attention_gate or not body.gated or body.rotary != 1:
        raise UnsupportedModel(
            "the native kernels support only fully rotary attention without a gate, and a gated"
            " MLP; this draft head has other layers"
        )
