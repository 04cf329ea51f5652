"""Trains a draft model: a small causal language model that learns the target's distributions (Hinton et al. 2015)."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.target import WeightSharer
from outrider.core.types import SharedWeights
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.vocabulary.reduced import (
    read_draft_vocabulary,
    reduce_vocabulary,
    write_draft_vocabulary,
)
from outrider.errors import OutriderError
from outrider.models.heads.description import AuxStates, SharedKV
from outrider.models.loader.embedded import model_folder
from outrider.models.loader.load import load_checkpoint, refuse_sources
from outrider.models.loader.make import make_target
from outrider.models.loader.quiet import quiet_transformers
from outrider.models.torch.attention import NAME
from outrider.models.torch.checkpoint import Checkpoint
from outrider.models.torch.gguf_linear import expand_blocks
from outrider.train.data.batches import most_frequent_tokens
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, TrainingBatch
from outrider.train.settings import DRAFT, Settings

_IDS = "outrider_draft_ids"  # name of the buffer with the draft vocabulary


class DraftModelTrainee:
    """A draft model in training, loaded from the folder `settings.init_from`.

    A draft model only reads tokens, so its prediction does not depend on which of them are draft tokens. One step
    trains all predictions. More steps repeat them, which the losses of whole chains need.
    """

    steps = 1
    lr = 1e-4
    shared_kv: tuple[SharedKV, ...] = ()

    def __init__(self, settings: Settings, setup: ProposerSetup) -> None:
        """Load the draft model. Raises OutriderError if there is no such model, or it cannot draft for this target."""
        folder = _draft_folder(settings)
        self._checkpoint = load_trainable(folder, setup.device)
        if self._checkpoint.recurrent:
            raise OutriderError(f"{folder} is a recurrent model, which cannot be trained yet; use another draft model")
        if self._checkpoint.tokenizer.get_vocab() != setup.tokenizer.get_vocab():
            raise OutriderError(
                f"the draft in {folder} has another vocabulary than the target, so their"
                " distributions cannot be compared; use a model of the target's family"
            )
        assert isinstance(setup.target, WeightSharer)
        vocab = min(self._checkpoint.vocab, setup.vocab)
        self.ids = _draft_ids(settings, folder, vocab).to(setup.device)
        self._vocab = vocab
        self._drafts_all = len(self.ids) == vocab
        self._chooses_ids = bool(settings.draft_vocab_size) and not self._drafts_all
        self.module: Any = self._checkpoint.model
        self.aux_states = AuxStates(layers=(setup.target.layers - 1,), final=True)
        if not self._drafts_all:
            self.module.register_buffer(_IDS, self.ids)  # part of the saved state of the training

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        """Choose the draft vocabulary, if it is to be reduced. The draft model has its weights."""
        if self._chooses_ids:
            self.ids.copy_(most_frequent_tokens(samples(), self._vocab, len(self.ids), self.ids.device))

    def use_tables(self, tables: SharedWeights) -> None:
        """Do nothing: the draft model has its own embedding and LM head."""

    def unroll(self, batch: TrainingBatch, steps: int) -> Iterator[Step]:
        size = min(batch.loss_mask.shape[1], self._checkpoint.context)
        logits = self.module(input_ids=batch.tokens[:, :size], use_cache=False).logits
        logits = logits[..., : self._vocab] if self._drafts_all else logits[..., self.ids]
        for step in range(min(steps, size)):
            loss_mask = batch.loss_mask[:, step:size]
            row, column = loss_mask.nonzero(as_tuple=True)
            yield Step(
                loss_mask=loss_mask, logits=logits[row, column + step], target=batch.target_probs_at(row, column + step)
            )

    def proposer(self, setup: ProposerSetup) -> Proposer:
        model = frozen_copy(self.module, setup.dtype)
        model.set_attn_implementation(NAME)
        checkpoint = self._checkpoint.with_model(model, setup.dtype)
        context = min(checkpoint.context, setup.context)
        target = make_target(checkpoint, slots=setup.slots, context=context, kernels=setup.kernels)
        if not self._drafts_all:
            target = reduce_vocabulary(target, checkpoint, self.ids.clone(), kernels=setup.kernels)
        return DraftModelProposer(setup, target)

    def save(self, folder: Path) -> None:
        write_model(folder, self._checkpoint)
        if not self._drafts_all:
            write_draft_vocabulary(folder, self.ids)


def load_trainable(folder: Path, device: torch.device) -> Checkpoint:
    """Load a model for training: in float32, with gradients, and with an attention that has a backward pass.

    Raises:
        OutriderError: the folder holds no model that can be loaded.
    """
    refuse_sources(folder, "train")
    checkpoint = load_checkpoint(folder, dtype="float32", device=str(device))
    expand_blocks(checkpoint.model)
    checkpoint = checkpoint.with_model(checkpoint.model)
    checkpoint.model.requires_grad_(True)
    try:
        checkpoint.model.set_attn_implementation("sdpa")
    except ValueError:  # the architecture only supports eager attention
        checkpoint.model.set_attn_implementation("eager")
    return checkpoint


def frozen_copy(model: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of the model in evaluation mode, without gradients."""
    module = deepcopy(model).to(dtype).requires_grad_(False).eval()
    module._buffers.pop(_IDS, None)
    return module


def write_model(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a model in bfloat16 and its tokenizer as a Hugging Face folder. If this fails, existing files are intact.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    temporary = folder / "model.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with quiet_transformers():
            frozen_copy(checkpoint.model, torch.bfloat16).save_pretrained(temporary)
        checkpoint.tokenizer.save_pretrained(temporary)
        for file in temporary.glob("*.safetensors"):
            # safetensors makes files that only their owner can read.
            shutil.copymode(temporary / "config.json", file)
        for file in sorted(temporary.iterdir()):
            file.replace(folder / file.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OutriderError(f"{folder} cannot be written ({error}); free some space, or give another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _draft_ids(settings: Settings, folder: Path, vocab: int) -> torch.Tensor:
    """Return the draft vocabulary [Vd]. `begin` chooses its ids if its size is an option."""
    size = settings.draft_vocab_size
    present = read_draft_vocabulary(folder, vocab)
    if present is not None and size:
        raise OutriderError(f"{folder} has a draft vocabulary of {len(present)} tokens; leave --draft-vocab-size out")
    if size > vocab:
        raise OutriderError(
            f"--draft-vocab-size is {size}, and the draft model has {vocab} tokens; use fewer, or 0 for all"
        )
    return torch.arange(size or vocab) if present is None else present


def _draft_folder(settings: Settings) -> Path:
    """Return the folder of the draft model to train. An option that it ignores is an error."""
    shape_options = {
        "--depth": settings.depth,
        "--intermediate-size": settings.intermediate_size,
        "--hidden-size": settings.hidden_size,
        "--draft-tokens": settings.draft_tokens,
        "--mask-token-id": settings.mask_token_id is not None,
        "--mtp-modules": settings.mtp_modules > 1,
        "--centroids": settings.centroids,
        "--own-lm-head": settings.own_lm_head is not None,
    }
    if given := [name for name, value in shape_options.items() if value]:
        raise OutriderError(f"{given[0]} shapes a new draft, and a draft model already has its shape; leave it out")
    if settings.init_target:
        raise OutriderError(
            "a draft model does not read the hidden states of a target, so it works with any"
            " target; leave --init-target out"
        )
    if settings.multi_step_share != 1:
        raise OutriderError("a draft model trains all draft tokens at every position; leave --multi-step-share out")
    if not settings.init_from:
        raise OutriderError(
            f"the kind {DRAFT} continues the training of a small model; name its folder with --init-from DIR"
        )
    folder = model_folder(settings.init_from)
    if folder.resolve() == Path(settings.out).expanduser().resolve():
        raise OutriderError(f"--init-from and --out are both {settings.out}; write into another folder")
    return folder
