"""The cache of models with recurrent layers."""

from collections.abc import Sequence

import torch

from outrider.core.cache import Layout
from outrider.core.types import Batch, Draft, Round
from outrider.models.cache.prefix_tree import common_prefix
from outrider.models.cache.static import StaticCache
from outrider.models.torch.recurrent.states import RecurrentStates


class RecurrentCache(StaticCache):
    """A `StaticCache` for the attention layers, if there are any, and the states of the recurrent layers.

    With prefix caching, a new sequence starts from a snapshot of a sequence in its scope: one of
    those that were kept while the prompt was processed, or the state at the end of the sequence.
    """

    def __init__(self, *, slots: int, capacity: int, device: torch.device, layers: int, reserve: int) -> None:
        self.states = RecurrentStates(slots)
        super().__init__(slots=slots, capacity=capacity, device=device, layers=layers, reserve=reserve)

    def forget(self) -> None:
        super().forget()
        self.states.forget()

    def set_prefix_caching(self, on: bool) -> None:
        super().set_prefix_caching(on)
        self.states.keeps_snapshots = on

    def stage(self, batch: Batch, draft: Draft, first: int = -1) -> Layout:
        layout = super().stage(batch, draft, first)
        self.states.stage_pass(layout, draft, extends=first >= 0)
        return layout

    def commit(self, round: Round) -> None:
        super().commit(round)
        self.states.commit([seq.slot for seq in round.batch.seqs], round.path)

    def bytes(self) -> int:
        return super().bytes() + self.states.bytes()

    def admit(self, slot: int, tokens: Sequence[int], scope: str | None = None) -> int:
        length = super().admit(slot, tokens, scope)
        if not length:
            self.states.reset(slot)
        return length

    def _missing_bytes(self) -> int:
        return self.states.missing_bytes()

    def _longest_prefix(self, slot: int, prefix: list[int], scope: str) -> tuple[int, int]:
        longest = 0
        source = slot
        for other in self._slots_of(scope, slot):
            tokens = self._cached_tokens(other)
            common = common_prefix(tokens, prefix)
            end = [len(tokens)] if common == len(tokens) else []
            length = max([at for at in self.states.positions(other) if at <= common] + end, default=0)
            if length > longest:
                longest = length
                source = other
        return longest, source

    def _copy_prefix(self, source: int, length: int, slot: int) -> None:
        super()._copy_prefix(source, length, slot)
        at_end = length == len(self._cached_tokens(source))
        self.states.copy(source, None if at_end else length, slot)
