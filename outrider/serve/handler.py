"""Handles completion requests: full responses, streams, timeouts and disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from outrider.core.constraint import Constraint
from outrider.core.conversation import InvalidMessage
from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.types import Completion, SpeechOutput, TokenLogprobs
from outrider.engine.codec import EncodedPrompt
from outrider.engine.prompt_scores import score_prompt
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.torch.speech.audio import Audio
from outrider.serve.anthropic.errors import in_api_of
from outrider.serve.errors import QueueFull
from outrider.serve.monitoring.request_log import Entry, entry_of
from outrider.serve.openai.base import unused_fields
from outrider.serve.openai.blocks import EventWriter
from outrider.serve.openai.call_formats import HERMES, format_of
from outrider.serve.openai.conversation import Conversation, adaptations, conversation, invalid_message
from outrider.serve.openai.errors import UnknownModel, attribute_errors, rename_param
from outrider.serve.openai.fill_in import fill_in_tokens
from outrider.serve.openai.logprobs import Echo, LogprobsBuilder
from outrider.serve.openai.output import OutputForm
from outrider.serve.openai.reasoning import reasoning_of
from outrider.serve.openai.responses import ChunkBuilder, ResponseBuilder, error_response
from outrider.serve.openai.schema import ChatRequest, CompletionRequest, SamplingFields, StreamOptions
from outrider.serve.openai.template_options import template_options
from outrider.serve.openai.tools import Tools
from outrider.serve.openai.translated import TranslatedBody
from outrider.serve.prompt_encoder import PromptEncoder
from outrider.serve.settings import Settings
from outrider.serve.speech.options import TranscriptionOptions
from outrider.serve.speech.session import Session
from outrider.serve.speech.transcript import Transcript
from outrider.serve.stream.request_stream import RequestStream, StreamChunk, StreamContent
from outrider.serve.stream.smoothing import smooth_chunks

if TYPE_CHECKING:
    from outrider.serve.async_llm import AsyncLLM

Respond = Callable[[list[Completion]], Response]
_QUEUE_CHECK_INTERVAL = 0.05  # seconds
_PROMPT_END = 16  # tokens at the end of a prompt in which reasoning may begin or end
_CLIENT_CLOSED_REQUEST = 499  # the status that nginx logs for a closed connection; the client does not receive it


class _ChatPrompt(NamedTuple):
    """The tokens of a conversation, and what its answer may have."""

    tokens: tuple[int, ...]
    tools: Tools | None
    form: OutputForm


class RequestHandler:
    """Submits requests to the engine thread and builds the responses."""

    def __init__(self, async_llm: AsyncLLM, settings: Settings, *, name: str) -> None:
        self._async_llm = async_llm
        self._settings = settings
        self._name = name  # of the model
        self._grammar_lock = asyncio.Lock()

    def session(self, audio: Audio, options: TranscriptionOptions, params: SamplingParams) -> Session:
        """Return the session of a recording. Raises as `Session` does."""
        return Session(self._async_llm.codec, audio, options, params, context=self._async_llm.parts.context)

    @property
    def prompt_encoder(self) -> PromptEncoder:
        """Encodes prompts and sources, for the event loop."""
        return self._async_llm.prompt_encoder

    def check_model(self, model: str | None) -> None:
        """Raise UnknownModel if the request names another model."""
        if model not in (None, self._name):
            raise UnknownModel("model", f"model {model!r} is not served here; use {self._name!r}")

    async def handle(self, body: CompletionRequest | ChatRequest | TranslatedBody, request: Request) -> Response:
        """Return the response to a request.

        Raises:
            UnknownModel: the request names another model.
            InvalidParam: a field of the request is invalid.
            QueueFull: the server cannot accept the request now.
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
                encoded.append(await self.prompt_encoder.encode_with_source(prompt, source))
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
        """Check what does not depend on the tokens of the prompts, and compile the grammar."""
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
        streams = self._submit(inputs, params, content)
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
            decode=self._async_llm.codec.decode,
            tokens=tokens,
            logprobs=None if body.num_logprobs() is None else logprobs,
            include_speculation=content >= StreamContent.ROUNDS,
            continuous_usage=options.include_usage and options.continuous_usage_stats,
            form=form if form and (form.calls or form.reasoning) else None,
            token_ids=body.return_token_ids,
            echoes=echoes,
            n=body.n,
            is_empty=isinstance(body, CompletionRequest) and body.max_tokens == 0,
        )
        disconnected = asyncio.create_task(self._cancel_on_disconnect(request, streams))
        writer = writer or EventWriter()
        if body.stream:
            events = self._stream_events(
                builder,
                streams,
                len(inputs),
                writer=writer,
                include_usage=options.include_usage or writer.needs_usage,
                request=request,
                disconnected=disconnected,
            )
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

        def respond(completions: list[Completion]) -> Response:
            return JSONResponse(writer.response(builder.response(completions, len(inputs))))

        finished = asyncio.create_task(_last_chunks(streams, entry_of(request.scope)))
        return await self._full_response(streams, finished, respond, request=request, disconnected=disconnected)

    async def transcribe(
        self, session: Session, request: Request, respond: Callable[[Transcript], Response]
    ) -> Response:
        """Submit the requests of a session one after the other, and return the response to its transcript."""
        streams = self._submit_step(session)
        disconnected = asyncio.create_task(self._cancel_on_disconnect(request, streams))
        finished = asyncio.create_task(self._run_session(session, streams, entry_of(request.scope)))
        return await self._full_response(
            streams,
            finished,
            lambda _: respond(session.transcript()),
            request=request,
            disconnected=disconnected,
        )

    def _submit_step(self, session: Session) -> list[RequestStream]:
        """Submit the next request of a session, if there is one."""
        step = session.step()
        if step is None:
            return []
        return self._submit([step.encoded], step.params, StreamContent.END, step.output)

    async def _run_session(self, session: Session, streams: list[RequestStream], log_entry: Entry) -> list[StreamChunk]:
        """Complete a session whose first request is submitted. Add its later streams to `streams`.

        Return the last chunk of each request, up to the first error.
        """
        chunks = []
        while True:
            chunk = await _last_chunk(streams[-1], log_entry)
            chunks.append(chunk)
            if chunk.completion is None:
                return chunks
            session.add(chunk.completion)
            if not (following := await self._submit_when_free(session)):
                return chunks
            streams += following

    async def _submit_when_free(self, session: Session) -> list[RequestStream]:
        """Submit the next request of a session. If the queue is full, wait, so that what is done is not lost."""
        while True:
            try:
                return self._submit_step(session)
            except QueueFull:
                if self._async_llm.stopping:
                    raise
                await asyncio.sleep(_QUEUE_CHECK_INTERVAL)

    async def _cancel_on_disconnect(self, request: Request, streams: Sequence[RequestStream]) -> None:
        """Wait until the client disconnects, and cancel its requests."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self._async_llm.cancel(streams)

    def _submit(
        self,
        inputs: Sequence[EncodedPrompt],
        params: SamplingParams,
        content: StreamContent,
        speech_output: SpeechOutput = SpeechOutput.TEXT,
    ) -> list[RequestStream]:
        """Submit all prompts, or none of them."""
        streams: list[RequestStream] = []
        try:
            for encoded in inputs:
                streams += self._async_llm.submit(encoded, params, content, speech_output)
        except OutriderError:
            self._async_llm.cancel(streams)
            raise
        return streams

    async def _full_response(
        self,
        streams: Sequence[RequestStream],
        finished: asyncio.Task[list[StreamChunk]],
        respond: Respond,
        *,
        request: Request,
        disconnected: asyncio.Task[None],
    ) -> Response:
        """Wait for the last chunks of all completions and return them in one response."""
        log_entry = entry_of(request.scope)
        tasks: list[asyncio.Task[Any]] = [finished, disconnected]
        log_entry.finish_reason = "canceled"  # replaced below, unless the client disconnects
        try:
            async with asyncio.timeout(self._settings.request_timeout or None):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                return Response(status_code=_CLIENT_CLOSED_REQUEST)
            last_chunks = finished.result()
        except TimeoutError:
            log_entry.finish_reason = "timeout"
            document = error_response(self._timeout_message(), kind="timeout_error")
            return in_api_of(request.url.path, JSONResponse(document, 504))
        finally:
            log_entry.output_tokens = sum(stream.num_tokens for stream in streams)
            disconnected.cancel()
            finished.cancel()
            self._async_llm.cancel(streams)
        errors = [chunk.error for chunk in last_chunks if chunk.error]
        if errors:
            log_entry.finish_reason = "error"
            document = error_response(errors[0], kind="server_error")
            return in_api_of(request.url.path, JSONResponse(document, 500))
        completions = [chunk.completion for chunk in last_chunks if chunk.completion]
        log_entry.finish(completions)
        return respond(completions)

    async def _stream_events(
        self,
        builder: ResponseBuilder,
        streams: Sequence[RequestStream],
        num_prompts: int,
        *,
        writer: EventWriter,
        include_usage: bool,
        request: Request,
        disconnected: asyncio.Task[None],
    ) -> AsyncIterator[str]:
        """Yield the server-sent events of all completions."""
        log_entry = entry_of(request.scope)
        log_entry.finish_reason = "canceled"  # replaced below, unless the client disconnects
        completions: dict[int, Completion] = {}  # by index of the stream
        chunk_builders = [builder.chunks(index, stream.request) for index, stream in enumerate(streams)]
        try:
            async with asyncio.timeout(self._settings.request_timeout or None):
                async for index, chunks in _merge_streams(streams):
                    events = _chunk_events(chunk_builders[index], chunks, writer, log_entry)
                    last_chunk = chunks[-1]
                    if last_chunk.error:
                        log_entry.finish_reason = "canceled" if disconnected.done() else "error"
                        yield events
                        return
                    if last_chunk.completion:
                        completions[index] = last_chunk.completion
                    if len(completions) == len(streams):
                        log_entry.finish([completions[i] for i in sorted(completions)])
                        if include_usage:
                            events += writer.chunk(builder.usage_chunk(log_entry.completions, num_prompts))
                        events += writer.end()
                    yield events  # all events of a round together, so that they take one system call
        except TimeoutError:
            log_entry.finish_reason = "timeout"
            yield writer.error(error_response(self._timeout_message(), kind="timeout_error"))
        finally:
            disconnected.cancel()
            self._async_llm.cancel(streams)

    def _timeout_message(self) -> str:
        return f"the request took longer than {self._settings.request_timeout:g} seconds; ask for fewer tokens"


def _score(tokens: Sequence[int], top: int, llm: LLM) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of the tokens of a prompt, in the engine thread."""
    return score_prompt(llm.engine, llm.parts.target, tokens, top)


async def _last_chunks(streams: Sequence[RequestStream], log_entry: Entry) -> list[StreamChunk]:
    return await asyncio.gather(*(_last_chunk(stream, log_entry) for stream in streams))


async def _last_chunk(stream: RequestStream, log_entry: Entry) -> StreamChunk:
    async for chunks in stream.chunks():
        for chunk in chunks:
            log_entry.add_tokens(len(chunk.tokens))
    return chunk


def _chunks_of(stream: RequestStream) -> AsyncIterator[list[StreamChunk]]:
    """Return the chunks of a stream, smoothed with `--smooth`."""
    if stream.content is StreamContent.TOKENS:
        return smooth_chunks(stream.chunks(), asyncio.get_running_loop())
    return stream.chunks()


async def _merge_streams(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, list[StreamChunk]]]:
    """Yield the index of a stream and its new chunks as they arrive."""
    if len(streams) == 1:
        async for chunks in _chunks_of(streams[0]):
            yield 0, chunks
        return
    arrived: asyncio.Queue[tuple[int, list[StreamChunk]]] = asyncio.Queue(maxsize=len(streams))

    async def read(index: int, stream: RequestStream) -> None:
        async for chunks in _chunks_of(stream):
            await arrived.put((index, chunks))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, chunks = await arrived.get()
            yield index, chunks
            if chunks[-1].last:
                num_open -= 1
    finally:
        for reader in readers:
            reader.cancel()


def _chunk_events(builder: ChunkBuilder, chunks: Sequence[StreamChunk], writer: EventWriter, log_entry: Entry) -> str:
    """Return the events of some chunks of a completion. The last one may be an error."""
    events: list[str] = []
    for chunk in chunks:
        log_entry.add_tokens(len(chunk.tokens))
        if chunk.text or not chunk.error:
            events += map(writer.chunk, builder.build(chunk))
        if chunk.error:
            events.append(writer.error(error_response(chunk.error, kind="server_error")))
    return "".join(events)
