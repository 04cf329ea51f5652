"""Give a draft an LM head of low rank, which chooses the tokens that get exact logits (SlimSpec, SpecVocab).

A draft with a large vocabulary spends much of its time in the LM head. No token is left
out: the others have approximate logits. A draft token is sampled from the softmax of all of them,
and verified with the same distribution, so the output stays exact.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from outrider.core.prompts import read_prompts, text_tokens
from outrider.core.proposer import ProposerSetup
from outrider.core.target import Target
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.errors import OutriderError
from outrider.models.loader.fingerprint import code_fingerprint, model_fingerprint
from outrider.models.native.library import cache_folder
from outrider.models.native.low_rank import LowRankHead
from outrider.models.native.pack import PANEL
from outrider.models.native.target import NativeTarget
from outrider.models.torch.checkpoint import Checkpoint
from outrider.runtime.atomic_files import write_whole
from outrider.runtime.progress import stage

_TEXT_TOKENS = 96  # that a draft model reads of each embedded prompt
_COPY_TOKENS = 24  # that a target reads of each: its passes take longer, and with 256 panels more tokens change little
_COPY_PANELS = 256  # of a copy of the target
_COPY_VOCAB = 4 * _COPY_PANELS * PANEL  # smallest vocabulary of which a copy ranks the tokens
_COPY_OPERATIONS = 3e11  # most that the factors for a copy take by default: about 3 s on two cores with AVX2
_FILES = 8  # with factors, about a quarter of an LM head of 8 bits each


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
    file = _file(native, folder, tokens)
    factors = _read(file, native)
    if factors is None:
        with stage("reducing the draft's LM head"):
            factors = native.factorize_head(_texts(tokenizer, tokens))
        _write(file, factors)
    return factors


def _texts(tokenizer: Any, tokens: int) -> list[tuple[int, ...]]:
    """Return the last `tokens` token ids of each embedded prompt."""
    texts = (prompt.prompt or _joined(prompt.messages) for prompt in read_prompts())
    return [tuple(text_tokens(tokenizer, text)[-tokens:]) for text in texts]


def _joined(messages: Any) -> str:
    return "\n".join(message["content"] for message in messages)


def _file(native: NativeTarget, folder: str, tokens: int) -> Path | None:
    """Return the file of the factors. Its name depends on the model, the code and the weights.

    Returns:
        None: the model was not loaded from files, or there is no cache folder.
    """
    if not folder:
        return None
    facts = [model_fingerprint(Path(folder)), code_fingerprint(), native.kernels, tokens]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    try:
        return cache_folder() / f"factors-{key[:32]}.safetensors"
    except OutriderError:
        return None


def _read(file: Path | None, native: NativeTarget) -> LowRankHead | None:
    """Return kept factors; None: there are none, or the file is damaged."""
    if file is None:
        return None
    try:
        return native.restored_factors(load_file(file))
    except (OSError, SafetensorError, KeyError):
        return None


def _write(file: Path | None, factors: LowRankHead) -> None:
    """Keep factors. If the cache folder cannot be written, the next start computes them again."""
    if file is None:
        return
    with suppress(OSError, OutriderError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, save(factors.tensors()))
        for old in sorted(file.parent.glob("factors-*"), key=lambda each: each.stat().st_mtime)[:-_FILES]:
            old.unlink(missing_ok=True)
