"""Attention over our own cache, put in place of a model's own through transformers' registry.

A pass packs the rows' columns one after another, so that every other layer of the model works on real tokens alone.
Here each row meets its own stripe of the cache, under a mask that lets a guess see its ancestors only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from outrider.cache.base import Layout, Span
from outrider.cache.static import StaticCache

NAME = "outrider"  # in transformers' attention registry


@dataclass(frozen=True, slots=True)
class Reader:
    """One pass as the attention layers see it: where to write, what to read, and the masks made so far."""

    cache: StaticCache
    layout: Layout
    masks: dict[tuple[int | None, int, torch.dtype], list[torch.Tensor | None]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)  # what each layer asked for

    def groups(self) -> list[tuple[Span, ...]]:
        """Runs of rows that one kernel call can serve: neighbouring slots, and as many columns each."""
        runs: list[tuple[Span, ...]] = []
        for span in self.layout.spans:
            size, last = span.end - span.begin, runs[-1][-1] if runs else None
            if last and span.slot == last.slot + 1 and size == last.end - last.begin:
                runs[-1] += (span,)
            elif size:
                runs.append((span,))
        return runs


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, D]
    attention_mask: torch.Tensor | None,
    *,
    kv: Reader,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,  # position_ids, dropout and the like: settled in the model or by the layout
) -> tuple[torch.Tensor, None]:
    """Write this layer's keys and values, and attend each row to what it may see.

    Returns:
        [1, T, Hq, D], as transformers' attention functions do, and no weights.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    kv.windows[layer] = sliding_window
    keys, values = kv.cache.write(layer, kv.layout, key[0], value[0])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sharing = query.shape[1] // key.shape[1]
    masks = _masks(kv, sliding_window, sharing, query.dtype)
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[-1])
    for group, mask in zip(kv.groups(), masks, strict=True):
        rows, span = len(group), group[0]
        size = span.end - span.begin
        stop = max(other.start for other in group) + size
        ours = query[0, :, span.begin : group[-1].end]  # [Hq, rows * size, D]
        ours = ours.view(key.shape[1], sharing, rows, size, -1).permute(2, 0, 1, 3, 4)
        ours = ours.reshape(rows, key.shape[1], sharing * size, -1)
        stripe = slice(span.slot, span.slot + rows)
        seen = _attention(ours, keys[stripe, :, :stop], values[stripe, :, :stop], mask, scale, softcap, s_aux)
        seen = seen.view(rows, -1, size, value.shape[-1]).transpose(1, 2)
        out[span.begin : group[-1].end] = seen.reshape(rows * size, query.shape[1], -1)
    return out[None], None


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


def _masks(kv: Reader, window: int | None, sharing: int, dtype: torch.dtype) -> list[torch.Tensor | None]:
    """One mask per group, made once a pass for all layers with the same window."""
    wanted = (window, sharing, dtype)
    if wanted not in kv.masks:
        kv.masks[wanted] = [_mask(kv.layout, group, window, sharing, dtype) for group in kv.groups()]
    return kv.masks[wanted]


def _mask(
    layout: Layout, group: tuple[Span, ...], window: int | None, sharing: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """[R, 1, G * L, S], 0 where a column may see a cached entry and -inf elsewhere; None where all see all."""
    starts, size, device = [span.start for span in group], group[0].end - group[0].begin, layout.positions.device
    stop = max(starts) + size
    if size == 1 and layout.ancestors is None and min(starts) == max(starts) and (window is None or stop <= window):
        return None
    columns = torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)  # [R, L]
    entries = torch.arange(stop, device=device)
    seen = entries <= columns[..., None]  # [R, L, S]
    where = entries.expand(len(group), stop)  # the position of each entry
    if layout.ancestors is not None:
        where = where.clone()
        for r, span in enumerate(group):
            _restrict(layout, span, seen[r], where[r])
    if window is not None:
        positions = layout.positions[group[0].begin : group[-1].end].view(len(group), size)
        seen &= positions[..., None] - where[:, None] < window
    added = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return added.repeat(1, sharing, 1)[:, None]


def _restrict(layout: Layout, span: Span, seen: torch.Tensor, where: torch.Tensor) -> None:
    """Let the row's guesses see, among guesses, their ancestors alone; and put guesses where their depth says."""
    assert layout.ancestors is not None
    first, last = span.first, span.first + span.nodes
    related = layout.ancestors[layout.spans.index(span)]
    if span.nodes:
        seen[-span.nodes :, span.base : span.base + last] = related[first:last, :last]
        where[span.base : span.base + last] = span.base - 1 + related[:last].sum(-1)
