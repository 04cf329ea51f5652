"""The states of recurrent layers: one per slot and layer.

A recurrent state cannot be trimmed, so rejected draft tokens cannot be removed from it. The
committed state is never advanced by draft tokens. A pass stages what the layers need to compute the
state after any of its tokens, and a commit computes the state after the last accepted one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from outrider.core import tree
from outrider.core.cache import Layout
from outrider.core.types import Draft
from outrider.models.cache.memory import check_slots
from outrider.models.torch.recurrent.layer import RecurrentLayer, Staged, Tensors
from outrider.models.torch.recurrent.rows import CHUNK, PassRows, Rows, arrange, extend

if TYPE_CHECKING:
    from outrider.models.torch.recurrent.fixed import FixedPass

_MAX_SNAPSHOTS = 4  # of each slot, for prompts with the same prefix

Snapshots = dict[int, dict[int, Tensors]]  # by number of tokens, by layer: a state [1, ...]


class RecurrentStates:
    """The states of all slots and layers, what a round has staged, and snapshots at prefixes of the sequences."""

    def __init__(self, slots: int) -> None:
        self.layers: list[RecurrentLayer] = []
        self.rows: PassRows | None = None  # of the running pass
        self._slots = slots
        self._states: dict[int, Tensors] = {}  # by layer: [slots, ...]
        self._fresh: dict[int, Tensors] = {}  # by layer: the state [1, ...] of a sequence without tokens
        self._pass: PassRows | None = None  # the last pass of this round
        self._staged: dict[int, tuple[Staged, ...]] = {}  # by layer, for each part of the pass
        self._recorded: FixedPass | None = None  # in place of both: the last pass was recorded
        self._new_snapshots: dict[int, Snapshots] = {}  # by slot: those of this round
        self._snapshots: list[Snapshots] = [{} for _ in range(slots)]
        self.keeps_snapshots = False

    def stage_pass(self, layout: Layout, draft: Draft, *, extends: bool) -> None:
        """Prepare a pass. It extends the last one, or replaces it."""
        recorded = self._recorded
        self._recorded = None
        if extends:
            if recorded is not None:
                self._pass, self._staged = recorded.as_eager(self._base)
            assert self._pass is not None
            self._pass = extend(self._pass, layout, draft)
            return
        self._staged.clear()
        self._new_snapshots.clear()
        self._pass = arrange(layout, draft)

    def adopt(self, recorded: FixedPass) -> None:
        """Take a recorded pass that has run as the pass of this round."""
        self._recorded = recorded
        self._staged.clear()
        self._new_snapshots.clear()
        self._pass = None

    def ready(self) -> bool:
        """Return whether the states of all layers are allocated."""
        return len(self._states) == len(self.layers)

    @contextmanager
    def running(
        self, rows: PassRows | None = None, staged: dict[int, tuple[Staged, ...]] | None = None
    ) -> Iterator[None]:
        """Let the layers run over the prepared pass, unlike those of transformers.

        With `rows` they run over these, and extend what they have `staged`.
        """
        kept = self._staged
        self._staged = kept if staged is None else staged
        self.rows = rows or self._pass
        try:
            yield
        finally:
            self._staged = kept
            self.rows = None

    def advance(self, rows: Rows, entries: Mapping[int, Tensors], last: torch.Tensor) -> None:
        """Advance the state of each slot r to entry `last[r]` of row r. Rows where it is -1 keep their state.

        `entries` are what the layers have staged for all rows.
        """
        for layer in self.layers:
            base = self._base(layer.layer, range(len(last)))
            after = layer.state_after(Staged(base=base, entries=entries[layer.layer]), rows, last.clamp(min=0))
            for name, value in after.items():
                advances = (last >= 0).view(-1, *[1] * (value.dim() - 1))
                base[name].copy_(torch.where(advances, value, base[name]))

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Advance the states to the last token of the accepted path of each sequence."""
        if self._recorded is not None:
            assert tuple(slots) == self._recorded.rows.slots, "another batch is staged"
            self._recorded.finish(paths)
            self._recorded = None
            return
        staged_pass = self._pass
        assert staged_pass is not None
        assert tuple(slots) == staged_pass.slots, "another batch is staged"
        last_entries = staged_pass.last_entry(paths)
        for number, part in enumerate(staged_pass.parts):
            last = tree.upload(part.pick(last_entries), part.rows.parent.device)
            index = _index(part.pick(slots))
            for layer in self.layers:
                staged = self._staged[layer.layer][number]
                for name, value in layer.state_after(staged, part.rows, last).items():
                    self._states[layer.layer][name][index] = value
        for slot, snapshots in self._new_snapshots.items():
            self._snapshots[slot] = _thin(self._snapshots[slot] | snapshots)
        self._staged.clear()
        self._new_snapshots.clear()
        self._pass = None

    def reset(self, slot: int) -> None:
        """Empty a slot."""
        self._snapshots[slot] = {}
        for layer, fresh in self._fresh.items():
            for name, value in fresh.items():
                self._states[layer][name][slot] = value[0]

    def forget(self) -> None:
        """Drop all snapshots, after a weight update."""
        self._snapshots = [{} for _ in range(self._slots)]

    def positions(self, slot: int) -> list[int]:
        """Return after how many tokens snapshots of a slot were kept, in rising order."""
        return sorted(self._snapshots[slot])

    def copy(self, source: int, position: int | None, slot: int) -> None:
        """Set the state of a slot to a snapshot of another, or to its present state if the position is None."""
        kept = self._snapshots[source]
        for layer, states in self._states.items():
            for name, value in states.items():
                value[slot] = value[source] if position is None else kept[position][layer][name][0]
        self._snapshots[slot] = {at: kept[at] for at in kept if position is None or at <= position}

    def bytes(self) -> int:
        """Bytes of the states and the snapshots."""
        every = [*self._states.values()]
        every += [states for slot in self._snapshots for kept in slot.values() for states in kept.values()]
        return sum(map(_bytes, every))

    def missing_bytes(self) -> int:
        """Bytes of the states that no pass has made yet, as if all layers had states of equal sizes."""
        if not self._states:
            return 0
        made = sum(map(_bytes, self._states.values()))
        return made * (len(self.layers) - len(self._states)) // len(self._states)

    def _check_memory(self, fresh: Tensors) -> None:
        """Check the memory for the states of all layers, before those of the first one are made."""
        device = next(iter(fresh.values())).device
        size = _bytes(fresh) * len(self.layers)
        check_slots("the recurrent states", slot_bytes=size, slots=self._slots, device=device)

    # Layers call these methods during a pass (see `StateReader`).

    def base(self, layer: int, fresh: Tensors) -> Tensors:
        assert self.rows is not None
        if layer not in self._states:
            if not self._states:
                self._check_memory(fresh)
            self._fresh[layer] = fresh
            self._states[layer] = {
                name: value.repeat(self._slots, *[1] * (value.dim() - 1)) for name, value in fresh.items()
            }
        base = self._base(layer, self.rows.slots)
        return {name: value.clone() for name, value in base.items()} if self.rows.chunks else base

    def _base(self, layer: int, slots: Sequence[int]) -> Tensors:
        """Return the states of some slots. They may be views."""
        index = _index(slots)
        return {name: value[index] for name, value in self._states[layer].items()}

    def staged(self, layer: int) -> tuple[Staged, ...] | None:
        return self._staged.get(layer)

    def stage(self, layer: int, staged: tuple[Staged, ...]) -> None:
        self._staged[layer] = staged

    def snapshot(self, layer: int, row: int, position: int, state: Tensors) -> None:
        if self.keeps_snapshots:
            assert self.rows is not None
            slot = self._new_snapshots.setdefault(self.rows.slots[row], {})
            slot.setdefault(position, {})[layer] = state


def _bytes(states: Tensors) -> int:
    return sum(value.nbytes for value in states.values())


def _index(slots: Sequence[int]) -> slice | list[int]:
    """Return an index of these slots. A slice needs no copy."""
    first = slots[0]
    if list(slots) == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return list(slots)


def _thin(snapshots: Snapshots) -> Snapshots:
    """Keep at most `_MAX_SNAPSHOTS`, at the multiples of a power of two chunks."""
    distance = CHUNK
    while len(snapshots) > _MAX_SNAPSHOTS:
        distance *= 2
        snapshots = {at: states for at, states in snapshots.items() if at % distance == 0}
    return snapshots
