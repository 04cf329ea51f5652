"""The base of recurrent layers: one pass over chunks of prompts and staged entries, and the state after a commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from outrider.models.torch.recurrent.rows import CHUNK, Chunk, PassRows, Rows, chain_rows

Tensors = dict[str, torch.Tensor]


def _each(function: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    return {name: function(tensor) for name, tensor in tensors.items()}


class StateReader(Protocol):
    """The states of the layers of a running pass (see `RecurrentStates`)."""

    rows: PassRows | None  # of the running pass; None: no pass of Outrider is running

    def base(self, layer: int, fresh: Tensors) -> Tensors:
        """Return the committed state of each sequence of the pass, [B, ...]. `fresh` is that of an empty one, [1, ...].

        The caller may change it in place if the pass has chunks.
        """

    def staged(self, layer: int) -> tuple[Staged, ...] | None:
        """Return what an earlier pass of this round has staged in a layer, for each part of the pass."""

    def stage(self, layer: int, staged: tuple[Staged, ...]) -> None:
        """Keep what the pass has staged until the commit."""

    def snapshot(self, layer: int, row: int, position: int, state: Tensors) -> None:
        """Offer the state of a sequence after `position` tokens as a snapshot for prompts with the same prefix."""


@dataclass(slots=True, kw_only=True)
class Staged:
    """The values of a part of a pass that a layer keeps until the commit."""

    base: Tensors  # [B, ...] the state before the entries
    entries: Tensors = field(default_factory=dict)  # [B, E, ...] inputs of the entries, or the states after them


class RecurrentLayer(ABC):
    """Replaces `forward` of a layer of transformers while Outrider runs a pass.

    The layer's own weights are used. Everything that a layer computes for each token alone is computed for all tokens
    of the pass at once. Only the recurrence goes through the tokens in order, for all sequences at once.
    """

    def __init__(self, module: Any, layer: int, states: StateReader) -> None:
        """Take over layer number `layer`."""
        self.module = module
        self.layer = layer
        self._states = states
        self._original = module.forward
        module.forward = self.forward

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer over the hidden states [1, T, H] of a pass. Without a pass, run the layer of transformers."""
        rows = self._states.rows
        if rows is None:
            return self._original(hidden_states, *args, **kwargs)
        inputs = self.project(hidden_states[0], rows.positions)
        staged = self._states.staged(self.layer)
        mixed = self.empty_output(inputs)
        if staged is None:
            base = self._states.base(self.layer, self.fresh(inputs))
            for chunk in rows.chunks:
                self._fold(chunk, base, inputs, mixed)
            staged = tuple(Staged(base=_each(part.select, base)) for part in rows.parts)
        for part, kept in zip(rows.parts, staged, strict=True):
            if not part.rows.num_new:
                continue
            part.scatter(self.advance(kept, _each(part.gather, inputs), part.rows), mixed)
        self._states.stage(self.layer, staged)
        return self.wrap(self.finish(mixed, inputs)[None])

    def _fold(self, chunk: Chunk, base: Tensors, inputs: Tensors, mixed: torch.Tensor) -> None:
        """Compute the outputs of a chunk, and advance the state of its sequence in `base`."""
        part = Staged(base={name: value[chunk.row : chunk.row + 1] for name, value in base.items()})
        chain = chain_rows(1, chunk.end - chunk.begin, mixed.device)
        part_inputs = {name: value[None, chunk.begin : chunk.end] for name, value in inputs.items()}
        mixed[chunk.begin : chunk.end] = self.advance(part, part_inputs, chain)[0]
        state = self.state_after(part, chain, torch.full((1,), chain.num_entries - 1, device=mixed.device))
        for name, value in state.items():
            base[name][chunk.row] = value[0]
        if chunk.position % CHUNK == 0:
            self._states.snapshot(self.layer, chunk.row, chunk.position, state)

    @abstractmethod
    def project(self, hidden: torch.Tensor, positions: torch.Tensor) -> Tensors:
        """Compute the inputs of the recurrence [T, ...] from the hidden states [T, H] and the positions [T]."""

    @abstractmethod
    def fresh(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the state [1, ...] of a sequence without tokens."""

    def empty_output(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return an uninitialized output of the recurrence, [T, ...]. Its default shape is that of the input `x`."""
        return torch.empty_like(inputs["x"])

    @abstractmethod
    def advance(self, staged: Staged, inputs: Tensors, rows: Rows) -> torch.Tensor:
        """Add the new entries, whose inputs are [B, L, ...], to `staged.entries`. Return their outputs [B, L, ...]."""

    @abstractmethod
    def state_after(self, staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
        """Return the state [B, ...] after entry `last` [B] of each sequence."""

    @abstractmethod
    def finish(self, mixed: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute the output of the layer [T, H] from the outputs of the recurrence."""

    def wrap(self, output: torch.Tensor) -> Any:
        """Return what the layer of transformers returns: the output [1, T, H], or a tuple that begins with it."""
        return output


def split_heads(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [*, heads, D / heads] of values [*, D]."""
    return values.view(*values.shape[:-1], heads, -1)


def add_entries(staged: Staged, new: Mapping[str, torch.Tensor]) -> None:
    """Append [B, L, ...] to the entries."""
    for name, value in new.items():
        earlier = staged.entries.get(name)
        staged.entries[name] = value if earlier is None else torch.cat([earlier, value], 1)


def pick(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return [B, ...]: entry `index` [B] of the values [B, E, ...]. It may be a view."""
    if values.shape[1] == 1:
        return values[:, 0]
    return values[torch.arange(len(index), device=index.device), index]


def add_product(state: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add a product of matrices [B, H, P, E] and [B, H, E, N] to the state [B, H, P, N], in place, and return it."""
    state.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    return state
