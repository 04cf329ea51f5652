"""Sparse attention with an indexer (DeepSeek-V3.2 and models with its layers).

The indexer of a layer scores all keys for each token, and the attention reads the best `index_topk`
of them. The choice depends on the token and its ancestors only, so it is the same in a draft tree
and in plain decoding. The keys of the indexer are one more layer of the KV cache.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.core.cache import SequenceSpan
from outrider.models.torch.attention import CacheReader, ChosenKeys, MaskRule, sequence_masks
from outrider.models.torch.attention_layers.layer import AttentionLayer

_LAYER = 1 << 24  # added to the index of a layer for the keys of its indexer


class IndexerLayer(AttentionLayer):
    """Runs the indexer of transformers on each group of sequences, over the keys in the cache."""

    def run(self, reader: CacheReader, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        (rule,) = (value for value in args if isinstance(value, MaskRule))
        (cache_name,) = kwargs.keys() & {"cache", "past_key_values"}  # the second one before transformers 5.21
        chosen = []
        for group, mask in zip(reader.groups, sequence_masks(reader, rule, hidden_states.dtype), strict=True):
            inputs = [mask[:, 0] if value is rule else _part(value, group) for value in (hidden_states, *args)]
            named = {name: _part(value, group) for name, value in kwargs.items()}
            named[cache_name] = _IndexerKeys(reader, group)
            best = self.original(*inputs, **named)
            chosen.append(torch.zeros_like(mask[:, 0], dtype=torch.bool).scatter_(-1, best.long(), True))
        return ChosenKeys(tuple(chosen))


def _part(value: Any, group: tuple[SequenceSpan, ...]) -> Any:
    """Return the part of an input [1, T, ...] that belongs to a group, as [R, L, ...]; pairs of inputs as well."""
    if isinstance(value, tuple):
        return tuple(_part(each, group) for each in value)
    if not isinstance(value, torch.Tensor):
        return value
    columns = value[0, group[0].begin : group[-1].end]
    return columns.reshape(len(group), -1, *columns.shape[1:])


@dataclass(frozen=True, slots=True)
class _IndexerKeys:
    """The part of a transformers cache that an indexer uses."""

    reader: CacheReader
    group: tuple[SequenceSpan, ...]

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        """Write the keys [R, L, D] of the group. Return those of its slots, [R, S, D]."""
        size = keys.shape[1]
        own = (span._replace(begin=r * size, end=(r + 1) * size) for r, span in enumerate(self.group))
        flat = keys.flatten(0, 1)[None]
        layout = replace(self.reader.layout, spans=tuple(own))
        cached, _ = self.reader.cache.write(_LAYER + layer, layout, flat, flat[..., :0])
        first = self.group[0].slot
        stop = max(span.start for span in self.group) + size
        return cached[first : first + len(self.group), 0, :stop]
