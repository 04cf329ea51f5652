"""Finds the keys and values of a target that a kv-sharing draft can attend to, and the rotary encoding of the keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from outrider.core import tree
from outrider.core.target import Target, WeightSharer
from outrider.core.types import Batch, DraftBudget, KVView, SequenceState, SharedWeights
from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import Body, SharedKV
from outrider.models.heads.formats.llama import read_rope
from outrider.models.heads.modules.layers import rotation
from outrider.models.torch.rotary import rotate

# The probe sequence: one token, repeated.
_TOKEN = 1
_LENGTH = 9
_TOLERANCE = 0.05  # difference of equal keys in bfloat16, relative to the largest number


FULL = "full_attention"
SLIDING = "sliding_attention"


def find_sliding_kv(target: Target, tables: SharedWeights) -> SharedKV | None:
    """Return a description of the keys and values of the last layer with a window, or None if there is no such layer.

    Raises:
        OutriderError: the layout or rotary encoding of its keys is unknown.
    """
    config = tables.kv_view.layer_config if tables.kv_view else {}
    if SLIDING not in (config.get("layer_types") or ()):
        return None
    return replace(find_shared_kv(target, tables, SLIDING), window=config["sliding_window"])


@torch.inference_mode()
def find_shared_kv(target: Target, tables: SharedWeights, layer_type: str = FULL) -> SharedKV:
    """Return a description of the keys and values of the last layer of a type.

    In a sequence that repeats one token, every layer computes the same values at all positions, and so does attention.
    So keys without their rotary encoding must be the same, too. If they are not, the encoding is an unknown one.

    Raises:
        OutriderError: the target does not export its keys, or their layout or rotary encoding is unknown.
    """
    kv_view = tables.kv_view
    if kv_view is None:
        raise OutriderError(
            "kv-sharing reads the keys and values of the target, and this target does not export them; use mtp"
        )
    assert isinstance(target, WeightSharer)
    layer_types = list(kv_view.layer_config.get("layer_types") or ())
    layers = [i for i, type_ in enumerate(layer_types) if type_ == layer_type]
    layer = layers[-1] if layers else target.layers - 1
    keys, values = _probe(target, kv_view, layer)
    if keys.shape == values.shape:
        for view in _candidates(kv_view.layer_config, layer_type, layer, keys):
            if _matches(keys, view):
                return view
    raise OutriderError(
        f"the layout or rotary encoding of the keys in layer {layer} of this target is not supported; use mtp"
    )


def _probe(target: Target, kv_view: KVView, layer: int) -> tuple[torch.Tensor, ...]:
    """Return the keys and values [key heads, T, D] of the probe sequence."""
    tokens = (_TOKEN,) * _LENGTH
    batch = Batch(seqs=(SequenceState.of(tokens),), start=(0,), feed=(tokens,), budget=DraftBudget((0,)))
    target.cache.admit(0, tokens)
    target.score(batch, tree.empty(1, target.device))
    entries = kv_view.entries(layer, [0], 0, _LENGTH)
    assert entries is not None
    keys_and_values = tuple(tensor[0].float() for tensor in entries)
    target.cache.release(0)
    return keys_and_values


def _candidates(config: Mapping[str, Any], layer_type: str, layer: int, keys: torch.Tensor) -> list[SharedKV]:
    """Return the possible rotary encodings: the one in the config, and none."""
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict) and layer_type in parameters:
        config = {**config, "rope_parameters": parameters[layer_type]}
    without_rope = SharedKV(layer=layer, key_heads=keys.shape[0], dim=keys.shape[2], rotary=0.0)
    try:
        theta, rope, rotary = read_rope(ConfigReader(config))
    except OutriderError:
        return [without_rope]
    return [replace(without_rope, theta=theta, rope=rope, rotary=rotary), without_rope]


def _matches(keys: torch.Tensor, view: SharedKV) -> bool:
    """Return whether the keys are the same at all positions after the rotary encoding of `view` is undone."""
    body = Body(
        layers=1,
        hidden=view.dim,
        heads=view.key_heads,
        key_heads=view.key_heads,
        dim=view.dim,
        ffn=1,
        theta=view.theta,
        rope=view.rope,
        rotary=view.rotary,
    )
    negative_positions = -torch.arange(keys.shape[1], device=keys.device)
    plain_keys = rotate(keys, *rotation(negative_positions, body, torch.float32))
    return bool((plain_keys - plain_keys[:, :1]).abs().max() < _TOLERANCE * plain_keys.abs().max())
