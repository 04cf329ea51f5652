"""Recurrent layers in passes of fixed shape, which are recorded as graphs. Row r is the sequence in slot r."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

from outrider.core import tree
from outrider.core.types import Batch
from outrider.models.torch.recurrent.layer import Staged, Tensors
from outrider.models.torch.recurrent.rows import Part, PassRows, Rows, add_nodes
from outrider.models.torch.recurrent.states import RecurrentStates


class StagedRows(NamedTuple):
    """What a pass of fixed shape has staged."""

    parent: torch.Tensor  # [R, E], as in `Rows`
    ancestors: torch.Tensor  # [R, E, E]
    entries: dict[int, Tensors]  # by layer: [R, E, ...]

    def rows(self, index: torch.Tensor | slice = slice(None)) -> Rows:
        return Rows(ancestors=self.ancestors[index], parent=self.parent[index], num_new=0, is_chain=False)


class FixedRun:
    """The recurrent layers in one run of a pass of fixed shape."""

    def __init__(self, states: RecurrentStates, rows: Rows) -> None:
        self._states = states
        self._rows = rows
        self._staged: dict[int, tuple[Staged, ...]] = {}

    @contextmanager
    def running(self, positions: torch.Tensor) -> Iterator[None]:
        """Let the layers run over the new entries, which are at `positions` [R * L]."""
        part = Part(sequences=None, rows=self._rows, columns=None, unpadded=None)
        slots = tuple(range(len(self._rows.parent)))
        rows = PassRows(slots=slots, positions=positions, chunks=(), parts=(part,), feed_end=(), nodes=())
        with self._states.running(rows, self._staged), _as_traced():
            yield

    def add_tokens(self, parents: torch.Tensor) -> None:
        """Add one entry to each row, after entry `parents` [R]."""
        self._rows = add_nodes(self._rows, parents[:, None])

    def staged(self) -> StagedRows:
        """Return what the layers have staged."""
        entries = {layer: staged.entries for layer, (staged,) in self._staged.items()}
        return StagedRows(self._rows.parent, self._rows.ancestors, entries)


@contextmanager
def _as_traced() -> Iterator[None]:
    """Let transformers run a model as if it traced it. Otherwise it reads masks, and so waits for the device."""
    original = masking_utils.is_tracing
    masking_utils.is_tracing = lambda tensor=None: True
    try:
        yield
    finally:
        masking_utils.is_tracing = original


class FixedCommit:
    """The commit of a recorded pass, recorded as well."""

    def __init__(
        self, states: RecurrentStates, staged: StagedRows, record: Callable[[Callable[[], Any]], Callable[[], Any]]
    ) -> None:
        """Record the commit of a pass that writes `staged`."""
        self.staged = staged
        self._states = states
        self._last = torch.full((len(staged.parent),), -1, device=staged.parent.device)
        self._replay = record(self._run)

    def adopt(self, batch: Batch, draft_sizes: Sequence[int], first_node: int | None = None) -> None:
        """Let the pass of this commit, which has run over `batch`, be that of the round.

        `first_node` is the first entry of the draft tokens; None: they follow the feed.
        """
        feeds = [len(feed) for feed in batch.feed]
        begins = feeds if first_node is None else [first_node] * len(feeds)
        spans = zip(begins, draft_sizes, strict=True)
        rows = PassRows(
            slots=tuple(seq.slot for seq in batch.seqs),
            positions=self._last,  # not used after a pass
            chunks=(),
            parts=(),
            feed_end=tuple(feed - 1 for feed in feeds),
            nodes=tuple(tuple(range(begin, begin + size)) for begin, size in spans),
        )
        self._states.adopt(FixedPass(rows, self))

    def finish(self, last: Mapping[int, int]) -> None:
        """Advance the state of each of these slots to an entry. The others keep their states."""
        entries = [last.get(slot, -1) for slot in range(len(self._last))]
        self._last.copy_(tree.upload(entries, self._last.device), non_blocking=True)
        self._replay()

    def _run(self) -> torch.Tensor:
        self._states.advance(self.staged.rows(), self.staged.entries, self._last)
        return self._last


class FixedPass(NamedTuple):
    """A recorded pass that has run and is not committed yet."""

    rows: PassRows  # without parts
    commit: FixedCommit

    def finish(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the accepted path of each sequence."""
        self.commit.finish(dict(zip(self.rows.slots, self.rows.last_entry(paths), strict=True)))

    def as_eager(self, base: Callable[[int, Sequence[int]], Tensors]) -> tuple[PassRows, dict[int, tuple[Staged, ...]]]:
        """Return the pass as if it had not been recorded. `base` returns the states of a layer for some slots."""
        staged = self.commit.staged
        index = tree.upload(self.rows.slots, staged.parent.device)
        part = Part(sequences=None, rows=staged.rows(index), columns=None, unpadded=None)
        eager: dict[int, tuple[Staged, ...]] = {}
        for layer, entries in staged.entries.items():
            own = {name: value[index] for name, value in entries.items()}
            eager[layer] = (Staged(base=base(layer, self.rows.slots), entries=own),)
        return replace(self.rows, parts=(part,)), eager


def tree_rows(
    is_drafted: torch.Tensor,  # [R, L] whether a token is a draft token
    draft_index: torch.Tensor,  # [R, L] the index of each draft token in the flat draft
    parents: torch.Tensor,  # [B, N] of the draft, N = L
    feed_end: torch.Tensor,  # [R] the last token of the feed
) -> Rows:
    """Return the rows of feeds that trees of draft tokens follow."""
    size = parents.shape[1]
    order = torch.arange(size, device=parents.device)
    first = feed_end[:, None] + 1
    own = parents.flatten()[draft_index]
    parent = torch.where(is_drafted, torch.where(own < 0, feed_end[:, None], own + first), order - 1)
    node = (order - first).clamp(min=0)  # [R, L] the draft token of each entry
    above = tree.ancestors(parents).flatten(0, 1)[draft_index]  # [R, L, N]
    on_path = above.gather(2, node[:, None].expand(-1, size, -1))
    both_drafted = is_drafted[..., None] & (order >= first)[:, None]
    in_order = order <= order[:, None]
    return Rows(ancestors=in_order & (on_path | ~both_drafted), parent=parent, num_new=size, is_chain=False)
