"""What a draft can look at in a target's memory: which layer's keys, and how positions have turned them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.core import tree
from outrider.core.types import Batch, KVView, SequenceState, SharedWeights
from outrider.errors import OutriderError
from outrider.heads.config import Settings
from outrider.heads.description import Body, SharedKV
from outrider.heads.formats.llama import read_rope
from outrider.heads.modules.layers import rotate, rotation
from outrider.models.base import Target, WeightSharer

_TOKEN, _TIMES = 1, 9  # the text that a target is tried with
_LIKE = 0.05  # of the largest number, by which keys that are the same may differ in bfloat16


@torch.inference_mode()
def find_view(target: Target, tables: SharedWeights) -> SharedKV:
    """The last layer that sees a whole text.

    In a text of one token, over and over, all places look alike to every layer: values are the same, and so is whatever
    attention makes of them. So keys that are turned back by their positions must be the same, or they were turned in
    another way than is known here.

    Raises:
        OutriderError: the target shows no keys, or turns them so.
    """
    memory = tables.kv_view
    if memory is None:
        raise OutriderError(
            "kv-sharing reads the keys and values of the target, and this target does not export them; use mtp"
        )
    kinds = list(memory.layer_config.get("layer_types") or ())
    layer = max((i for i, kind in enumerate(kinds) if kind == "full_attention"), default=-1)
    assert isinstance(target, WeightSharer)
    layer = layer if layer >= 0 else target.layers - 1
    keys, values = _tried(target, memory, layer)
    if keys.shape == values.shape:
        for view in _ways(memory.layer_config, layer, keys):
            if _still(keys, view):
                return view
    raise OutriderError(
        f"the keys of this target's layer {layer} lie or turn in a way that is not known here; train mtp instead"
    )


def _tried(target: Target, memory: KVView, layer: int) -> tuple[torch.Tensor, ...]:
    """Keys and values [key heads, T, D] of a text of one token."""
    text = (_TOKEN,) * _TIMES
    batch = Batch(seqs=(SequenceState.of(text),), start=(0,), feed=(text,), draft_budget=(0,))
    target.cache.admit(0, text)
    target.score(batch, tree.empty(1, target.device))
    entries = memory.entries(layer, [0], 0, _TIMES)
    assert entries is not None
    found = tuple(each[0].float() for each in entries)
    target.cache.release(0)
    return found


def _ways(config: Mapping[str, Any], layer: int, keys: torch.Tensor) -> list[SharedKV]:
    """Ways in which positions may have turned them: as the config says, and not at all."""
    given = config.get("rope_parameters")
    if isinstance(given, dict) and "full_attention" in given:
        config = {**config, "rope_parameters": given["full_attention"]}
    still = SharedKV(layer=layer, key_heads=keys.shape[0], dim=keys.shape[2], rotary=0.0)
    try:
        theta, rope, rotary = read_rope(Settings(config))
    except OutriderError:
        return [still]
    return [
        SharedKV(layer=layer, key_heads=still.key_heads, dim=still.dim, theta=theta, rope=rope, rotary=rotary),
        still,
    ]


def _still(keys: torch.Tensor, view: SharedKV) -> bool:
    """Whether they are the same at all places when they are turned back."""
    plain = Body(layers=1, hidden=view.dim, heads=view.key_heads, key_heads=view.key_heads, dim=view.dim, ffn=1)
    body = replace(plain, theta=view.theta, rope=view.rope, rotary=view.rotary)
    back = -torch.arange(keys.shape[1], device=keys.device)
    found = rotate(keys, *rotation(back, body, torch.float32))
    return bool((found - found[:, :1]).abs().max() < _LIKE * found.abs().max())
