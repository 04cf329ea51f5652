"""Make the requests of an engine from encoded prompts and sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import count
from numbers import Number
from typing import TYPE_CHECKING, Any

from outrider.core.grammar import Grammar
from outrider.core.noise import derive_seed
from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.types import AudioFeatures, Request, SpeechOutput
from outrider.engine.codec import EncodedPrompt, EncodedSource, Prompt, Source, TextCodec
from outrider.errors import OutriderError, either
from outrider.runtime.ranks import of_first_rank

if TYPE_CHECKING:
    from outrider.engine.build import EngineParts


class RequestMaker:
    """Makes the requests of an engine. Each has its own id and seed."""

    def __init__(self, parts: EngineParts, codec: TextCodec) -> None:
        """Make requests for the engine of `parts`. `codec` compiles their constraints."""
        self._parts = parts
        self._codec = codec
        self._ids = count()

    def make(
        self,
        encoded: EncodedPrompt,
        params: SamplingParams,
        *,
        seed: int | None = None,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[Request]:
        """Return the `n` requests of a prompt that a `TextCodec` of this model has encoded.

        `seed` is for parameters without one; None: a random seed. `speech_output` is for speech models.

        Raises:
            InvalidParam: the prompt or a parameter does not fit the model.
        """
        parts = self._parts
        tokens, source = encoded
        self._check_prompt(tokens, params)
        alternative = _choice("proposer", params.proposer, parts.proposers)
        _choice("verifier", params.verifier, parts.verifiers)
        grammar = self._grammar_of(params)
        if params.seed is not None:
            seed = params.seed
        elif seed is None:
            seed = secrets.randbits(63)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else parts.end_ids)
        room = parts.context - len(tokens)
        return [
            Request(
                id=next(self._ids),
                prompt_token_ids=tokens,
                params=params,
                seed=derive_seed(seed, i),
                end_ids=ends,
                max_tokens=min(params.max_tokens or room, room),
                alternative=alternative,
                grammar=grammar,
                source_token_ids=encoded.source_token_ids,
                source_features=source if isinstance(source, AudioFeatures) else None,
                speech_output=speech_output,
            )
            for i in range(params.n)
        ]

    def of_prompts(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        params: SamplingParams | Sequence[SamplingParams] | None,
        sources: Source | Sequence[Source] | None,
    ) -> list[Request]:
        """Return the requests of prompts, `n` for each. The arguments are those of `LLM.generate`.

        Raises:
            OutriderError: a prompt, a source or a parameter does not fit the model, or their numbers differ.
        """
        prompt_list, source_list = _pair(prompts, sources)
        params_list = list(params) if isinstance(params, Sequence) else [params] * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise OutriderError(
                f"{len(prompt_list)} prompts came with {len(params_list)} parameters; give one, or one per prompt"
            )
        requests = []
        for prompt, prompt_params, source in zip(prompt_list, params_list, source_list, strict=True):
            requests += self.of_prompt(prompt, prompt_params, source)
        return requests

    def of_prompt(
        self, prompt: Prompt | None, params: SamplingParams | None = None, source: Source | None = None
    ) -> list[Request]:
        """Return the `n` requests of a prompt. None: the start tokens of an encoder-decoder target.

        Raises:
            OutriderError: the prompt, the source or a parameter does not fit the model.
        """
        encoded = self._codec.encode_with_source(prompt, source)
        seed = of_first_rank(secrets.randbits(63))
        return self.make(encoded, checked_params(params), seed=seed)

    def of_tokens(
        self,
        tokens: tuple[int, ...],
        params: SamplingParams,
        source: EncodedSource | None = None,
        *,
        seed: int | None = None,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[Request]:
        """Check the source, then do what `make` does."""
        self._codec.check_source(source)
        return self.make(EncodedPrompt(tokens, source), params, seed=seed, speech_output=speech_output)

    def _check_prompt(self, tokens: tuple[int, ...], params: SamplingParams) -> None:
        """Check the prompt, the token ids and min_tokens of a request against the vocabulary and the context."""
        parts = self._parts
        if not tokens:
            raise InvalidParam("prompt", "the prompt is empty; give at least one token")
        room = parts.context - len(tokens)
        if room < 1:
            checkpoint = parts.loaded.checkpoint
            remedy = " or raise max_model_len"
            if parts.context == checkpoint.context:
                remedy = f" ({checkpoint.context_reason or 'the model takes no more'})"
            raise InvalidParam(
                "prompt",
                f"the prompt is {len(tokens)} tokens long and the context holds {parts.context};"
                f" shorten the prompt{remedy}",
            )
        for param, ids in (
            ("prompt", tokens),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if message := self._codec.outside(ids):
                raise InvalidParam(param, message)
        if params.min_tokens > room:
            raise InvalidParam(
                "min_tokens",
                f"min_tokens is {params.min_tokens}, and after the prompt the context has room for"
                f" {room} tokens; lower min_tokens, or shorten the prompt",
            )

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        if params.constraint is None:
            return None
        try:
            return self._codec.prepare(params.constraint)
        except OutriderError as error:
            raise InvalidParam("constraint", str(error)) from error


def _choice(what: str, name: str | None, known: Sequence[str]) -> int | None:
    """Return the index of a name that a request has chosen, or None if it leaves the choice to the engine."""
    if name is not None and name not in known:
        raise InvalidParam(what, f"{what} {name!r} is not available; use {either(known)}, or leave it out")
    return None if name is None else known.index(name)


def checked_params(params: SamplingParams | None) -> SamplingParams:
    """Return sampling parameters; for None the default ones. Raises OutriderError if they are something else."""
    if params is not None and not isinstance(params, SamplingParams):
        raise OutriderError(f"params is {params!r}; give SamplingParams(...)")
    return params or SamplingParams()


def _pair(
    prompts: Prompt | Sequence[Prompt] | None, sources: Source | Sequence[Source] | None
) -> tuple[list[Prompt | None], list[Source | None]]:
    """Return prompts and their sources as lists of equal length."""
    if prompts is None and sources is None:
        raise OutriderError("there is no prompt; give prompts, or sources for an encoder-decoder model")
    prompt_list: list[Prompt | None] = [] if prompts is None else [*as_list(prompts)]
    source_list: list[Source | None] = [] if sources is None else [*as_list(sources)]
    if prompts is None:
        prompt_list = [None] * len(source_list)
    elif sources is None:
        source_list = [None] * len(prompt_list)
    if len(prompt_list) != len(source_list):
        raise OutriderError(
            f"{len(prompt_list)} prompts came with {len(source_list)} sources; give one source per prompt"
        )
    return prompt_list, source_list


def as_list(prompts: Any) -> list[Any]:
    """Return prompts or sources as a list. A list of numbers is a single one, as is anything but a list."""
    if not isinstance(prompts, Sequence) or isinstance(prompts, str | bytes | bytearray | memoryview):
        return [prompts]
    if prompts and all(isinstance(token, Number) for token in prompts):
        return [prompts]
    return list(prompts)
