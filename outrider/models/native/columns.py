"""The tokens of one forward pass, and where its results are written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from outrider.models.native.structures import CPass, address

if TYPE_CHECKING:
    from outrider.core.cache import SequenceSpan


@dataclass(slots=True, kw_only=True)
class Columns:
    """The tokens of one forward pass. A column is a token of the pass."""

    token: array[int]
    position: array[int]
    slot: array[int]
    entry: array[int]  # index in the slot where keys and values are written
    prefix: array[int]  # leading entries of the slot that the column attends to
    tail_begin: array[int]  # of each column in `tail`, and its end
    tail: array[int]  # further entries that a column attends to, for trees
    output_columns: array[int]  # columns that need logits

    @classmethod
    def consecutive(cls, tokens: Sequence[int], spans: Iterable[SequenceSpan]) -> Columns:
        """Return the columns of `tokens`, each of which attends to all entries before it in its slot."""
        slots: list[int] = []
        entries: list[int] = []
        outputs: list[int] = []
        for span in spans:
            count = span.end - span.begin
            slots += [span.slot] * count
            entries += range(span.start, span.start + count)
            outputs += range(span.end - span.num_outputs, span.end)
        entry = array("i", entries)
        return cls(
            token=array("i", tokens),
            position=entry,
            slot=array("i", slots),
            entry=entry,
            prefix=array("i", [each + 1 for each in entries]),
            tail_begin=array("i", bytes(4 * len(entries) + 4)),
            tail=array("i"),
            output_columns=array("i", outputs),
        )

    def c_pass(self, output: PassOutput, state: torch.Tensor | None) -> CPass:
        """Return the structure of a pass with these columns. `state` is that of `KernelModel.run`."""
        if state is not None:
            assert state.dtype is torch.float32
            assert state.is_contiguous()
        return CPass(
            token=self.token.buffer_info()[0],
            position=self.position.buffer_info()[0],
            slot=self.slot.buffer_info()[0],
            entry=self.entry.buffer_info()[0],
            prefix=self.prefix.buffer_info()[0],
            tail_begin=self.tail_begin.buffer_info()[0],
            tail=self.tail.buffer_info()[0],
            output_columns=self.output_columns.buffer_info()[0],
            logits=output.logits,
            best=output.best,
            export_layers=output.layers.buffer_info()[0],
            hidden_states=output.hidden_states,
            moments=output.moments,
            state=address(state),
            needs_fusion=state is not None and state.dim() == 3,  # states of several layers, which the kernels fuse
            num_columns=len(self.token),
            num_outputs=len(self.output_columns),
            num_exports=len(output.layers),
        )


@dataclass(slots=True, kw_only=True)
class PassOutput:
    """Addresses that a pass writes to. 0 means that an output is not needed."""

    logits: int = 0
    best: int = 0
    layers: array[int] = field(default_factory=lambda: array("i"))  # layers whose outputs are exported
    hidden_states: int = 0
    moments: int = 0
