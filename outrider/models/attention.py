"""Attention over our own cache, put in place of a model's own through transformers' registry.

A pass packs the rows' columns one after another, so that every other layer of the model works on real tokens alone.
Here each row meets its own stripe of the cache, under a mask that lets a guess see its ancestors only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from outrider.cache.base import Layout, SequenceSpan
from outrider.cache.static import StaticCache
from outrider.core import tree
from outrider.errors import UnsupportedModel

NAME = "outrider"  # in transformers' registries of attention and of masks
_SETTLED = frozenset({"position_ids", "cache_position"})  # tensors that the layout has settled


@dataclass(frozen=True, slots=True, eq=False)
class MaskRule:
    """How far a layer sees, by the model's own rule: a window, a chunk, or everything before."""

    rule: Callable[..., torch.Tensor]  # (row, head, position of a column, position of an entry) -> may it be seen
    reach: int | None  # a text of up to so many tokens is seen whole; None = any text


@dataclass(frozen=True, slots=True)
class CacheReader:
    """One pass as the attention layers see it: where to write, what to read, and the masks made so far."""

    cache: StaticCache
    layout: Layout
    masks: dict[tuple[MaskRule | None, int, torch.dtype], list[torch.Tensor | None]] = field(default_factory=dict)

    groups: list[tuple[SequenceSpan, ...]] = field(init=False)  # rows that one kernel call can serve

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", _neighbours(self.layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """One layer of a pass whose shapes are fixed: row r is slot r, and all that changes lies in tensors."""

    keys: torch.Tensor  # [slots, Hkv, capacity, D]
    values: torch.Tensor
    place: torch.Tensor  # [R, L] where in its slot each column is written
    mask: torch.Tensor  # [R, 1, L, S] or with the columns repeated as for `_attention`, added; S entries are read


def look(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: object,  # sizes and offsets of transformers' own caches
) -> MaskRule:
    """Take a mask as transformers describes it to its mask makers; layers hand it on to `attend`."""
    return MaskRule(mask_function, local_size if allow_is_causal_skip else 0)


def attend(
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
    **others: object,  # dropout, windows and the like: settled in the model, by the layout or by the sight
) -> tuple[torch.Tensor, None]:
    """Write this layer's keys and values, and attend each row to what it may see.

    Returns:
        [1, T, Hq, D], as transformers' attention functions do, and no weights.
    """
    _refuse(kv, attention_mask, others)
    assert kv is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(kv, Fixed):
        return _attend_fixed(query, key, value, kv, scale=scale, softcap=softcap, sinks=s_aux), None
    keys, values = kv.cache.write(int(module.layer_idx), kv.layout, key[0], value[0])  # type: ignore[arg-type]
    sharing = query.shape[1] // key.shape[1]
    masks = _masks(kv, attention_mask, sharing, query.dtype)
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for group, mask in zip(kv.groups, masks, strict=True):
        rows, span = len(group), group[0]
        size = span.end - span.begin
        stop = max(other.start for other in group) + size
        ours = query[0, :, span.begin : group[-1].end]  # [Hq, rows * size, D]
        ours = ours.view(key.shape[1], sharing, rows, size, -1).permute(2, 0, 1, 3, 4)
        ours = ours.reshape(rows, key.shape[1], sharing * size, -1)
        stripe = slice(span.slot, span.slot + rows)
        seen = _attention(ours, keys[stripe, :, :stop], values[stripe, :, :stop], mask, scale, softcap, s_aux)
        seen = seen.reshape(rows, -1, size, value.shape[-1]).transpose(1, 2)
        out[span.begin : group[-1].end] = seen.reshape(rows * size, query.shape[1], -1)
    return out[None], None


def _attend_fixed(
    query: torch.Tensor,  # as in `attend`, T = R * L
    key: torch.Tensor,
    value: torch.Tensor,
    kv: Fixed,
    *,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    (rows, size), heads, sharing = kv.place.shape, key.shape[1], query.shape[1] // key.shape[1]
    each = torch.arange(rows, device=kv.place.device)[:, None]
    kv.keys[each, :, kv.place] = key[0].view(heads, rows, size, -1).permute(1, 2, 0, 3)
    kv.values[each, :, kv.place] = value[0].view(heads, rows, size, -1).permute(1, 2, 0, 3)
    ours = query[0].view(heads, sharing, rows, size, -1).permute(2, 0, 1, 3, 4)
    ours = ours.reshape(rows, heads, sharing * size, -1)
    mask = kv.mask.repeat(1, 1, sharing * size // kv.mask.shape[2], 1).to(query.dtype)
    stop = mask.shape[-1]
    seen = _attention(ours, kv.keys[:rows, :, :stop], kv.values[:rows, :, :stop], mask, scale, softcap, sinks)
    seen = seen.view(rows, heads, sharing, size, -1).permute(0, 3, 1, 2, 4)
    return seen.reshape(1, rows * size, heads * sharing, -1)


def _neighbours(layout: Layout) -> list[tuple[SequenceSpan, ...]]:
    """Runs of rows in neighbouring slots with as many columns each."""
    runs: list[tuple[SequenceSpan, ...]] = []
    for span in layout.spans:
        size, last = span.end - span.begin, runs[-1][-1] if runs else None
        if last and span.slot == last.slot + 1 and size == last.end - last.begin:
            runs[-1] += (span,)
        elif size:
            runs.append((span,))
    return runs


def _refuse(kv: CacheReader | Fixed | None, sight: object, others: dict[str, object]) -> None:
    """Stop at what would silently be left out of the attention."""
    if kv is None:
        raise UnsupportedModel("its layers do not hand keyword arguments on to their attention")
    if sight is not None and not isinstance(sight, MaskRule):
        raise UnsupportedModel("its layers make masks of their own")
    if odd := sorted(k for k, v in others.items() if isinstance(v, torch.Tensor) and k not in _SETTLED):
        raise UnsupportedModel(f"its attention also takes {', '.join(odd)}")


def _attention(
    query: torch.Tensor,  # [R, Hkv, G * L, D]: the G query heads that share a key head stand one below another
    key: torch.Tensor,  # [R, Hkv, S, D]
    value: torch.Tensor,
    mask: torch.Tensor | None,  # [R, 1, G * L, S], added
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,  # [Hq]
) -> torch.Tensor:
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


def _masks(kv: CacheReader, sight: MaskRule | None, sharing: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """One mask per group, made once a pass for all layers that see as far."""
    wanted = (sight, sharing, dtype)
    if wanted not in kv.masks:
        kv.masks[wanted] = [_mask(kv.layout, group, sight, sharing, dtype) for group in kv.groups]
    return kv.masks[wanted]


def _mask(
    layout: Layout, group: tuple[SequenceSpan, ...], sight: MaskRule | None, sharing: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """[R, 1, G * L, S], 0 where a column may see a cached entry and -inf elsewhere; None where all see all."""
    starts, size, device = [span.start for span in group], group[0].end - group[0].begin, layout.positions.device
    stop = max(starts) + size
    whole = sight is None or sight.reach is None or stop <= sight.reach
    if whole and size == 1 and layout.ancestors is None and min(starts) == max(starts):
        return None
    columns = tree.upload(starts, device)[:, None] + torch.arange(size, device=device)  # [R, L]
    entries = torch.arange(stop, device=device)
    seen = entries <= columns[..., None]  # [R, L, S]
    where = entries.expand(len(group), stop)  # the position of each entry
    if layout.ancestors is not None:
        where = where.clone()
        for r, span in enumerate(group):
            _restrict(layout, span, seen[r], where[r])
    if sight is not None and not whole:
        positions = layout.positions[group[0].begin : group[-1].end].view(len(group), size)
        row = torch.zeros((), dtype=torch.int64, device=device)
        seen &= sight.rule(row, row, positions[..., None], where[:, None])
    added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return added.repeat(1, sharing, 1)[:, None]


def _restrict(layout: Layout, span: SequenceSpan, seen: torch.Tensor, where: torch.Tensor) -> None:
    """Let the row's guesses see, among guesses, their ancestors alone; and put guesses where their depth says."""
    assert layout.ancestors is not None
    first, last = span.first, span.first + span.nodes
    related = layout.ancestors[layout.spans.index(span)]
    if span.nodes:
        seen[-span.nodes :, span.base : span.base + last] = related[first:last, :last]
        where[span.base : span.base + last] = span.base - 1 + related[:last].sum(-1)
