"""The Python API: `LLM`."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Integral, Number
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from outrider.core.config import EngineConfig
from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammar, Grammars
from outrider.core.noise import derive_seed
from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.planner import Planner
from outrider.core.prompts import chat_tokens, text_tokens
from outrider.core.stats import Stats
from outrider.core.text import TextStream
from outrider.core.types import AudioFeatures, Completion, FinishReason, Request, SequenceState, SpeechOutput
from outrider.drafting.plan.store import PlanFile, check_plan, restored
from outrider.engine.build import EngineParts, build
from outrider.engine.engine import Engine
from outrider.engine.weights import EngineWeights, NewWeights
from outrider.errors import OutriderError
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.source import audio_features
from outrider.models.torch.speech.wav import Recording
from outrider.runtime.machine import use_threads
from outrider.runtime.ranks import of_first_rank

Prompt = str | Sequence[int]
# Text or token ids. For a speech model: the path of a WAV file, the samples of a recording, or its features.
Source = Prompt | Path | Sequence[float] | npt.NDArray[Any] | torch.Tensor | Recording | AudioFeatures
EncodedSource = tuple[int, ...] | AudioFeatures


class EncodedPrompt(NamedTuple):
    """The tokens of a prompt, and what the encoder of an encoder-decoder target reads; None: there is no encoder."""

    tokens: tuple[int, ...]
    source: EncodedSource | None = None

    @property
    def source_token_ids(self) -> tuple[int, ...]:
        """The tokens of the source; () if there is none, or if it is audio."""
        return self.source if isinstance(self.source, tuple) else ()


_log = logging.getLogger("outrider")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One item of `LLM.stream`: what a round has added."""

    text: str  # characters that no later token can change
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]  # by token: whether it is an accepted draft token
    completion: Completion | None  # in the last chunk


class LLM:
    """Generates text with a target and a proposer."""

    _plan: PlanFile | None

    def __init__(
        self,
        target: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        planner: Planner | None = None,
        **options: Any,
    ) -> None:
        """Load the models and build the engine.

        Args:
            target: a decoder-only or encoder-decoder model: its folder, a GGUF file, or a name on the Hugging Face Hub,
                "org/name". None: the embedded model.
            config: all settings in one record, in place of `target` and `options`.
            planner: sets the number of draft tokens in place of `k`.
            options: the fields of `EngineConfig`, such as proposer="draft:DIR", k=4 or quantize="int8".

        Raises:
            OutriderError: an option is unknown, or the models cannot be loaded; the message names the fix.
        """
        if config is not None and (target is not None or options):
            raise OutriderError("config holds all settings; give config alone, or target and options without it")
        if config is None:
            config = EngineConfig.from_options(target, **options)
        check_plan(config.plan, k=config.k, planned=planner is not None)
        use_threads(config.threads)
        self._set(build(config, planner=planner))
        self._plan = restored(
            config.plan,
            self._parts.planner,
            target=config.target,
            proposer=self._parts.proposer_spec,
            quantize=config.quantize,
        )

    @classmethod
    def from_parts(cls, parts: EngineParts) -> LLM:
        """Use an engine that was built before."""
        llm = cls.__new__(cls)
        llm._set(parts)
        return llm

    def _set(self, parts: EngineParts) -> None:
        self._parts = parts
        self._grammars = Grammars(parts.tokenizer, vocab=parts.vocab, end_ids=sorted(parts.end_ids))
        self._ids = count()
        self._weights = EngineWeights(parts)
        self._plan = None

    @property
    def engine(self) -> Engine:
        """The engine, for programs that call `step` themselves."""
        return self._parts.engine

    @property
    def parts(self) -> EngineParts:
        """The parts: target, proposer, verifier, tokenizer, dtype, device."""
        return self._parts

    @property
    def stats(self) -> Stats:
        """Sums over all rounds so far."""
        return self._parts.engine.stats

    @property
    def weights(self) -> EngineWeights:
        """The weights of the target and the draft: versions, updates, sleep and wake."""
        return self._weights

    def update_weights(self, weights: NewWeights, version: int | None = None) -> int:
        """Load new weights into the target, between two rounds. See `EngineWeights.update`."""
        return self._weights.update(weights, version)

    def encode(self, prompt: Prompt, *, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds.

        For encoder-decoder targets, the prompt is the beginning of the decoder's output. The model's start tokens are
        prepended; no other special tokens are added. `language` and `task` are those of `start_tokens`, for text only.

        Raises:
            OutriderError: the prompt is neither a string nor a list of token ids, or token ids come with a language or
                a task.
        """
        self._check_speech(language, task)
        if not isinstance(prompt, str) and (name := _first_given(language=language, task=task)):
            raise OutriderError(f"{name} is for a prompt of text; put its token among the ids, or leave {name} out")
        if isinstance(prompt, str) and self._parts.source_rules is not None:
            start = self.start_tokens(language, task)
            return start + text_tokens(self._parts.tokenizer, prompt, special=False)
        return self._encode(prompt, "a prompt")

    def encode_source(self, source: Source) -> EncodedSource:
        """Return the tokens of a source, with the special tokens that the tokenizer adds, or the features of audio.

        A speech model takes the path of a WAV file, a `Recording`, or samples [n] or [n, channels] in [-1, 1] at its
        rate, which is 16000 for Whisper.

        Raises:
            OutriderError: the source is neither a string nor a list of token ids, or is no audio that the model takes.
        """
        rules = self._speech_rules()
        return self._encode(source, "a source") if rules is None else audio_features(source, rules)

    def encode_with_source(self, prompt: Prompt | None, source: Source | None) -> EncodedPrompt:
        """Return the tokens of a prompt and what the encoder of an encoder-decoder target reads.

        Without a prompt, the output of such a target begins with its start tokens.

        Raises:
            OutriderError: the prompt or the source does not fit the model.
        """
        encoded_source = None if source is None else self.encode_source(source)
        self.check_source(encoded_source)
        return EncodedPrompt(self.start_tokens() if prompt is None else self.encode(prompt), encoded_source)

    def start_tokens(self, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the default prompt of an encoder-decoder target: the tokens that its output begins with.

        `language` and `task` are for speech models; see `SpeechRules.start_tokens`.

        Raises:
            OutriderError: the target is a decoder-only model, or its checkpoint does not name these tokens; or the
                speech model does not know the language or the task, or needs a language.
        """
        self._check_speech(language, task)
        rules = self._parts.source_rules
        if rules is None:
            raise OutriderError("this target is a decoder-only model and has no default prompt; give a prompt")
        if rules.speech is not None:
            return rules.speech.start_tokens(language, task)
        if not rules.start:
            raise OutriderError(
                "the target's checkpoint has no decoder_start_token_id; set it in its config.json, or give a prompt of"
                " token ids"
            )
        return rules.start

    def _check_speech(self, language: str | None, task: str | None) -> None:
        """Check that a language and a task are for a speech model."""
        if self._speech_rules() is None and (language is not None or task is not None):
            name = _first_given(language=language, task=task)
            raise OutriderError(f"{name} is for speech models, and this target is none; leave it out")

    def _speech_rules(self) -> SpeechRules | None:
        rules = self._parts.source_rules
        return None if rules is None else rules.speech

    def _encode(self, text: object, what: str) -> tuple[int, ...]:
        if isinstance(text, str):
            return text_tokens(self._parts.tokenizer, text)
        if not isinstance(text, Sequence) or isinstance(text, bytes | bytearray | memoryview):
            raise OutriderError(
                f"{what} has the type {type(text).__name__}; give a string, or a list of token ids (of an array its"
                " tolist())"
            )
        return _whole_ids(what, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens.

        Raises:
            OutriderError: an item is not a token id of the vocabulary.
        """
        if isinstance(tokens, str | bytes | bytearray) or not isinstance(tokens, Iterable):
            raise OutriderError(f"{tokens!r} is no list of token ids; give whole numbers")
        ids = _whole_ids("the list to decode", tokens)
        if message := _outside(ids, self._parts.vocab):
            raise OutriderError(message)
        return self._text(ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Apply the chat template to a conversation and return the tokens, up to the assistant's turn.

        Args:
            messages: the conversation.
            tools: descriptions of functions, for templates that support them.
            add_generation_prompt: whether the assistant's turn begins after the last message.
            continue_final_message: end within the last message, which the completion continues.

        Raises:
            OutriderError: the model has no chat template, or the template refuses or drops a message.
        """
        if self._parts.source_rules is not None:
            raise OutriderError(
                "this target is an encoder-decoder model, which takes a source and no conversation;"
                " give the text as a source"
            )
        if getattr(self._parts.tokenizer, "chat_template", None) is None:
            raise OutriderError("this model has no chat template; give the prompt as plain text")
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise OutriderError(
                'a conversation is a list of messages; give for example [{"role": "user", "content": "..."}]'
            )
        return chat_tokens(
            self._parts.tokenizer,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            continue_final_message=continue_final_message,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sources: Source | Sequence[Source] | None = None,
    ) -> list[Completion]:
        """Complete prompts together.

        Args:
            prompts: one or several, each a string or a list of token ids. None: the start tokens of the model, for each
                source.
            params: one for all prompts, or one per prompt; None: greedy.
            sources: what the encoder of an encoder-decoder target reads: one per prompt, each a string or a list of
                token ids. For a speech model: the path of a WAV file, or an array of samples; see `encode_source`.

        Returns:
            `n` completions per prompt, in the order of the prompts.

        Raises:
            OutriderError: a prompt, a source or a parameter does not fit the model.
        """
        prompt_list, source_list = _pair(prompts, sources)
        params_list = list(params) if isinstance(params, Sequence) else [params] * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise OutriderError(
                f"{len(prompt_list)} prompts came with {len(params_list)} parameters; give one, or one per prompt"
            )
        requests = []
        for prompt, prompt_params, source in zip(prompt_list, params_list, source_list, strict=True):
            requests += self.requests(prompt, prompt_params, source)
        seqs = [self.add(request) for request in requests]
        try:
            while not all(seq.finish_reason for seq in seqs):
                self.engine.step()
        finally:
            for seq in seqs:
                if not seq.finish_reason:
                    self.abort(seq.request.id)
        self.try_save_plan()
        return [self.completion(seq) for seq in seqs]

    def stream(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, *, source: Source | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield a chunk per round. Leaving the loop aborts the request.

        `source` and a missing prompt are for encoder-decoder targets, as in `generate`.
        """
        params = _checked(params)
        if params.n != 1:
            raise OutriderError(f"n is {params.n}; a stream carries one completion, so use 1, or generate for several")
        (request,) = self.requests(prompt, params, source)
        return self._chunks(self.add(request))

    def prepare(self, constraint: Constraint) -> Grammar:
        """Compile a constraint and cache it. Large ones take seconds.

        Raises:
            OutriderError: it is invalid or too large.
        """
        if not isinstance(constraint, Constraint):
            raise OutriderError(f"constraint is {constraint!r}; use one of Constraint's, such as Constraint.regex(...)")
        return self._grammars.compile(constraint)

    def submit(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, *, source: Source | None = None
    ) -> list[int]:
        """Queue a prompt and return the ids of its `n` requests. The caller calls `engine.step`."""
        requests = self.requests(prompt, params, source)
        for request in requests:
            self.add(request)
        return [request.id for request in requests]

    def add(self, request: Request) -> SequenceState:
        """Queue a request of `requests` and return its state."""
        stream = TextStream(self._text, request.params.stop, prompt=request.prompt_token_ids)
        return self.engine.add(request, stream)

    def abort(self, id: int) -> None:
        """Abort the request with this id, whether it waits or runs."""
        self.engine.abort(id)

    def save_plan(self) -> None:
        """Write the plan file, if there is one. `generate` and `stream` do so at their end.

        Raises:
            OutriderError: it cannot be written.
        """
        if self._plan is not None:
            self._plan.save(self._parts.planner)

    def _text(self, tokens: Sequence[int]) -> str:
        """Decode tokens that the engine has generated, without checks."""
        return str(self._parts.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _chunks(self, seq: SequenceState) -> Iterator[Chunk]:
        num_chars = 0  # characters of the chunks so far
        num_tokens = 0  # output tokens of the chunks so far
        finished = False
        try:
            while not finished:
                # Another loop may have called `step` already.
                if seq.num_output_tokens == num_tokens and not seq.finish_reason:
                    self.engine.step()
                    continue
                finished = seq.finish_reason is not None
                completion = self.completion(seq) if finished else None
                assert seq.stream is not None
                text = completion.text if completion else seq.stream.text[: seq.stream.safe_length()]
                tokens = tuple(seq.token_ids[len(seq.request.prompt_token_ids) + num_tokens :])
                yield Chunk(
                    text=text[num_chars:],
                    token_ids=tokens,
                    from_draft=tuple(seq.from_draft[num_tokens:]),
                    completion=completion,
                )
                num_chars = max(num_chars, len(text))
                num_tokens += len(tokens)
        finally:
            if not finished:
                self.abort(seq.request.id)
            self.try_save_plan()

    def try_save_plan(self) -> None:
        """Write the plan file, and log a warning if that fails."""
        try:
            self.save_plan()
        except OutriderError as error:
            _log.warning("the planner's state was not saved: %s", error)

    def requests(
        self, prompt: Prompt | None, params: SamplingParams | None, source: Source | None = None
    ) -> list[Request]:
        """Return the `n` requests of a prompt, for `add`.

        Raises:
            OutriderError: the prompt, the source or a parameter does not fit the model.
        """
        encoded = self.encode_with_source(prompt, source)
        seed = of_first_rank(secrets.randbits(63))
        return self.requests_of_tokens(encoded.tokens, _checked(params), encoded.source, seed=seed)

    def requests_of_tokens(
        self,
        tokens: tuple[int, ...],
        params: SamplingParams,
        source: EncodedSource | None = None,
        *,
        seed: int | None = None,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[Request]:
        """Return the `n` requests of a prompt that `encode` or `encode_chat` has turned into tokens.

        `source` is what `encode_source` returns, for encoder-decoder targets. `seed` is for parameters without one;
        None: a random seed. `speech_output` is for speech models.

        Raises:
            InvalidParam: the prompt, the source or a parameter does not fit the model.
        """
        parts = self._parts
        self.check_source(source)
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
                source_token_ids=source if isinstance(source, tuple) else (),
                source_features=source if isinstance(source, AudioFeatures) else None,
                speech_output=speech_output,
            )
            for i in range(params.n)
        ]

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
                f"the prompt is {len(tokens)} tokens long and the context holds {parts.context}; shorten the prompt"
                f"{remedy}",
            )
        for param, ids in (
            ("prompt", tokens),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
        ):
            if message := _outside(ids, parts.vocab):
                raise InvalidParam(param, message)
        if params.min_tokens > room:
            raise InvalidParam(
                "min_tokens",
                f"min_tokens is {params.min_tokens}, and after the prompt the context has room for {room} tokens; lower"
                " min_tokens, or shorten the prompt",
            )

    def _grammar_of(self, params: SamplingParams) -> Grammar | None:
        """Return the compiled constraint of a request; None if it has none."""
        if params.constraint is None:
            return None
        try:
            return self._grammars.compile(params.constraint)
        except OutriderError as error:
            raise InvalidParam("constraint", str(error)) from error

    def check_source(self, source: EncodedSource | None) -> None:
        """Raise InvalidParam if a source does not fit the target."""
        rules = self._parts.source_rules
        if rules is None:
            if source is not None:
                raise InvalidParam("source", "source is for encoder-decoder models, and this target is none; remove it")
        elif source is None:
            raise InvalidParam("source", "source is missing, which this encoder-decoder target reads; give a source")
        elif isinstance(source, AudioFeatures) or rules.speech is not None:
            if not isinstance(source, AudioFeatures):
                raise InvalidParam("source", "source is text, and this target is a speech model; give audio")
            if rules.speech is None:
                raise InvalidParam("source", "source is audio, and this target reads text; give text or token ids")
        elif not source:
            raise InvalidParam("source", "source is empty; give at least one token")
        elif len(source) > rules.context:
            raise InvalidParam(
                "source",
                f"source is {len(source)} tokens long, and the encoder takes {rules.context}; shorten the source",
            )
        elif message := _outside(source, self._parts.vocab):
            raise InvalidParam("source", message)

    def completion(self, seq: SequenceState) -> Completion:
        """Return the completion of a finished sequence."""
        assert seq.finish_reason is not None
        assert seq.stream is not None
        split = len(seq.request.prompt_token_ids)
        return Completion(
            prompt_token_ids=seq.request.prompt_token_ids,
            token_ids=tuple(seq.token_ids[split:]),
            text=seq.stream.finish(),
            finish_reason=FinishReason(seq.finish_reason),
            seed=seq.request.seed,
            from_draft=tuple(seq.from_draft),
            logprobs=tuple(seq.logprobs[: seq.num_output_tokens]),
            stats=self._stats_of(seq),
            error=seq.error,
            source_token_ids=seq.request.source_token_ids,
            weight_versions=tuple(seq.weight_versions),
        )

    def _stats_of(self, seq: SequenceState) -> Stats:
        total = self.stats
        return Stats.of_passes(
            seq.rounds,
            drafted=seq.num_draft_tokens,
            prompt=len(seq.request.prompt_token_ids),
            exact=total.exact,
            bound=total.bound,
        )


def _first_given(**arguments: str | None) -> str | None:
    """Return the name of the first argument that is not None."""
    return next((name for name, value in arguments.items() if value is not None), None)


def _whole_ids(what: str, tokens: Iterable[Any]) -> tuple[int, ...]:
    ids = []
    for token in tokens:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise OutriderError(f"{what} holds {token!r} among its token ids; give whole numbers")
        ids.append(int(token))
    return tuple(ids)


def _outside(ids: Iterable[int], vocab: int) -> str | None:
    """Return an error message if an id is not in the vocabulary."""
    first = next((token for token in ids if not 0 <= token < vocab), None)
    if first is None:
        return None
    hint = "use smaller ids" if first > 0 else "ids begin at 0"
    return f"token id {first} is not in the vocabulary of {vocab}; {hint}"


def _choice(what: str, name: str | None, known: Sequence[str]) -> int | None:
    """Return the index of a name that a request has chosen, or None if it leaves the choice to the engine."""
    if name is not None and name not in known:
        raise InvalidParam(what, f"{what} {name!r} is not available; use {' or '.join(known)}, or leave {what} out")
    return None if name is None else known.index(name)


def _checked(params: SamplingParams | None) -> SamplingParams:
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
