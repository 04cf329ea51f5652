"""A draft model in training: a small causal language model that learns the target's laws (Hinton et al. 2015)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging as transformers_logging

from outrider.errors import OutriderError
from outrider.heads.description import AuxStates, SharedKV
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import model_folder
from outrider.loader.make import make_target
from outrider.models.attention import NAME
from outrider.models.base import WeightSharer
from outrider.models.checkpoint import Checkpoint
from outrider.propose.base import Proposer, ProposerSetup
from outrider.propose.draft_model.chain import DraftModelProposer
from outrider.train.data.sample import Sample
from outrider.train.loss.steps import Step, Texts
from outrider.train.settings import DRAFT, Settings


class DraftModelTrainee:
    """The draft in the folder that `settings.draft` names, and what training makes of it.

    It reads the text alone, so a guess is the same however many guesses it comes after: one step says everything. More
    steps weigh the same guesses more often, and are there for losses of several guesses together.
    """

    steps, lr = 1, 1e-4
    shared_kv: tuple[SharedKV, ...] = ()

    def __init__(self, settings: Settings, setup: ProposerSetup) -> None:
        """Load it.

        Raises:
            OutriderError: there is no such model, or it cannot be a draft for this target.
        """
        folder = _folder(settings)
        self._checkpoint = it = teachable(folder, setup.device)
        if it.recurrent:
            raise OutriderError(f"{folder} is recurrent, and a recurrent draft is not handled yet; use another one")
        if it.tokenizer.get_vocab() != setup.tokenizer.get_vocab():
            raise OutriderError(
                f"the draft in {folder} has another vocabulary than the target, so their laws cannot be compared; use"
                " one of the target's family"
            )
        assert isinstance(setup.target, WeightSharer)
        self.module: Any = it.model
        self.aux_states = AuxStates(layers=(setup.target.layers - 1,), final=True)
        self.ids = torch.arange(min(it.vocab, setup.vocab), device=setup.device)

    def begin(self, samples: Callable[[], Sequence[Sample]]) -> None:
        """Nothing follows from texts here: the draft has its weights, and guesses all tokens."""

    def unroll(self, texts: Texts, steps: int) -> Iterator[Step]:
        size = min(texts.learn.shape[1], self._checkpoint.context)
        logits = self.module(input_ids=texts.tokens[:, :size], use_cache=False).logits[..., : len(self.ids)]
        for step in range(min(steps, size)):
            learn = texts.learn[:, step:size]
            row, column = learn.nonzero(as_tuple=True)
            yield Step(learn=learn, logits=logits[row, column + step], target=texts.target_probs_at(row, column + step))

    def proposer(self, setup: ProposerSetup) -> Proposer:
        still = still_of(self.module, setup.dtype)
        still.set_attn_implementation(NAME)
        checkpoint = replace(self._checkpoint, model=still, dtype=setup.dtype)
        size = min(checkpoint.context, setup.context)
        return DraftModelProposer(
            setup, make_target(checkpoint, slots=setup.slots, context=size, kernels=setup.kernels)
        )

    def save(self, folder: Path) -> None:
        write_model(folder, self._checkpoint)


def teachable(folder: Path, device: torch.device) -> Checkpoint:
    """A model whose weights can be trained, in float32, with attention that has slopes.

    Raises:
        OutriderError: there is none.
    """
    it = load_checkpoint(folder, dtype="float32", device=str(device))
    it.model.requires_grad_(True)
    try:
        it.model.set_attn_implementation("sdpa")
    except ValueError:  # it knows the plain one alone
        it.model.set_attn_implementation("eager")
    return it


def still_of(model: nn.Module, dtype: torch.dtype) -> Any:
    """A copy that is not trained."""
    return deepcopy(model).to(dtype).requires_grad_(False).eval()


def write_model(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a model in bfloat16 and its tokenizer as a Hugging Face folder; what lay there survives a failure.

    Raises:
        OutriderError: the disk is full, or the folder cannot be written.
    """
    fresh = folder / "model.new"
    level, shown = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        still_of(checkpoint.model, torch.bfloat16).save_pretrained(fresh)
        checkpoint.tokenizer.save_pretrained(fresh)
        for file in fresh.glob("*.safetensors"):
            shutil.copymode(fresh / "config.json", file)  # safetensors lets nobody but the owner read what it writes
        for file in sorted(fresh.iterdir()):
            file.replace(folder / file.name)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OutriderError(f"{folder} cannot be written ({error}); free some space, or give another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _folder(settings: Settings) -> Path:
    """Where the draft lies that is to be trained; and no option is ignored."""
    shaping = {
        "--depth": settings.depth,
        "--intermediate-size": settings.intermediate_size,
        "--hidden-size": settings.hidden_size,
        "--draft-vocab-size": settings.draft_vocab_size,
        "--draft-tokens": settings.draft_tokens,
        "--mask-token-id": settings.mask_token_id is not None,
        "--mtp-modules": settings.mtp_modules > 1,
        "--own-lm-head": settings.own_lm_head is not None,
    }
    if given := [name for name, value in shaping.items() if value]:
        raise OutriderError(f"{given[0]} shapes a new draft, and a draft model has its shape; leave it out")
    if settings.init_target:
        raise OutriderError("a draft model reads no target's states, and goes with any; leave --init-target out")
    if settings.multi_step_share != 1:
        raise OutriderError("a draft model trains all draft tokens at every position; leave --multi-step-share out")
    if not settings.init_from:
        raise OutriderError(f"the kind {DRAFT} goes on training a small model; name its folder with --init-from DIR")
    folder = model_folder(settings.init_from)
    if folder.resolve() == Path(settings.out).expanduser().resolve():
        raise OutriderError(f"--init-from and --out are both {settings.out}; write into another folder")
    return folder
