"""The Python API: `LLM`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.core.config import EngineConfig
from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammar
from outrider.core.params import SamplingParams
from outrider.core.planner import Planner
from outrider.core.stats import Stats
from outrider.core.text import TextStream
from outrider.core.types import Completion, Request, SequenceState
from outrider.drafting.plan.store import PlanFile, check_plan, restored
from outrider.engine.build import EngineParts, build
from outrider.engine.codec import EncodedSource, Prompt, Source, TextCodec
from outrider.engine.drive import finish
from outrider.engine.engine import Engine
from outrider.engine.output import Chunk, chunks_of, completion_of
from outrider.engine.requests import RequestMaker, checked_params
from outrider.engine.weights import EngineWeights, NewWeights
from outrider.errors import OutriderError
from outrider.runtime.machine import use_threads

_log = logging.getLogger("outrider")


class LLM:
    """Generates text with a target and a proposer.

    Threads may share an LLM. Their requests run in the same rounds, as one batch, and each text is the same as
    alone. A stream that is not read does not delay other threads. A process that is forked after an LLM was loaded
    cannot use one; start it with `multiprocessing.get_context("spawn")`.
    """

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
            target: a decoder-only or encoder-decoder model: its folder, a GGUF file, or a name on
                the Hugging Face Hub, "org/name". None: the embedded model.
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
        self._codec = TextCodec(
            parts.tokenizer, vocab=parts.vocab, end_ids=parts.end_ids, source_rules=parts.source_rules
        )
        self._request_maker = RequestMaker(parts, self._codec)
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
    def codec(self) -> TextCodec:
        """Encodes prompts and sources, and decodes tokens."""
        return self._codec

    @property
    def request_maker(self) -> RequestMaker:
        """Makes the requests of prompts, for `add` and `chunks`."""
        return self._request_maker

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
        """Return the tokens of a prompt. See `TextCodec.encode`."""
        return self._codec.encode(prompt, language=language, task=task)

    def encode_source(self, source: Source) -> EncodedSource:
        """Return what the encoder of an encoder-decoder target reads. See `TextCodec.encode_source`."""
        return self._codec.encode_source(source)

    def start_tokens(self, language: str | None = None, task: str | None = None) -> tuple[int, ...]:
        """Return the default prompt of an encoder-decoder target. See `TextCodec.start_tokens`."""
        return self._codec.start_tokens(language, task)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> tuple[int, ...]:
        """Apply the chat template to a conversation and return the tokens. See `TextCodec.encode_chat`."""
        return self._codec.encode_chat(
            messages, tools, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens. Raises OutriderError for ids outside the vocabulary."""
        return self._codec.decode(tokens)

    def prepare(self, constraint: Constraint) -> Grammar:
        """Compile a constraint and cache it. Large ones take seconds. Raises OutriderError if it is invalid."""
        return self._codec.prepare(constraint)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sources: Source | Sequence[Source] | None = None,
    ) -> list[Completion]:
        """Complete prompts together.

        Args:
            prompts: one or several, each a string or a list of token ids. None: the start tokens of
                the model, for each source.
            params: one for all prompts, or one per prompt; None: greedy.
            sources: what the encoder of an encoder-decoder target reads: one per prompt, each a string or a list of
                token ids. For a speech model: the path of a WAV file, or an array of samples; see `encode_source`.

        Returns:
            `n` completions per prompt, in the order of the prompts.

        Raises:
            OutriderError: a prompt, a source or a parameter does not fit the model.
        """
        seqs = list(map(self.add, self._request_maker.of_prompts(prompts, params, sources)))
        finish(self.engine, seqs)
        self.try_save_plan()
        return list(map(self.completion, seqs))

    def stream(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, *, source: Source | None = None
    ) -> Iterator[Chunk]:
        """Complete one prompt and yield a chunk per round. Leaving the loop aborts the request.

        `source` and a missing prompt are for encoder-decoder targets, as in `generate`.
        """
        params = checked_params(params)
        if params.n != 1:
            raise OutriderError(f"n is {params.n}; a stream carries one completion, so use 1, or generate for several")
        (request,) = self._request_maker.of_prompt(prompt, params, source)
        return self.chunks(request)

    def chunks(self, request: Request) -> Iterator[Chunk]:
        """Queue a request of `request_maker` and yield a chunk per round. Leaving the loop aborts the request."""
        return self._chunks(self.add(request))

    def _chunks(self, seq: SequenceState) -> Iterator[Chunk]:
        try:
            yield from chunks_of(self.engine, seq)
        finally:
            self.try_save_plan()

    def submit(
        self, prompt: Prompt | None = None, params: SamplingParams | None = None, *, source: Source | None = None
    ) -> list[int]:
        """Queue a prompt and return the ids of its `n` requests. The caller calls `engine.step`."""
        requests = self._request_maker.of_prompt(prompt, params, source)
        for request in requests:
            self.add(request)
        return [request.id for request in requests]

    def add(self, request: Request) -> SequenceState:
        """Queue a request of `request_maker` and return its state."""
        stream = TextStream(self._codec.text, request.params.stop, prompt=request.prompt_token_ids)
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
            with self.engine.turns:
                self._plan.save(self._parts.planner)

    def try_save_plan(self) -> None:
        """Write the plan file, and log a warning if that fails."""
        try:
            self.save_plan()
        except OutriderError as error:
            _log.warning("the planner's state was not saved: %s", error)

    def completion(self, seq: SequenceState) -> Completion:
        """Return the completion of a finished sequence."""
        return completion_of(seq, self.stats)
