"""Give a draft model an LM head of low rank, which chooses the tokens that get exact logits (SlimSpec, SpecVocab).

A small draft model with a large vocabulary spends much of its time in the LM head. No token is left
out: the others have approximate logits. A draft token is sampled from the softmax of all of them,
and verified with the same distribution, so the output stays exact.
"""

from __future__ import annotations

from typing import Any

from outrider.core.prompts import read_prompts, text_tokens
from outrider.core.target import Target
from outrider.drafting.propose.vocabulary.wrapped_target import unwrapped
from outrider.errors import OutriderError
from outrider.models.native.target import NativeTarget
from outrider.runtime.progress import stage

_TEXT_TOKENS = 96  # that are read of each embedded prompt


def use_candidates(model: Target, tokenizer: Any, candidates: int) -> None:
    """Make a draft model compute exact logits for some panels of 32 tokens only: those that factors rank first.

    Args:
        model: the draft model. No sequence runs on it.
        tokenizer: its tokenizer, which reads the embedded prompts. The factors are best for them.
        candidates: the number of panels.

    Raises:
        OutriderError: the model does not run on the native kernels.
    """
    native = unwrapped(model)
    if not isinstance(native, NativeTarget):
        raise OutriderError(
            f"draft_candidates is {candidates}, and the draft runs on the kernels {model.kernels}; use"
            " device cpu and kernels native, or leave draft_candidates out"
        )
    texts = [prompt.prompt or _joined(prompt.messages) for prompt in read_prompts()]
    with stage("reducing the draft's LM head"):
        native.rank_tokens([text_tokens(tokenizer, text)[-_TEXT_TOKENS:] for text in texts], candidates)


def _joined(messages: Any) -> str:
    return "\n".join(message["content"] for message in messages)
