"""What is trained: a draft that reads the target's states, or a draft model that reads the text alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from outrider.core.types import SharedWeights
from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, FusionPoint, HeadDescription, SharedKV
from outrider.heads.store import HeadModule, filled, make_module, read_head, write_head
from outrider.heads.targets.registry import make_head_target
from outrider.loader.embedded import model_folder
from outrider.models.base import WeightSharer
from outrider.propose.base import Proposer, ProposerSetup
from outrider.propose.draft_model.trained_head import HeadProposer
from outrider.train.data.batches import frequent
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, Texts
from outrider.train.loss.unroll import unrolled
from outrider.train.model.draft_model import DraftModelTrainee
from outrider.train.model.init_weights import init_weights
from outrider.train.model.kv_probe import find_view
from outrider.train.model.presets import KV_SHARING, Sizes, describe
from outrider.train.model.transfer import PreviousTarget
from outrider.train.settings import DRAFT, Settings


class DraftTrainee(Protocol):
    """A draft in training.

    Contract: step s of `unroll` predicts, at each column, what `proposer` would draft there after s accepted tokens.
    `proposer` and `save` return copies that later training does not change.
    """

    module: nn.Module  # whose parameters are trained, in float32
    aux_states: AuxStates  # what it reads of the target's pass, besides what the target says
    shared_kv: tuple[SharedKV, ...]  # what it looks at in the target's memory
    ids: torch.Tensor  # [Vd] the target's ids of what it guesses
    steps: int  # guesses in a row that are trained where nobody says how many
    lr: float  # learning rate at its height, likewise

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        """Settle what follows from texts; called once, before training, unless that goes on from a saved state."""

    def unroll(self, texts: Texts, steps: int) -> Iterator[Step]:
        """The guesses of steps 0, 1, ..., as far as texts reach."""

    def proposer(self, setup: ProposerSetup) -> Proposer:
        """It guesses, with the weights of now."""

    def save(self, folder: Path) -> None:
        """Write it as the engine loads it; what lay there survives a failure.

        Raises:
            OutriderError: the disk is full, or the folder cannot be written.
        """


class HeadTrainee:
    """A draft on the target's states."""

    lr = 1e-3

    def __init__(self, kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> None:
        """Fresh weights or those of `settings.draft`, for the target of this engine, which lends its tables.

        Raises:
            OutriderError: the options and the kind, or the target, do not fit.
        """
        self._tables, self._later = tables, settings.multi_step_share
        sizes = _sizes(settings, setup, tables)
        if kind == KV_SHARING:
            sizes = replace(sizes, view=find_view(setup.target, tables))
        wanted = describe(kind, sizes)
        self._fresh, self._former = settings.init_from is None, None
        self._module = make_module(wanted).to(setup.device) if self._fresh else _begun(settings, wanted, setup)
        if settings.init_target is not None:
            self._former = PreviousTarget(self._module, model_folder(settings.init_target), setup)
            self._module = self._former.successor(wanted)
        self._description = it = self._module.description
        _check(kind, settings, it)
        if settings.mask_token_id is not None:
            self._module.get_parameter("mask").requires_grad_(False).copy_(tables.embedding[settings.mask_token_id])
        self._lend()
        # Which tokens are guessed is loaded too.
        self._module.register_load_state_dict_post_hook(lambda *_: self._lend())  # type: ignore[no-untyped-call]
        self.module: nn.Module = self._module
        self.aux_states, self.shared_kv, self.ids = it.aux_states, it.shared_kv, self._module.ids
        self.steps = it.max_draft_tokens or 4

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        it, module = self._description, self._module
        if self._former:
            self._former.open_eyes(module, samples)
        if not self._fresh:
            return
        if it.draft_vocab:
            module.ids.copy_(frequent(samples(), it.vocab, it.draft_vocab, module.ids.device))
            self._lend()
        init_weights(module, self._tables)

    def unroll(self, texts: Texts, steps: int) -> Iterator[Step]:
        return unrolled(self._module, texts, steps, self._later)

    def proposer(self, setup: ProposerSetup) -> Proposer:
        still = self._still(setup.dtype)
        return HeadProposer(setup, make_head_target(still, self._tables, slots=setup.slots, context=setup.context))

    def save(self, folder: Path) -> None:
        write_head(folder, self._module, dtype=torch.bfloat16)

    def _lend(self) -> None:
        self._module.share_weights(self._tables.embedding, self._tables.head.float())

    def _still(self, dtype: torch.dtype) -> HeadModule:
        """A copy that is not trained."""
        weights = {
            name: weight.detach().to(dtype, copy=True) if weight.is_floating_point() else weight.clone()
            for name, weight in self._module.state_dict().items()
        }
        still = filled(self._description, weights, where="the draft in training")
        return still.to(self.ids.device).requires_grad_(False).eval()


def make_trainee(kind: str, settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> DraftTrainee:
    """What is trained for this engine, whose target lends its tables.

    Raises:
        OutriderError: the options, the kind and the target do not fit.
    """
    return DraftModelTrainee(settings, setup) if kind == DRAFT else HeadTrainee(kind, settings, setup, tables)


def target_weights(setup: ProposerSetup) -> SharedWeights:
    """The target's tables.

    Raises:
        OutriderError: it has none to lend.
    """
    if not isinstance(setup.target, WeightSharer):
        raise OutriderError("this target shows no states; drafts are trained on attention models")
    return setup.target.share_weights()


def _sizes(settings: Settings, setup: ProposerSetup, tables: SharedWeights) -> Sizes:
    assert isinstance(setup.target, WeightSharer)
    if settings.draft_vocab_size > setup.vocab:
        raise OutriderError(
            f"--draft-vocab-size is {settings.draft_vocab_size}, and the target has {setup.vocab} tokens;"
            " use fewer, or 0 for all"
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
        guesses=settings.draft_tokens,
        modules=settings.mtp_modules,
        own_lm_head=settings.own_lm_head,
    )


def _begun(settings: Settings, wanted: HeadDescription, setup: ProposerSetup) -> HeadModule:
    """A draft that was trained before, to go on with."""
    assert settings.init_from is not None
    module = read_head(model_folder(settings.init_from), dtype=torch.float32, device=setup.device).requires_grad_(True)
    it = module.description
    shaping = (
        settings.depth,
        settings.intermediate_size,
        settings.hidden_size,
        settings.draft_vocab_size,
        settings.draft_tokens,
    )
    chosen = settings.own_lm_head, settings.mask_token_id
    if any(shaping) or settings.mtp_modules > 1 or chosen != (None, None):
        raise OutriderError(
            f"--init-from {settings.init_from} defines the shape of the draft; leave --depth, --intermediate-size,"
            " --hidden-size, --draft-vocab-size, --own-lm-head, --draft-tokens, --mtp-modules and --mask-token-id out"
        )
    ours, theirs = ((each.kind, each.vocab, each.target_hidden, each.target_layers) for each in (wanted, it))
    same = 4 if settings.init_target is None else 2
    if ours[:same] != theirs[:same]:
        raise OutriderError(
            f"{settings.init_from} is of kind {it.kind}, for a target with vocabulary {it.vocab},"
            f" width {it.target_hidden} and {it.target_layers} layers; this training needs kind {wanted.kind}, for a"
            f" target with vocabulary {ours[1]}, width {ours[2]} and {ours[3]} layers"
        )
    if it.input_fusion and wanted.input_fusion and it.input_fusion.at is not wanted.input_fusion.at:
        raise OutriderError(
            f"{settings.init_from} fuses embeddings and hidden states at its {it.input_fusion.at},"
            f" and {wanted.kind} does so at its {wanted.input_fusion.at};"
            f" train {'slim' if it.input_fusion.at is FusionPoint.PROJECTION else 'eagle31'} instead"
        )
    if set(it.shared_kv) != set(wanted.shared_kv):
        raise OutriderError(
            f"{settings.init_from} reads other keys and values than this target exports; leave --init-from out"
        )
    return module


def _check(kind: str, settings: Settings, it: HeadDescription) -> None:
    """No option is ignored."""
    count, heads = it.max_draft_tokens, it.stack.heads if it.stack else 0
    problems = {
        f"{kind} has no MLP; leave --intermediate-size out": settings.intermediate_size and it.body is None,
        f"{kind} has no block; leave --draft-tokens out": settings.draft_tokens and not it.parallel_draft_tokens,
        f"{kind} has no block; leave --mask-token-id out": settings.mask_token_id is not None and it.block is None,
        f"--mask-token-id is {settings.mask_token_id}, and the target has {it.vocab} tokens": (
            settings.mask_token_id or 0
        )
        >= it.vocab,
        f"{kind} has no modules; leave --mtp-modules out": settings.mtp_modules > it.modules,
        f"{kind} drafts {count} tokens and trains all of them; leave --ttt-length out": count
        and settings.ttt_length not in (None, count),
        f"{kind} trains all draft tokens at every position; leave --multi-step-share out": settings.multi_step_share
        != 1
        and (heads or it.modules > 1),
        "--ttt-length 1 trains only the first draft token; leave --multi-step-share out": settings.multi_step_share != 1
        and settings.ttt_length == 1
        and not count,
        f"{kind} has {heads} heads where --depth is {settings.depth}; use 2 or more": heads
        and settings.depth not in (0, heads),
    }
    if found := [text for text, wrong in problems.items() if wrong]:
        raise OutriderError(found[0])
