"""The protocol of a draft in training, and its implementation for draft heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import WeightSharer
from outrider.core.types import SharedWeights
from outrider.drafting.propose.draft_model.trained_head import HeadProposer
from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, Centroids, FusionPoint, HeadDescription, SharedKV
from outrider.models.heads.store import HeadModule, load_module, make_module, read_head, write_head
from outrider.models.heads.targets.registry import make_head_target
from outrider.models.loader.embedded import model_folder
from outrider.train.data.batches import most_frequent_tokens
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, TrainingBatch
from outrider.train.loss.unroll import unrolled
from outrider.train.model.draft_model import DraftModelTrainee
from outrider.train.model.init_weights import init_weights
from outrider.train.model.kv_probe import find_shared_kv, find_sliding_kv
from outrider.train.model.presets import KV_SHARING, Sizes, describe
from outrider.train.settings import DRAFT, Settings

if TYPE_CHECKING:
    from outrider.train.model.transfer import PreviousTarget


class DraftTrainee(Protocol):
    """A draft in training.

    Contract: step s of `unroll` predicts, at each column, what `proposer` would draft there after s
    accepted tokens. `proposer` and `save` return copies that later training does not change.
    """

    module: nn.Module  # its parameters are trained, in float32
    aux_states: AuxStates  # the hidden states of the target that it reads
    shared_kv: tuple[SharedKV, ...]  # the target's keys and values that it attends to
    ids: torch.Tensor  # [Vd] token ids of the draft vocabulary
    steps: int  # default number of draft tokens to unroll
    lr: float  # default peak learning rate

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        """Finish the initialization with samples of the first generation cycle.

        Called once before the training, but not if the training is resumed.
        """

    def use_tables(self, tables: SharedWeights) -> None:
        """Use new values of the weights that the draft shares with the target."""

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Step]:
        """Yield steps 0, 1, ..., as far as the sequences reach."""

    def proposer(self, setup: ProposerSetup) -> Proposer:
        """Return a proposer with the current weights."""

    def save(self, folder: Path) -> None:
        """Write the draft in the format that the engine loads. If this fails, existing files are intact.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """


class HeadTrainee:
    """A draft head in training."""

    lr = 1e-3

    def __init__(self, kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> None:
        """Make a new head, or load the one in `settings.init_from`.

        Args:
            settings: the options of the training.
            setup: the engine with the target.
            tables: the weights that the head shares with the target.

        Raises:
            OutriderError: the options do not fit the kind or the target.
        """
        self._tables = tables
        self._later_share = settings.multi_step_share
        sizes = _sizes(settings, setup, tables)
        if kind == KV_SHARING:
            view = find_shared_kv(setup.target, tables)
            sizes = replace(sizes, view=view, sliding_view=find_sliding_kv(setup.target, tables))
        description = describe(kind, sizes)
        self._is_new = settings.init_from is None
        if self._is_new:
            self._module = make_module(description).to(setup.device)
        else:
            self._module = _load_head(settings, description, setup)
        self._previous: PreviousTarget | None = None
        if settings.init_target is not None:
            # Here, because it loads engines, and most trainings move no head.
            from outrider.train.model.transfer import PreviousTarget

            self._previous = PreviousTarget(self._module, model_folder(settings.init_target), setup)
            self._module = self._previous.make_moved_head(description)
        self._description = self._module.description
        _check_options(kind, settings, self._description)
        if settings.mask_token_id is not None:
            self._module.get_parameter("mask").requires_grad_(False).copy_(tables.embedding[settings.mask_token_id])
        self._share_weights()
        # The shared weights depend on the draft vocabulary, which is part of the state.
        self._module.register_load_state_dict_post_hook(lambda *_: self._share_weights())  # type: ignore[no-untyped-call]
        self.module: nn.Module = self._module
        self.aux_states = self._description.aux_states
        self.shared_kv = self._description.shared_kv
        self.ids = self._module.ids
        self.steps = self._description.max_draft_tokens or 4

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        """Fit the fusion layer of a moved head, or initialize a new one. A new head gets its draft vocabulary first."""
        description = self._description
        module = self._module
        if self._previous:
            self._previous.fit_fusion(module, samples)
        if not self._is_new:
            return
        if description.draft_vocab:
            ids = most_frequent_tokens(samples(), description.vocab, description.draft_vocab, module.ids.device)
            module.ids.copy_(ids)
            self._share_weights()
        init_weights(module, self._tables)

    def use_tables(self, tables: SharedWeights) -> None:
        self._tables = tables
        self._share_weights()

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Step]:
        return unrolled(self._module, batch, steps, self._later_share)

    def proposer(self, setup: ProposerSetup) -> Proposer:
        module = self._frozen_copy(setup.dtype)
        return HeadProposer(
            setup,
            make_head_target(module, self._tables, slots=setup.slots, context=setup.context, kernels=setup.kernels),
        )

    def save(self, folder: Path) -> None:
        write_head(folder, self._module, dtype=torch.bfloat16)

    def _share_weights(self) -> None:
        head = self._tables.head
        own = self._description.own_lm_head  # then the target's is not read, and needs no copy
        self._module.share_weights(self._tables.embedding, head if own else head.float())

    def _frozen_copy(self, dtype: torch.dtype) -> HeadModule:
        """Return a copy of the module in evaluation mode, without gradients."""
        weights = {
            name: weight.detach().to(dtype, copy=True) if weight.is_floating_point() else weight.clone()
            for name, weight in self._module.state_dict().items()
        }
        module = load_module(self._description, weights, where="the draft in training")
        return module.to(self.ids.device).requires_grad_(False).eval()


def make_trainee(kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> DraftTrainee:
    """Return a draft of this kind to train for the target of `setup`, which has the weights `tables`.

    Raises:
        OutriderError: the options do not fit the kind or the target.
    """
    return DraftModelTrainee(settings, setup) if kind == DRAFT else HeadTrainee(kind, settings, setup, tables)


def target_weights(setup: ProposerSetup) -> SharedWeights:
    """Return the weights that a draft shares with the target.

    Raises:
        OutriderError: the target does not export them.
    """
    if not isinstance(setup.target, WeightSharer):
        raise OutriderError(
            "this target does not export its hidden states, so no draft can be trained for it; use an attention model"
        )
    return setup.target.share_weights()


def _sizes(settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> Sizes:
    """Return the sizes of the target and the options for a new head."""
    assert isinstance(setup.target, WeightSharer)
    if settings.draft_vocab_size > setup.vocab:
        raise OutriderError(
            f"--draft-vocab-size is {settings.draft_vocab_size}, and the target has {setup.vocab}"
            " tokens; use fewer, or 0 for all"
        )
    return Sizes(
        hidden=tables.head.shape[1],
        layers=setup.target.layers,
        vocab=setup.vocab,
        epsilon=tables.epsilon,
        draft_vocab=settings.draft_vocab_size % setup.vocab,
        depth=settings.depth or 1,
        ffn=settings.intermediate_size,
        width=settings.hidden_size or 0,
        draft_tokens=settings.draft_tokens,
        modules=settings.mtp_modules,
        centroids=_centroids(settings),
        own_lm_head=settings.own_lm_head,
    )


def _centroids(settings: Settings) -> Centroids | None:
    """Return the token clusters of the LM head."""
    if not settings.centroids:
        return None
    return Centroids(count=settings.centroids, top_k=settings.centroid_top_k or max(settings.centroids // 8, 1))


def _load_head(settings: Settings, wanted: HeadDescription, setup: ProposerSetup) -> HeadModule:
    """Load the head in `settings.init_from`, and check that it fits the training.

    Args:
        settings: the options of the training.
        wanted: the description of a new head for this target.
        setup: the engine with the target.
    """
    assert settings.init_from is not None
    module = read_head(model_folder(settings.init_from), dtype=torch.float32, device=setup.device).requires_grad_(True)
    loaded = module.description
    if _has_shape_options(settings):
        raise OutriderError(
            f"--init-from {settings.init_from} defines the shape of the draft; leave --depth,"
            " --intermediate-size, --hidden-size, --draft-vocab-size, --own-lm-head, --centroids,"
            " --draft-tokens, --mtp-modules and --mask-token-id out"
        )
    differs = loaded.kind != wanted.kind or loaded.vocab != wanted.vocab
    if settings.init_target is None:  # otherwise the head moves to a target of another shape
        differs |= loaded.target_hidden != wanted.target_hidden or loaded.target_layers != wanted.target_layers
    if differs:
        raise OutriderError(
            f"{settings.init_from} is of kind {loaded.kind}, for a target with vocabulary {loaded.vocab}, width"
            f" {loaded.target_hidden} and {loaded.target_layers} layers; this training needs kind {wanted.kind}, for a"
            f" target with vocabulary {wanted.vocab}, width {wanted.target_hidden} and {wanted.target_layers} layers"
        )
    if loaded.input_fusion and wanted.input_fusion and loaded.input_fusion.at is not wanted.input_fusion.at:
        raise OutriderError(
            f"{settings.init_from} fuses embeddings and hidden states at its {loaded.input_fusion.at}, and"
            f" {wanted.kind} does so at its {wanted.input_fusion.at}; train"
            f" {'slim' if loaded.input_fusion.at is FusionPoint.PROJECTION else 'eagle31'} instead"
        )
    if set(loaded.shared_kv) != set(wanted.shared_kv):
        raise OutriderError(
            f"{settings.init_from} reads other keys and values than this target exports; leave --init-from out"
        )
    return module


def _has_shape_options(settings: Settings) -> bool:
    """Return whether the settings have an option that changes the shape of a head."""
    sizes = (
        settings.depth,
        settings.intermediate_size,
        settings.hidden_size,
        settings.draft_vocab_size,
        settings.draft_tokens,
        settings.centroids,
    )
    return (
        any(sizes) or settings.mtp_modules > 1 or settings.own_lm_head is not None or settings.mask_token_id is not None
    )


def _check_options(kind: str, settings: Settings, description: HeadDescription) -> None:
    """Reject options that have no effect on this kind of head, and values that it cannot have."""
    fixed_length = description.max_draft_tokens
    heads = description.stack.heads if description.stack else 0
    mask_token_id = settings.mask_token_id
    has_share = settings.multi_step_share != 1
    problems = (
        (settings.intermediate_size and description.body is None, f"{kind} has no MLP; leave --intermediate-size out"),
        (
            settings.draft_tokens and not description.parallel_draft_tokens,
            f"{kind} has no block; leave --draft-tokens out",
        ),
        (mask_token_id is not None and description.block is None, f"{kind} has no block; leave --mask-token-id out"),
        (
            (mask_token_id or 0) >= description.vocab,
            f"--mask-token-id is {mask_token_id}, and the target has {description.vocab} tokens; use a smaller id",
        ),
        (settings.mtp_modules > description.modules, f"{kind} has no modules; leave --mtp-modules out"),
        (settings.centroids and not description.centroids, f"{kind} has no token clusters; leave --centroids out"),
        (
            fixed_length and settings.ttt_length not in (None, fixed_length),
            f"{kind} drafts {fixed_length} tokens and trains all of them; leave --ttt-length out",
        ),
        (
            has_share and (heads or description.modules > 1),
            f"{kind} trains all draft tokens at every position; leave --multi-step-share out",
        ),
        (
            has_share and settings.ttt_length == 1 and not fixed_length,
            "--ttt-length 1 trains only the first draft token; leave --multi-step-share out",
        ),
        (
            heads and settings.depth not in (0, heads),
            f"{kind} has {heads} heads where --depth is {settings.depth}; use 2 or more",
        ),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise OutriderError(message)
