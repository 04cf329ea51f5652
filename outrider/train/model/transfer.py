"""Moves a draft head to another target than the one that it was trained for.

A head with its own embedding and LM head depends on its target in one place: the fusion layer, which reads hidden
states. All other weights are kept. The new fusion layer is fitted by least squares: on the same sequences, its outputs
from the new target's states should equal the old outputs from the previous target's states.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from outrider.core.config import EngineConfig
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target, WeightSharer
from outrider.engine.build import load_target
from outrider.errors import OutriderError
from outrider.models.heads.description import HeadDescription
from outrider.models.heads.modules.autoregressive import AutoregressiveHead
from outrider.models.heads.store import HeadModule, make_module
from outrider.train.data.batches import score_sequence
from outrider.train.data.sample import Sample
from outrider.train.distributed import all_reduce_sum

_RIDGE = 0.01  # regularization, relative to the mean square of the inputs


class PreviousTarget:
    """A draft head and the target that it was trained for."""

    def __init__(self, head: HeadModule, folder: Path, setup: ProposerSetup) -> None:
        """Check the head. The target in `folder` is loaded later, by `fit_fusion`.

        Raises:
            OutriderError: the head shares tables with its target, or it has masks, which depend on the target.
        """
        description = head.description
        if (
            not isinstance(head, AutoregressiveHead)
            or description.masks
            or not (description.aux_states.fused and description.own_embedding and description.own_lm_head)
        ):
            raise OutriderError(
                f"a draft of kind {description.kind} that uses its target's tables, or masks, is bound to that target;"
                " leave --init-target out, or continue from a draft that was trained as slim or with --hidden-size"
            )
        self._head = head
        self._folder = folder
        self._setup = setup

    def make_moved_head(self, description: HeadDescription) -> HeadModule:
        """Return the head for another target, which `description` describes. Its fusion layer is not fitted yet."""
        old = self._head.description
        moved_description = replace(
            old,
            aux_states=replace(old.aux_states, layers=description.aux_states.layers),
            target_hidden=description.target_hidden,
            target_layers=description.target_layers,
        )
        moved = make_module(moved_description).to(self._setup.device)
        state = self._head.state_dict()
        moved.load_state_dict({name: value for name, value in state.items() if not _is_fusion(name)}, strict=False)
        return moved

    @torch.no_grad()
    def fit_fusion(self, moved: HeadModule, samples: Callable[[], Sequence[Sample]]) -> None:
        """Fit the fusion layer. Each process uses its own samples, and all get the same result.

        Raises:
            OutriderError: the previous target cannot be loaded, or the head was not trained for it.
        """
        assert isinstance(moved, AutoregressiveHead)
        target = self._load_target()
        size = moved.fuse.in_features
        device = self._setup.device
        # The normal equations: the Gram matrix of the inputs, and the products of inputs and outputs.
        gram = torch.zeros(size, size, dtype=torch.float64, device=device)
        products = torch.zeros(size, moved.fuse.out_features, dtype=torch.float64, device=device)
        for inputs, outputs in self._regression_pairs(target, moved, samples()):
            gram += inputs.T @ inputs
            products += inputs.T @ outputs
        all_reduce_sum(gram)
        all_reduce_sum(products)
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        moved.fuse.weight.copy_(torch.linalg.solve(gram, products).T)

    def _regression_pairs(
        self, target: Target, moved: AutoregressiveHead, samples: Sequence[Sample]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs [L, layers x H] and wanted outputs [L, W] of the new fusion layer, sequence by sequence."""
        description = moved.description
        sample_layers = sorted({*description.aux_states.layers, description.target_layers - 1})
        aux_indices = list(map(sample_layers.index, description.aux_states.layers))
        for sample in samples:
            tokens = sample.tokens[:-1][: target.context]
            states = score_sequence(target, tokens).states(self._head.description.aux_states.layers, 0, ())
            outputs = self._head.fuse_states(states.float())
            if self._head.fuse.bias is not None:  # the bias is kept, not fitted
                outputs = outputs - self._head.fuse.bias
            inputs = moved.gather_states(sample.states[: len(tokens), aux_indices].to(outputs))
            yield inputs.double(), outputs.double()

    def _load_target(self) -> Target:
        """Load the previous target, and let it export the hidden states that the head reads."""
        description = self._head.description
        loaded = load_target(EngineConfig(target=self._folder, device=str(self._setup.device), max_num_seqs=1))
        target = loaded.model
        if loaded.checkpoint.tokenizer.get_vocab() != self._setup.tokenizer.get_vocab():
            raise OutriderError(
                f"{self._folder} has another vocabulary than the target; a draft can only move to a"
                " target with the same vocabulary"
            )
        expected_shape = (description.target_hidden, description.target_layers)
        if (
            not isinstance(target, WeightSharer)
            or (target.share_weights().head.shape[1], target.layers) != expected_shape
        ):
            raise OutriderError(
                f"{self._folder} is not the target of --init-from, which has width {description.target_hidden} and"
                f" {description.target_layers} layers; name that target with --init-target"
            )
        target.export_hidden_states(description.aux_states.layers)
        return target


def _is_fusion(name: str) -> bool:
    """Return whether a weight depends on the target's states. The bias of the fusion layer does not."""
    return name == "fuse.weight" or name.startswith("fuse_norm.")
