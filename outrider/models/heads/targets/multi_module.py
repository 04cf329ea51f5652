"""Targets that run draft heads with several modules. Each module starts one token later than the one before."""

from __future__ import annotations

from collections.abc import Callable

import torch

from outrider.core.types import Batch, Draft
from outrider.models.heads.modules.base import HeadBase
from outrider.models.heads.targets.autoregressive import AutoregressiveTarget, RunModule
from outrider.models.torch.attention import MaskRule


class MultiModuleTarget(AutoregressiveTarget):
    """Runs an `AutoregressiveHead` with several modules. The layers of all modules are in one KV cache.

    Module m, counted from 0, combines a token with the output of module m - 1 at the token before, and predicts the
    draft token at depth m. So a draft token runs only through the modules that predict after it. Module m has no input
    for the first m tokens of the cache. Its entries there are arbitrary, and no later token attends to them. A sequence
    with fewer tokens than modules has no input for the last modules, so their predictions are arbitrary.

    The states that a column starts from are one for each module, side by side.
    """

    def _prepare(self) -> None:
        self.max_draft_tokens = self.description.modules
        self._rules = [_hide_first(index) for index in range(self.max_draft_tokens)]
        # The states after the last committed tokens [modules * H], by slot and position.
        self._last_states: dict[int, dict[int, torch.Tensor]] = {}

    def _rule_of(self, module: int) -> MaskRule | None:
        return self._rules[module]

    def _feed_states(self, batch: Batch) -> torch.Tensor:
        """Return [T, modules * H]: the target's states, and at the first column of a feed also those before it."""
        states = []
        for b in range(len(batch.seqs)):
            fused = self._input_states(batch, b)
            states.append(torch.cat([fused, fused.new_zeros(len(fused), self._width - fused.shape[1])], 1))
            if len(fused):
                states[-1][0, fused.shape[1] :] = self._states_before(batch, b)[fused.shape[1] :]
        return torch.cat(states)

    @property
    def _width(self) -> int:
        """The numbers of the states of all modules."""
        return self.max_draft_tokens * self.description.width

    def _states_before(self, batch: Batch, b: int) -> torch.Tensor:
        """Return the states [modules * H] after the token before a feed; zeros if there is none."""
        stored = self._last_states.get(batch.seqs[b].slot, {}).get(batch.start[b] - 1) if batch.start[b] else None
        return torch.zeros(self._width, dtype=self._dtype, device=self.device) if stored is None else stored

    def _store_states(self, states: torch.Tensor, batch: Batch, draft: Draft, first: int) -> None:
        super()._store_states(states, batch, draft, first)
        if first < 0:
            self._store_last_states(batch, self._node_states[:, 0])

    def _store_last_states(self, batch: Batch, states: torch.Tensor) -> None:
        """Store the states [B, modules * H] after the last tokens of `batch`. Drop those that no later feed needs."""
        for seq, start, end, own in zip(batch.seqs, batch.start, batch.ends, states, strict=True):
            stored = self._last_states.get(seq.slot, {}) if start else {}
            needed = {position: before for position, before in stored.items() if position >= start}
            self._last_states[seq.slot] = {**needed, end: own}

    def _outputs(
        self, run: RunModule, states: torch.Tensor, begins: torch.Tensor | None, modules: range | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = states.view(len(states), self.max_draft_tokens, -1)
        if modules is None:  # the target predicts from the state that module 0 would take after a draft token
            modules = range(0 if begins is not None else 1, self.max_draft_tokens)
        fed_back = torch.zeros_like(given)  # module 0 takes the target's states
        outputs = torch.zeros_like(given)
        before = given
        for index in modules:
            inputs = given[:, index]
            if begins is not None and index:
                inputs = before.roll(1, 0).index_copy(0, begins, inputs[begins])
            out = run(inputs, index)
            outputs[:, index] = self.module.normed(out, index)
            before = self.module.feed_back(out, index)
            if index + 1 < self.max_draft_tokens:
                fed_back[:, index + 1] = before
        return fed_back.flatten(1), outputs

    def _node_logits(self, out: torch.Tensor, depth: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return float32 logits [*, Vd] of nodes for the normed outputs [*, modules, H] and depths [*]."""
        module = depth().clamp(0, self.max_draft_tokens - 1)[..., None, None]
        chosen = out.gather(-2, module.expand(*out.shape[:-2], 1, out.shape[-1]))[..., 0, :]
        return HeadBase.logits(self.module, chosen)


def _hide_first(count: int) -> MaskRule | None:
    """Return the rule of layers that hide the first `count` entries of a sequence from all later tokens."""
    if not count:
        return None
    return MaskRule(lambda _seq, _head, query, key: key >= query.clamp(max=count), 0)
