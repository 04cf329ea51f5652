"""Give a draft an LM head of low rank, which chooses the tokens that get exact logits (SlimSpec, SpecVocab).

A draft with a large vocabulary spends much of its time in the LM head. No token is left
out: the others have approximate logits. A draft token is sampled from the softmax of all of them,
and verified with the same distribution, so the output stays exact.
"""

from typing import Any

import torch

from outrider.core.prompts import read_prompts
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target
from outrider.drafting.propose.draft_model.calibrated_copy import sample_texts
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.errors import OutriderError
from outrider.models.loader.computed import computed_once
from outrider.models.native.low_rank import LowRankHead
from outrider.models.native.pack import PANEL
from outrider.models.native.target import NativeTarget
from outrider.models.torch.checkpoint import Checkpoint
from outrider.runtime.progress import stage

_TEXT_TOKENS = 96  # that a draft model reads of each embedded prompt
_COPY_TOKENS = 24  # that a target reads of each: its passes take longer, and with 256 panels more tokens change little
_COPY_PANELS = 256  # of a copy of the target
_COPY_VOCAB = 4 * _COPY_PANELS * PANEL  # smallest vocabulary of which a copy ranks the tokens
_COPY_OPERATIONS = 3e11  # most that the factors for a copy take by default: about 3 s on two cores with AVX2


def use_candidates(model: Target, checkpoint: Checkpoint, candidates: int) -> None:
    """Make a draft model compute exact logits for some panels of 32 tokens only: those that factors rank first.

    The factors are best for the embedded prompts. They are computed once for a checkpoint and kept in the cache folder.

    Args:
        model: the draft model. No sequence runs on it.
        checkpoint: what it was made from.
        candidates: the number of panels.

    Raises:
        OutriderError: the model does not run on the native kernels.
    """
    native = unwrapped(model)
    if not isinstance(native, NativeTarget):
        raise _not_native(candidates, model)
    factors = _factors(native, checkpoint.folder, checkpoint.tokenizer, _TEXT_TOKENS)
    native.rank_tokens(factors, candidates)


def rank_copy_tokens(copy: Target, setup: ProposerSetup) -> None:
    """Make a quantized copy of the target compute exact logits for some panels only.

    Their number is `draft_candidates`. By default it is 256 for a large vocabulary, and there are no factors if they
    would delay the first start too much. Both depend on the model alone, so a seed gives the same text at each start.

    Args:
        copy: of the setup's target. No sequence runs on them.
        setup: of the proposer.

    Raises:
        OutriderError: `draft_candidates` is given, and the target does not run on the native kernels of one process.
    """
    asked = setup.draft_candidates
    target = setup.target
    if not (isinstance(copy, NativeTarget) and isinstance(target, NativeTarget)) or setup.ranks > 1:
        if asked is not None:
            raise _not_native(asked, copy)
        return
    tokens = _COPY_TOKENS * len(read_prompts())
    pays = copy.vocab >= _COPY_VOCAB and copy.factor_operations(tokens) <= _COPY_OPERATIONS
    if pays or asked is not None:
        factors = _factors(target, setup.target_folder, setup.tokenizer, _COPY_TOKENS)
        copy.rank_tokens(factors, _COPY_PANELS if asked is None else asked)


def _not_native(candidates: int, model: Target) -> OutriderError:
    return OutriderError(
        f"draft_candidates is {candidates}, and the draft runs on the kernels {model.kernels}; use device cpu, kernels"
        " native and one process, or leave draft_candidates out"
    )


def _factors(native: NativeTarget, folder: str, tokenizer: Any, tokens: int) -> LowRankHead:
    """Return the factors of a model's LM head from the cache folder, or compute them and keep them there."""

    def compute() -> dict[str, torch.Tensor]:
        with stage("reducing the draft's LM head"):
            return native.factorize_head(sample_texts(tokenizer, tokens)).tensors()

    return native.restored_factors(computed_once("factors", folder, [native.kernels, tokens], compute))
