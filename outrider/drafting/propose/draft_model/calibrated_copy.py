"""Quantize a copy of the target so that its outputs, not its weights, are closest to the target's.

The error of a weight counts as much as the square of its input, as in the importance matrix of llama.cpp.
"""

from typing import Any

import torch

from outrider.core.prompts import read_prompts, text_tokens
from outrider.core.proposer import ProposerSetup
from outrider.core.target import SelfDraftTarget, Target
from outrider.models.loader.computed import computed_once
from outrider.models.native.target import NativeTarget
from outrider.runtime.progress import stage

_TOKENS = 5  # that the target reads of each embedded prompt: more hardly change the scales
MOST_OPERATIONS = 3e11  # that they may take: about 5 s on two cores with AVX2


def calibrated_copy(target: SelfDraftTarget, bits: int, setup: ProposerSetup) -> Target:
    """Make a copy of the target with 8 or 4 bits.

    With 4 bits and the native kernels, the target reads a few tokens of the embedded prompts at the first start. The
    measured inputs are kept in the cache folder. Larger targets read none, because it would delay the start too much.

    Args:
        target: no sequence runs on it.
        bits: of the copy.
        setup: of the proposer.
    """
    if bits != 4 or not isinstance(target, NativeTarget) or setup.ranks > 1 or setup.tokenizer is None:
        return target.make_requantized(bits)
    if target.pass_operations(_TOKENS * len(read_prompts())) > MOST_OPERATIONS:
        return target.make_requantized(bits)

    def measure() -> dict[str, torch.Tensor]:
        with stage("measuring the inputs of the target's layers"):
            return target.input_moments(sample_texts(setup.tokenizer, _TOKENS))

    return target.make_requantized(bits, computed_once("moments", setup.target_folder, [target.kernels], measure))


def sample_texts(tokenizer: Any, tokens: int) -> list[tuple[int, ...]]:
    """Return the last `tokens` token ids of each embedded prompt."""
    texts = (prompt.prompt or _joined(prompt.messages) for prompt in read_prompts())
    return [tuple(text_tokens(tokenizer, text)[-tokens:]) for text in texts]


def _joined(messages: Any) -> str:
    return "\n".join(message["content"] for message in messages)
