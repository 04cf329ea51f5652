"""Attention over Outrider's KV cache, registered in transformers in place of the model's own.

A pass packs the tokens of all sequences, so all other layers run without padding. Attention reads
the slot of each sequence, with a mask that shows a draft token only its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.cache import Layout, SequenceSpan
from outrider.errors import UnsupportedModel

if TYPE_CHECKING:
    from outrider.models.cache.static import StaticCache

NAME = "outrider"  # in the attention and mask registries of transformers
_ALIGNED = 64  # number of keys that every kernel takes
_SPLIT_QUERIES = 16  # most tokens of a sequence that are faster as sequences of one token, measured on an H100
_REUSED = 1 << 16  # added to the layer index for each earlier call of a module in the same pass
# Tensor inputs that the layout replaces, or that only select columns of the logits.
_REPLACED = frozenset({"position_ids", "cache_position", "logits_to_keep"})


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """The mask rule of a layer: full, sliding or chunked attention."""

    rule: Callable[..., torch.Tensor]  # (sequence, head, query position, key position) -> visible
    reach: int | None  # tokens; shorter sequences are fully visible; None: all sequences are

    def __getitem__(self, _index: object) -> MaskRule:
        """Return the rule, which holds for every sequence and head. Indexers take a part of their mask."""
        return self


@dataclass(frozen=True, slots=True, eq=False)
class ChosenKeys:
    """The keys that an indexer has chosen for each token, in sparse attention."""

    chosen: tuple[torch.Tensor, ...]  # for each group of sequences, [R, L, S] bool


class PositionBias(Protocol):
    """A bias of the attention scores that depends on positions. The layers of a model may share one."""

    def __call__(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return the bias [R, Hq, L, S] between positions [R, L] and [R, S]. L may be 1: it is the same for all."""


@dataclass(frozen=True, slots=True)
class CacheReader:
    """One pass for the attention layers: the cache, the layout, and the masks that were made so far."""

    cache: StaticCache
    layout: Layout
    masks: dict[tuple[MaskRule | None, int, torch.dtype, PositionBias | None], list[torch.Tensor | None]] = field(
        default_factory=dict
    )
    groups: list[tuple[SequenceSpan, ...]] = field(init=False)  # sequences that one kernel call processes
    calls: dict[int, int] = field(default_factory=dict)  # calls so far, by the layer index of the module

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _adjacent_groups(self.layout))

    def layer(self, module: torch.nn.Module) -> int:
        """Return the layer of the cache for a call of a module. A module that is used in several layers has several."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        earlier_calls = self.calls.get(index, 0)
        self.calls[index] = earlier_calls + 1
        return index + earlier_calls * _REUSED


class Scoring(NamedTuple):
    """How the products of queries and keys become weights."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [Hq]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """One layer of a pass of fixed shape. Sequence r is in slot r, and everything that changes is in tensors."""

    keys: torch.Tensor  # [slots, Hkv, capacity, D]
    values: torch.Tensor
    entries: torch.Tensor  # [R, L] entry of the slot where each token is written
    mask: torch.Tensor  # [R, 1, L, S], or repeated as in `_attention`; added to the scores
    grouped: bool = False  # `has_grouped_kernel`


def receive_mask_rule(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: object,  # sizes and offsets of transformers caches
) -> MaskRule:
    """Receive the mask rule from transformers. Layers pass it on to `attend`."""
    return MaskRule(mask_function, local_size if allow_is_causal_skip else 0)


def attend(  # noqa: PLR0913 - the interface of attention functions of transformers
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: MaskRule | None,
    *,
    kv: CacheReader | Fixed | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: ChosenKeys | None = None,
    **others: object,  # dropout, windows and others, which the model, the layout or the mask rule handle
) -> tuple[torch.Tensor, None]:
    """Write the keys and values of this layer and compute attention for each sequence.

    Returns:
        The output [1, T, Hq, D] and no weights, as attention functions of transformers do.
    """
    _check_inputs(kv, attention_mask, others if isinstance(indices, ChosenKeys) else others | {"indices": indices})
    assert kv is not None
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if isinstance(kv, Fixed):
        return _attend_fixed(query, key, value, kv, scoring), None
    layer = kv.layer(module)
    out = attend_layer(kv, layer, query, key, value, scoring, mask_rule=attention_mask, chosen_keys=indices)
    return out, None


def attend_layer(  # noqa: PLR0913 - what a layer has, and what it may have
    kv: CacheReader,
    layer: int,
    query: torch.Tensor,  # as in `attend`
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *,
    mask_rule: MaskRule | None,
    bias: PositionBias | None = None,
    chosen_keys: ChosenKeys | None = None,
) -> torch.Tensor:
    """Write the keys and values of layer number `layer` and return attention for each sequence, [1, T, Hq, D]."""
    keys, values = kv.cache.write(layer, kv.layout, key[0], value[0])
    sharing = query.shape[1] // key.shape[1]
    masks = _masks(kv, mask_rule, sharing, query.dtype, bias)
    if chosen_keys is not None:
        chosen = [keys.repeat(1, sharing, 1)[:, None] for keys in chosen_keys.chosen]
        masks = [_where(keys, mask, query.dtype) for keys, mask in zip(chosen, masks, strict=True)]
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for group, mask in zip(kv.groups, masks, strict=True):
        span = group[0]
        stop = max(other.start for other in group) + span.end - span.begin
        slots = slice(span.slot, span.slot + len(group))
        attend_group(out, group, query, keys[slots, :, :stop], values[slots, :, :stop], mask, scoring)
    return out[None]


def attend_group(
    out: torch.Tensor,  # [T, Hq, D], written in place
    group: Sequence[SequenceSpan],  # R sequences of L columns
    query: torch.Tensor,  # [1, Hq, T, D]
    keys: torch.Tensor,  # [R, Hkv, S, D]
    values: torch.Tensor,
    mask: torch.Tensor | None,  # broadcastable to [R, Hkv, G * L, S], added
    scoring: Scoring,
) -> None:
    """Compute attention for the columns of adjacent sequences with equal numbers of columns."""
    batch_size = len(group)
    begin, end = group[0].begin, group[-1].end
    size = group[0].end - begin
    heads = keys.shape[1]
    sharing = query.shape[1] // heads
    queries = query[0, :, begin:end]  # [Hq, R * L, D]
    queries = queries.view(heads, sharing, batch_size, size, -1).permute(2, 0, 1, 3, 4)
    queries = queries.reshape(batch_size, heads, sharing * size, -1)
    attended = _attention(queries, keys, values, mask, scoring)
    attended = attended.reshape(batch_size, -1, size, values.shape[-1]).transpose(1, 2)
    out[begin:end] = attended.reshape(batch_size * size, query.shape[1], -1)


def _attend_fixed(
    query: torch.Tensor,  # as in `attend`, T = R * L
    key: torch.Tensor,
    value: torch.Tensor,
    kv: Fixed,
    scoring: Scoring,
) -> torch.Tensor:
    """Do what `attend` does, in a pass of fixed shape."""
    rows, size = kv.entries.shape
    heads = key.shape[1]
    sharing = query.shape[1] // heads
    slots = torch.arange(rows, device=kv.entries.device)[:, None]
    kv.keys[slots, :, kv.entries] = key[0].view(heads, rows, size, -1).permute(1, 2, 0, 3)
    kv.values[slots, :, kv.entries] = value[0].view(heads, rows, size, -1).permute(1, 2, 0, 3)
    stop = kv.mask.shape[-1]
    keys = kv.keys[:rows, :, :stop]
    values = kv.values[:rows, :, :stop]
    one_query_each = size == 1 or (rows == 1 and size <= _SPLIT_QUERIES)
    if kv.grouped and one_query_each and scoring.softcap is None and scoring.sinks is None:
        queries = query[0].transpose(0, 1)[:, :, None]  # [T, Hq, 1, D]
        tokens = queries.shape[0]
        attended = functional.scaled_dot_product_attention(
            queries,
            keys.expand(tokens, -1, -1, -1),  # the tokens of one sequence share its keys
            values.expand(tokens, -1, -1, -1),
            attn_mask=kv.mask[:, 0, :size].reshape(tokens, 1, 1, stop).to(query.dtype),
            scale=scoring.scale,
            enable_gqa=True,
        )
        return attended.reshape(1, tokens, heads * sharing, -1)
    queries = query[0].view(heads, sharing, rows, size, -1).permute(2, 0, 1, 3, 4)
    queries = queries.reshape(rows, heads, sharing * size, -1)
    mask = kv.mask.repeat(1, 1, sharing * size // kv.mask.shape[2], 1).to(query.dtype)
    attended = _attention(queries, keys, values, mask, scoring)
    attended = attended.view(rows, heads, sharing, size, -1).permute(0, 3, 1, 2, 4)
    # For one row the result is a view, and AFMoE does not take one that is not contiguous.
    return attended.reshape(1, rows * size, heads * sharing, -1).contiguous()


def has_grouped_kernel(keys: torch.Tensor, sharing: int) -> bool:
    """Return whether a fused kernel takes one query per sequence, and keys that query heads share, on this device.

    It divides long caches among the processors of a GPU. The other fused kernels use one for each
    key head, which is slow if there are few sequences.

    Args:
        keys: [slots, Hkv, capacity, D].
        sharing: query heads per key head.
    """
    if not keys.is_cuda:
        return False
    _, heads, _, dim = keys.shape
    query = keys.new_empty(1, heads * sharing, 1, dim)
    few_keys = keys[:1, :, :_ALIGNED]
    mask = keys.new_zeros(1, 1, 1, few_keys.shape[2])
    params = torch.backends.cuda.SDPAParams(query, few_keys, few_keys, mask, 0.0, False, sharing > 1)
    return torch.backends.cuda.can_use_cudnn_attention(params)


def _adjacent_groups(layout: Layout) -> list[tuple[SequenceSpan, ...]]:
    """Return groups of sequences in adjacent slots with equal numbers of tokens."""
    groups: list[tuple[SequenceSpan, ...]] = []
    for span in layout.spans:
        size = span.end - span.begin
        last = groups[-1][-1] if groups else None
        if last and span.slot == last.slot + 1 and size == last.end - last.begin:
            groups[-1] += (span,)
        elif size:
            groups.append((span,))
    return groups


def _check_inputs(kv: CacheReader | Fixed | None, mask_rule: object, others: Mapping[str, object]) -> None:
    """Raise for inputs that this attention would ignore."""
    if kv is None:
        raise UnsupportedModel("its layers do not pass keyword arguments to their attention")
    if mask_rule is not None and not isinstance(mask_rule, MaskRule):
        raise UnsupportedModel("its layers make their own masks")
    tensors = {name for name, value in others.items() if isinstance(value, torch.Tensor)}
    if unknown := sorted(tensors - _REPLACED):
        raise UnsupportedModel(f"its attention also takes {', '.join(unknown)}")


def _attention(
    query: torch.Tensor,  # [R, Hkv, G * L, D]: the G query heads of a key head are stacked
    key: torch.Tensor,  # [R, Hkv, S, D]
    value: torch.Tensor,
    mask: torch.Tensor | None,  # [R, 1, G * L, S], added
    scoring: Scoring,
) -> torch.Tensor:
    scale, softcap, sinks = scoring
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    weights = (query @ key.transpose(-1, -2)) * scale
    if softcap is not None:
        weights = softcap * torch.tanh(weights / softcap)
    if mask is not None:
        weights = weights + mask
    if sinks is None:
        return weights.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
    rows, heads, columns, _ = query.shape
    sink = sinks.view(heads, -1, 1).expand(-1, -1, columns * heads // len(sinks)).reshape(1, heads, columns, 1)
    weights = torch.cat([weights, sink.expand(rows, -1, -1, -1).to(weights.dtype)], -1)
    return weights.softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype) @ value


def _masks(
    kv: CacheReader, mask_rule: MaskRule | None, sharing: int, dtype: torch.dtype, bias: PositionBias | None
) -> list[torch.Tensor | None]:
    """Return one mask per group. It is made once per pass for all layers with the same rule and bias."""
    key = (mask_rule, sharing, dtype, bias)
    if key not in kv.masks:
        kv.masks[key] = [_mask(kv.layout, group, mask_rule, sharing, dtype, bias) for group in kv.groups]
    return kv.masks[key]


def sequence_masks(kv: CacheReader, mask_rule: MaskRule, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return one mask [R, 1, L, S] per group, also where everything is visible."""
    masks = _masks(kv, mask_rule, 1, dtype, None)
    return [_zeros(kv, group, dtype) if mask is None else mask for group, mask in zip(kv.groups, masks, strict=True)]


def _zeros(kv: CacheReader, group: tuple[SequenceSpan, ...], dtype: torch.dtype) -> torch.Tensor:
    size = group[0].end - group[0].begin
    stop = max(span.start for span in group) + size
    return torch.zeros(len(group), 1, size, stop, dtype=dtype, device=kv.layout.positions.device)


def _where(chosen: torch.Tensor, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask that hides all keys but the chosen ones, and those that `mask` hides."""
    visible = torch.zeros((), dtype=dtype, device=chosen.device) if mask is None else mask
    return torch.where(chosen, visible, -torch.inf)


def _mask(
    layout: Layout,
    group: tuple[SequenceSpan, ...],
    mask_rule: MaskRule | None,
    sharing: int,
    dtype: torch.dtype,
    bias: PositionBias | None,
) -> torch.Tensor | None:
    """Return the mask [R, 1, G * L, S]: 0 for visible entries, -inf for others. None: everything is visible.

    With a bias it is [R, Hkv, G * L, S], and the bias is added to it.
    """
    starts = [span.start for span in group]
    size = group[0].end - group[0].begin
    device = layout.positions.device
    stop = max(starts) + size
    causal = mask_rule is None or mask_rule.reach is None or stop <= mask_rule.reach
    if causal and size == 1 and layout.ancestors is None and min(starts) == max(starts) and bias is None:
        return None
    columns = tree.upload(starts, device)[:, None] + torch.arange(size, device=device)  # [R, L]
    entries = torch.arange(stop, device=device)
    visible = entries <= columns[..., None]  # [R, L, S]
    entry_positions = entries.expand(len(group), stop)
    if layout.ancestors is not None:
        entry_positions = entry_positions.clone()
        for r, span in enumerate(group):
            _restrict_to_ancestors(layout, span, visible[r], entry_positions[r])
    positions = layout.positions[group[0].begin : group[-1].end].view(len(group), size)
    if mask_rule is not None and not causal:
        zero = torch.zeros((), dtype=torch.int64, device=device)  # index of sequence and head
        visible &= mask_rule.rule(zero, zero, positions[..., None], entry_positions[:, None])
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    if bias is not None:
        biased = bias(positions, entry_positions).to(dtype) + mask[:, None]  # [R, Hq, L, S]
        return biased.view(len(group), -1, sharing * size, stop)
    return mask.repeat(1, sharing, 1)[:, None]


def _restrict_to_ancestors(
    layout: Layout, span: SequenceSpan, visible: torch.Tensor, entry_positions: torch.Tensor
) -> None:
    """Restrict the draft tokens of a sequence to their ancestors, and set their positions from their depth.

    `visible` [L, S] and `entry_positions` [S] are changed in place.
    """
    assert layout.ancestors is not None
    if not span.nodes:
        return
    first = span.first
    last = span.first + span.nodes
    ancestors = layout.ancestors[layout.spans.index(span)]
    visible[-span.nodes :, span.base : span.base + last] = ancestors[first:last, :last]
    entry_positions[span.base : span.base + last] = span.base - 1 + ancestors[:last].sum(-1)
