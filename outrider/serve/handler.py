"""Turns the bodies of completion requests into prompts and parameters, and answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.core.constraint import Constraint
from outrider.core.conversation import InvalidMessage
from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.types import TokenLogprobs
from outrider.engine.codec import EncodedPrompt
from outrider.engine.prompt_scores import score_prompt
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.serve.completer import Completer, last_chunks
from outrider.serve.monitoring.request_log import entry_of
from outrider.serve.openai.base import unused_fields
from outrider.serve.openai.blocks import EventWriter
from outrider.serve.openai.call_formats import HERMES, format_of
from outrider.serve.openai.conversation import Conversation, adaptations, conversation, invalid_message
from outrider.serve.openai.errors import UnknownModel, attribute_errors, rename_param
from outrider.serve.openai.fill_in import fill_in_tokens
from outrider.serve.openai.logprobs import Echo, LogprobsBuilder
from outrider.serve.openai.output import OutputForm
from outrider.serve.openai.reasoning import reasoning_of
from outrider.serve.openai.responses import ResponseBuilder
from outrider.serve.openai.schema import ChatRequest, CompletionRequest, SamplingFields, StreamOptions
from outrider.serve.openai.template_options import template_options
from outrider.serve.openai.tools import Tools
from outrider.serve.openai.translated import TranslatedBody
from outrider.serve.settings import Settings
from outrider.serve.stream.request_stream import StreamContent

if TYPE_CHECKING:
    from outrider.serve.async_llm import AsyncLLM

_PROMPT_END = 16  # tokens at the end of a prompt in which reasoning may begin or end


class _ChatPrompt(NamedTuple):
    """The tokens of a conversation, and what its answer may have."""

    tokens: tuple[int, ...]
    tools: Tools | None
    form: OutputForm


class RequestHandler:
    """Answers requests for completions and chats."""

    def __init__(self, async_llm: AsyncLLM, completer: Completer, settings: Settings, *, name: str) -> None:
        self._async_llm = async_llm
        self._completer = completer
        self._settings = settings
        self._name = name  # of the model
        self._grammar_lock = asyncio.Lock()

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel if the request names another model."""
        if model not in (None, self._name):
            raise UnknownModel("model", f"model {model!r} is not served here; use {self._name!r}")

    async def handle(self, body: CompletionRequest | ChatRequest | TranslatedBody, request: Request) -> Response:
        """Return the response to a request.

        Raises:
            UnknownModel: the request names another model.
            InvalidParam: a field of the request is invalid.
            QueueFull: the server cannot accept the request now, or stops.
        """
        self.check_model(body.model)
        entry = entry_of(request.scope)
        entry.unused_fields = unused_fields(body)
        if self._settings.strict and entry.unused_fields:
            field = entry.unused_fields[0]
            raise InvalidParam(field, f"{field}: this field has no effect, and the server has --strict; remove it")
        with rename_param(body):
            if isinstance(body, CompletionRequest):
                return await self._handle_completion(body, request)
            if isinstance(body, ChatRequest):
                return await self._handle_chat(body, request)
            chat = body.chat()
            with rename_param(chat):
                return await self._handle_chat(chat, request, body.writer)

    async def count_tokens(self, body: TranslatedBody) -> int:
        """Return the number of tokens of the prompt of a request. Raises as `handle` does."""
        self.check_model(body.model)
        with rename_param(body):
            chat = body.chat()
            with rename_param(chat):
                return len((await self._chat_prompt(chat)).tokens)

    async def _handle_completion(self, body: CompletionRequest, request: Request) -> Response:
        inputs = body.inputs()
        body.check_echo()
        with attribute_errors("constraint"):
            constraint = body.constraint()
        params = body.params(
            max_tokens=body.max_tokens or 1, logprobs=body.logprobs, scope=body.user or "", constraint=constraint
        )
        if body.best_of is not None:
            logprobs = 0 if params.logprobs is None and body.best_of > body.n else params.logprobs
            params = replace(params, n=body.best_of, logprobs=logprobs)
        await self._prepare(body, len(inputs), params)
        encoded = []
        for prompt, source in inputs:
            if body.suffix is not None:
                tokenizer = self._async_llm.codec.tokenizer
                encoded.append(EncodedPrompt(fill_in_tokens(tokenizer, str(prompt), body.suffix)))
            else:
                encoded.append(await self._async_llm.prompt_encoder.encode_with_source(prompt, source))
        return await self._respond(body, encoded, params, request)

    async def _echoes(self, body: SamplingFields, inputs: Sequence[EncodedPrompt], top: int | None) -> list[Echo]:
        """Return the prompts that the completions begin with, and their log-probabilities."""
        if not isinstance(body, CompletionRequest) or not body.echo:
            return []
        echoes = []
        for (prompt, _), (tokens, _) in zip(body.inputs(), inputs, strict=True):
            entries: tuple[TokenLogprobs, ...] = ()
            if top is not None:
                score = partial(_score, tokens, top)
                entries = await self._async_llm.call(score)
            text = prompt if isinstance(prompt, str) else self._async_llm.codec.decode(tokens)
            echoes.append(Echo(text=text, tokens=tokens, entries=entries))
        return echoes

    async def _handle_chat(
        self, body: ChatRequest, request: Request, make_writer: Callable[[int], EventWriter] = lambda _: EventWriter()
    ) -> Response:
        with attribute_errors("constraint"):
            constraint = body.constraint()
        if constraint and body.tools and body.tool_choice != "none":
            field = "structured_outputs" if body.structured_outputs else "response_format"
            raise InvalidParam(field, f"{field} cannot be combined with tools; remove one of them")
        prompt = await self._chat_prompt(body)
        tools, reasoning = prompt.tools, prompt.form.reasoning
        if constraint and reasoning:
            constraint = replace(constraint, prefix=reasoning.grammar(header=True))
        if tools and prompt.form.calls:
            with attribute_errors("tools"):
                constraint = tools.constraint(prompt.form.calls, reasoning)
        params = body.params(
            max_tokens=body.max_output_tokens(),
            logprobs=body.num_logprobs(),
            scope=body.user or "",
            constraint=constraint,
        )
        await self._prepare(body, 1, params, tools)
        encoded = [EncodedPrompt(prompt.tokens)]
        writer = make_writer(len(prompt.tokens))
        return await self._respond(body, encoded, params, request, form=prompt.form, writer=writer)

    async def _chat_prompt(self, body: ChatRequest) -> _ChatPrompt:
        """Return the prompt of a chat, and what its answer may have."""
        tools = Tools.of(body)
        body.check_continuation()
        template = self._async_llm.codec.chat_template
        options = template_options(
            template, options=body.chat_template_kwargs, enable=body.enable_thinking, effort=body.reasoning_effort
        )
        trained = format_of(template)
        template_tools = tools.descriptions() if tools and trained else None
        with attribute_errors("messages"):
            turns = conversation(body.messages, tools, template=template)
            tokens = await self._encode_chat(body, turns, template_tools, options)
        continued = body.messages[-1].text() if body.continue_final_message else ""
        reasoning = reasoning_of(template, self._async_llm.codec.decode(tokens[-_PROMPT_END:]), continued)
        if tools is None:
            return _ChatPrompt(tokens, None, OutputForm(reasoning=reasoning))
        calls = trained or HERMES
        form = OutputForm(calls=calls, functions=tools.schemas, required=tools.required, reasoning=reasoning)
        return _ChatPrompt(tokens, tools, form)

    async def _encode_chat(
        self,
        body: ChatRequest,
        turns: Conversation,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation, adapted to the chat template where the template does not take it."""
        first_error: InvalidParam | None = None
        for adapted in adaptations(turns):
            try:
                return await self._async_llm.prompt_encoder.chat(
                    [turn.fields for turn in adapted],
                    tools,
                    add_generation_prompt=body.add_generation_prompt is not False,
                    continue_final_message=body.continue_final_message,
                    options=options,
                )
            except InvalidMessage as error:
                first_error = first_error or invalid_message(adapted, error)
        assert first_error is not None
        raise first_error

    async def _prepare(
        self, body: SamplingFields, num_prompts: int, params: SamplingParams, tools: Tools | None = None
    ) -> None:
        """Check what does not depend on the tokens of the prompts, and compile the grammar. Raises InvalidParam."""
        if body.stream_options and not body.stream:
            raise InvalidParam("stream_options", "stream_options needs stream true; set it, or remove stream_options")
        num_completions = num_prompts * params.n
        if num_completions > self._settings.max_n:
            raise InvalidParam(
                "n" if params.n > 1 else "prompt",
                f"prompts times n is {num_prompts} x {params.n} = {num_completions} completions;"
                f" ask for at most {self._settings.max_n} at once",
            )
        if params.constraint:
            # Compile the grammar in a thread, because it may take seconds. Compile one at a time.
            async with self._grammar_lock:
                with attribute_errors("constraint"):
                    await asyncio.to_thread(self._compile, params.constraint, tools)

    def _compile(self, constraint: Constraint, tools: Tools | None) -> None:
        """Compile a constraint, which is that of the tools if there are any."""
        compile = self._async_llm.codec.prepare
        try:
            compile(constraint)
        except OutriderError:
            if tools:
                tools.check_schemas(compile)
            raise

    async def _respond(
        self,
        body: SamplingFields,
        inputs: Sequence[EncodedPrompt],
        params: SamplingParams,
        request: Request,
        *,
        form: OutputForm | None = None,
        writer: EventWriter | None = None,
    ) -> Response:
        """Submit the prompts, as tokens, and return the response."""
        content = body.stream_content()
        if content is StreamContent.TEXT and self._settings.smooth:
            content = StreamContent.TOKENS
        streams = self._completer.submit(inputs, params, content)
        try:
            echoes = await self._echoes(body, inputs, params.logprobs)
        except OutriderError:
            self._async_llm.cancel(streams)
            raise
        # In OpenAI's API a token that ends the text has no entry. With token ids, there is one
        # entry for each id, and with echo, clients count the entries.
        omitted = frozenset() if body.return_token_ids or echoes else streams[0].request.end_ids
        is_chat = isinstance(body, ChatRequest)
        options = body.stream_options or StreamOptions()
        tokens = self._async_llm.single_tokens
        logprobs = LogprobsBuilder(tokens=tokens, chat=is_chat, omitted=omitted)
        builder = ResponseBuilder(
            chat=is_chat,
            model=self._name,
            num_prompts=len(inputs),
            writer=writer or EventWriter(),
            decode=self._async_llm.codec.decode,
            tokens=tokens,
            logprobs=None if body.num_logprobs() is None else logprobs,
            include_speculation=content >= StreamContent.ROUNDS,
            include_usage=options.include_usage,
            continuous_usage=options.include_usage and options.continuous_usage_stats,
            form=form if form and (form.calls or form.reasoning) else None,
            token_ids=body.return_token_ids,
            echoes=echoes,
            n=body.n,
            is_empty=isinstance(body, CompletionRequest) and body.max_tokens == 0,
        )
        if body.stream:
            return self._completer.stream_response(streams, builder, request)
        chunks = last_chunks(streams, entry_of(request.scope))
        return await self._completer.full_response(
            streams, chunks, lambda completions: JSONResponse(builder.response(completions)), request
        )


def _score(tokens: Sequence[int], top: int, llm: LLM) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the tokens of a prompt, in the engine thread."""
    return score_prompt(llm.engine, llm.parts.target, tokens, top)
