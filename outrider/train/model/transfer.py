"""A head that goes on with another target than the one that it was trained for.

A head with tables of its own meets its target in one place alone, where states are fused. So all else is kept, and that
place is made anew: the fusion under which the new target's states look most, in least squares over texts that both have
read, as the former's did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.core.config import EngineConfig
from outrider.engine.build import load_target
from outrider.errors import OutriderError
from outrider.heads.description import HeadDescription
from outrider.heads.modules.autoregressive import AutoregressiveHead
from outrider.heads.store import HeadModule, make_module
from outrider.models.base import Target, WeightSharer
from outrider.propose.base import ProposerSetup
from outrider.train.data.batches import read_alone
from outrider.train.data.sample import Sample
from outrider.train.distributed import total

_RIDGE = 0.01  # beside the mean square of what is fused: more texts would say more


class PreviousTarget:
    """A head, and the target that it was trained for."""

    def __init__(self, head: HeadModule, folder: Path, setup: ProposerSetup) -> None:
        """`folder` is the target's; it is loaded when texts are there to be read, and with the engine's tokenizer.

        Raises:
            OutriderError: the head shares tables with its target, or it holds what that target alone would show.
        """
        it = head.description
        if (
            not isinstance(head, AutoregressiveHead)
            or it.masks
            or not (it.aux_states.fused and it.own_embedding and it.own_lm_head)
        ):
            raise OutriderError(
                f"a draft of kind {it.kind} that uses its target's tables, or masks, is bound to that target; leave"
                " --init-target out, or go on with what was trained as slim or with --hidden-size"
            )
        self._head, self._folder, self._setup = head, folder, setup

    def successor(self, wanted: HeadDescription) -> HeadModule:
        """The same head for the target of another description, whose layers it taps; it does not see them yet."""
        it = self._head.description
        taps = replace(it.aux_states, layers=wanted.aux_states.layers)
        its = replace(it, aux_states=taps, target_hidden=wanted.target_hidden, target_layers=wanted.target_layers)
        heir = make_module(its).to(self._setup.device)
        kept = {name: value for name, value in self._head.state_dict().items() if not _seeing(name)}
        heir.load_state_dict(kept, strict=False)
        return heir

    @torch.no_grad()
    def open_eyes(self, heir: HeadModule, samples: Callable[[], Sequence[Sample]]) -> None:
        """Find the fusion; all processes look at their own texts, and find the same.

        Raises:
            OutriderError: the former target cannot be loaded, or is not the head's.
        """
        assert isinstance(heir, AutoregressiveHead)
        target, size = self._load(), heir.fuse.in_features
        seen = torch.zeros(size, size, dtype=torch.float64, device=self._setup.device)
        meant = torch.zeros(size, heir.fuse.out_features, dtype=torch.float64, device=self._setup.device)
        for shown, fused in self._pairs(target, heir, samples()):
            seen += shown.T @ shown
            meant += shown.T @ fused
        total(seen)
        total(meant)
        seen.diagonal().add_(_RIDGE * seen.diagonal().mean())
        heir.fuse.weight.copy_(torch.linalg.solve(seen, meant).T)

    def _pairs(
        self, target: Target, heir: AutoregressiveHead, samples: Sequence[Sample]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Of each text what the heir is shown [L, taps x H], and what the head made of the former's states [L, W]."""
        it = heir.description
        layers = sorted({*it.aux_states.layers, it.target_layers - 1})  # that samples hold
        where = [layers.index(at) for at in it.aux_states.layers]
        for sample in samples:
            text = sample.tokens[:-1][: target.context]
            states = read_alone(target, text).states(self._head.description.aux_states.layers, 0, ())
            fused = self._head.fused(states.float())
            if self._head.fuse.bias is not None:
                fused = fused - self._head.fuse.bias
            shown = heir.gathered(sample.states[: len(text), where].to(fused))
            yield shown.double(), fused.double()

    def _load(self) -> Target:
        it = self._head.description
        found = load_target(EngineConfig(target=self._folder, device=str(self._setup.device), max_num_seqs=1))
        target = found.model
        if found.checkpoint.tokenizer.get_vocab() != self._setup.tokenizer.get_vocab():
            raise OutriderError(
                f"{self._folder} has another vocabulary than the target; a draft goes on with targets that share one"
            )
        if not isinstance(target, WeightSharer) or (target.share_weights().head.shape[1], target.layers) != (
            it.target_hidden,
            it.target_layers,
        ):
            raise OutriderError(
                f"{self._folder} is not what --init-from was trained for, which is {it.target_hidden} wide and has"
                f" {it.target_layers} layers; name that with --init-target"
            )
        target.export_hidden_states(it.aux_states.layers)
        return target


def _seeing(name: str) -> bool:
    """Whether a weight stands between the target's states and the head's own width; the fusion's bias stands behind."""
    return name == "fuse.weight" or name.startswith("fuse_norm.")
