"""The jobs of a measurement: prompts with sampling parameters, in batches that run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING

from outrider.core.noise import derive_seed
from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.engine.codec import EncodedPrompt, EncodedSource
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from outrider.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt to complete."""

    prompt: tuple[int, ...]  # token ids
    source: EncodedSource | None = None  # what the encoder of an encoder-decoder target reads
    params: SamplingParams  # without a seed, as most requests are; a seed can restrict the draft
    seed: int = 0  # of the noise

    def with_seed(self, salt: int) -> Job:
        """Return the job with another seed, which depends on its own one and on `salt`."""
        return replace(self, seed=derive_seed(self.seed, salt))

    def shortened(self, max_tokens: int) -> Job:
        """Return the job with at most `max_tokens` tokens of output, for a warm-up."""
        limit = min(max_tokens, self.params.max_tokens or max_tokens)
        return replace(self, params=replace(self.params, max_tokens=limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The settings that variants must share to be compared with each other."""

    batch: int  # sequences at once
    temperature: float
    context: int | None = None  # tokens of prompt and completion together; None: prompts are not lengthened

    def __str__(self) -> str:
        context = "" if self.context is None else f", context {self.context}"
        return f"batch {self.batch}, temperature {self.temperature:g}{context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """Prompts that run together."""

    number: int
    jobs: tuple[Job, ...]
    categories: tuple[str, ...]  # of each prompt


def make_batches(
    llm: LLM, prompts: Sequence[Prompt], condition: Condition, *, max_tokens: int, seed: int
) -> tuple[PromptBatch, ...]:
    """Return batches of prompts of one category each. Prompts of the category fill up its last batch.

    Args:
        condition: the batch size, the temperature and the length of the prompts.
        max_tokens: output tokens of each prompt.
        seed: each job has its own seed, which depends on this one.

    Raises:
        OutriderError: a prompt does not fit into the context.
    """
    encoded = [_encode(llm, prompt) for prompt in prompts]
    if condition.context is not None:
        encoded = _lengthen(encoded, condition.context - max_tokens)
    for prompt, (tokens, _) in zip(prompts, encoded, strict=True):
        _check_length(prompt, len(tokens), max_tokens, llm.parts.context)
    batches: list[PromptBatch] = []
    num_jobs = 0
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        group = [each for prompt, each in zip(prompts, encoded, strict=True) if prompt.category == category]
        padded = [*group, *islice(cycle(group), -len(group) % condition.batch)]
        for start in range(0, len(padded), condition.batch):
            chunk = padded[start : start + condition.batch]
            jobs = []
            for i, (tokens, source) in enumerate(chunk):
                params = SamplingParams(temperature=condition.temperature, max_tokens=max_tokens)
                own = derive_seed(seed, num_jobs + i)
                jobs.append(Job(prompt=tokens, source=source, params=params, seed=own))
            categories = (category,) * len(jobs)
            batches.append(PromptBatch(number=len(batches), jobs=tuple(jobs), categories=categories))
            num_jobs += len(jobs)
    return tuple(batches)


def encode_prompt(llm: LLM, prompt: Prompt) -> tuple[int, ...]:
    """Return the tokens of a prompt, which is a text or a chat."""
    return llm.encode_chat(prompt.messages) if prompt.messages else llm.encode(prompt.prompt or "")


def _encode(llm: LLM, prompt: Prompt) -> EncodedPrompt:
    """Return the tokens of a prompt, and of its source if the target is an encoder-decoder model."""
    if llm.parts.source_rules is None:
        return EncodedPrompt(encode_prompt(llm, prompt))
    try:
        return llm.codec.encode_with_source(prompt.prompt, prompt.source)
    except OutriderError as error:
        raise OutriderError(f"prompt {prompt.id}: {error}") from error


def _lengthen(encoded: Sequence[EncodedPrompt], size: int) -> list[EncodedPrompt]:
    """Return prompts of `size` tokens: each ends with the original one, and the other prompts precede it.

    The prompts are repeated as often as needed. Tokens before the last `size` are cut off.
    """
    token_lists = [prompt.tokens for prompt in encoded]
    repeats = 1 + size // sum(map(len, token_lists))
    lengthened = []
    for i in range(len(token_lists)):
        rotated = [*token_lists[i + 1 :], *token_lists[: i + 1]]
        lengthened.append(EncodedPrompt(tuple(chain.from_iterable(rotated * repeats))[-size:]))
    return lengthened


def _check_length(prompt: Prompt, length: int, max_tokens: int, context: int) -> None:
    if length + max_tokens > context:
        raise OutriderError(
            f"prompt {prompt.id} has {length} tokens, and with max_tokens {max_tokens} the context of {context} tokens"
            " is too small; remove the prompt, lower max_tokens, or raise --context of bench or --max-model-len of tune"
        )
