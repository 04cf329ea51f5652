"""Checks of memory and disk before anything is loaded."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.core.config import DRAFT_OPTIONS
from outrider.drafting.propose.draft_model.window import MIN_WINDOW
from outrider.drafting.propose.registry import check_draft_settings
from outrider.engine.build import full_dtype
from outrider.errors import OutriderError
from outrider.lab.fit.rules import TargetSize, TrainingPlan
from outrider.lab.fit.settings import Settings
from outrider.models.heads.store import HeadModule, make_module
from outrider.models.heads.targets.registry import is_autoregressive
from outrider.models.loader.load import check_fits, read_model_config
from outrider.models.loader.memory import gigabytes
from outrider.train.model.presets import Sizes, describe

# Bytes per parameter: weights and two moments in float32 for the new and the previous state, and the head twice.
_HEAD_BYTES = 2 * (12 + 2)
_SMALL_FILES = 10_000_000  # state, log, prompts and configuration


def target_size(folder: Path) -> TargetSize:
    """Return the sizes of a target, from its config."""
    text = read_model_config(folder).get_text_config(decoder=True)
    return TargetSize(hidden=text.hidden_size, layers=text.num_hidden_layers, vocab=text.vocab_size)


def check_memory(settings: Settings, folder: Path) -> None:
    """Check that the weights of the target fit into the free memory.

    Raises:
        OutriderError: they do not fit, or the folder is not a model.
    """
    dtype = full_dtype(settings.engine.dtype, settings.engine.bits)
    check_fits(folder, dtype=dtype, device=settings.engine.device, kernels=settings.engine.kernels)


def check_disk(folder: Path, size: TargetSize, plan: TrainingPlan) -> None:
    """Check that the head and the state of its training fit on the disk. Raises OutriderError if they do not fit."""
    needed = _SMALL_FILES + _HEAD_BYTES * count_parameters(size, plan)
    present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if needed > free + present:
        raise OutriderError(
            f"a head of kind {plan.kind} and the state of its training take {gigabytes(needed)}, and"
            f" {gigabytes(free)} are free in {existing}; free some space, or use another --out"
        )


def check_drafts(settings: Settings, proposers: Sequence[str]) -> None:
    """Check that the options of drafts have a draft: a proposer that needs no training, or the head.

    Raises:
        OutriderError: there is no draft, or a head cannot read so small a window.
    """
    window = settings.engine.draft_window
    if not settings.max_minutes:
        check_draft_settings(settings.engine, *proposers)
    elif window is not None and window < MIN_WINDOW:
        raise OutriderError(f"--draft-window is {window}; use at least {MIN_WINDOW} tokens")


def check_head(settings: Settings, size: TargetSize, plan: TrainingPlan) -> None:
    """Check before the training that the options of drafts apply to its head.

    Raises:
        OutriderError: heads of this kind support none of them.
    """
    if settings.engine.draft_candidates is not None:
        raise OutriderError("draft heads support no --draft-candidates; leave it out, or set --max-minutes 0")
    module = _empty_head(size, plan)
    if module is None or is_autoregressive(module):
        return
    for name in DRAFT_OPTIONS:
        if getattr(settings.engine, name) is not None:
            raise OutriderError(
                f"heads of kind {plan.kind} support no --{name.replace('_', '-')}; leave it out, or use --head slim,"
                " eagle31 or mtp"
            )


def count_parameters(size: TargetSize, plan: TrainingPlan) -> int:
    """Return the number of parameters of a head, without its weights. 0: its kind does not fit the target."""
    module = _empty_head(size, plan)
    return 0 if module is None else sum(weight.numel() for weight in module.parameters())


def _empty_head(size: TargetSize, plan: TrainingPlan) -> HeadModule | None:
    """Return a head without memory; None: its kind does not fit the target, as the training says."""
    sizes = Sizes(
        hidden=size.hidden,
        layers=size.layers,
        vocab=size.vocab,
        epsilon=1e-6,
        draft_vocab=plan.draft_vocab_size % size.vocab,
    )
    try:
        with torch.device("meta"):
            return make_module(describe(plan.kind, sizes))
    except OutriderError:
        return None
