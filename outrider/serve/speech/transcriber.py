"""Transcribes the recordings of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.completer import Completer, last_chunk
from outrider.serve.errors import QueueFull
from outrider.serve.monitoring.request_log import Entry, entry_of
from outrider.serve.openai.errors import attribute_errors
from outrider.serve.speech.schema import AudioRequest
from outrider.serve.speech.session import Session
from outrider.serve.speech.transcript import Transcript
from outrider.serve.stream.request_stream import RequestStream, StreamChunk, StreamContent

if TYPE_CHECKING:
    from outrider.serve.async_llm import AsyncLLM

_QUEUE_CHECK_INTERVAL = 0.05  # seconds


class Transcriber:
    """Runs the windows of a recording one after the other."""

    def __init__(self, async_llm: AsyncLLM, completer: Completer) -> None:
        self._async_llm = async_llm
        self._completer = completer

    async def session(self, asked: AudioRequest[Any]) -> Session:
        """Return the session of a recording. Raises InvalidParam if it cannot be read, and as `Session` does."""
        options = asked.fields.options()
        params = asked.fields.params()
        with attribute_errors("file"):
            audio = await self._async_llm.prompt_encoder.hear(asked.audio, asked.name, timestamps=options.timestamps)
        return Session(self._async_llm.codec, audio, options, params, context=self._async_llm.parts.context)

    async def transcribe(
        self, session: Session, request: Request, respond: Callable[[Transcript], Response]
    ) -> Response:
        """Submit the requests of a session one after the other, and return the response to its transcript."""
        streams = self._submit_step(session)
        last_chunks = self._run(session, streams, entry_of(request.scope))
        return await self._completer.full_response(
            streams, last_chunks, lambda _: respond(session.transcript()), request
        )

    def _submit_step(self, session: Session) -> list[RequestStream]:
        """Submit the next request of a session and return its stream, in a list; []: the session has ended."""
        step = session.step()
        if step is None:
            return []
        return self._completer.submit([step.encoded], step.params, StreamContent.END, step.output)

    async def _run(self, session: Session, streams: list[RequestStream], log_entry: Entry) -> list[StreamChunk]:
        """Complete a session whose first request is submitted. Add its later streams to `streams`.

        Return the last chunk of each request, up to the first error.
        """
        chunks = []
        while True:
            chunk = await last_chunk(streams[-1], log_entry)
            chunks.append(chunk)
            if chunk.completion is None:
                return chunks
            session.add(chunk.completion)
            if not (following := await self._submit_when_free(session)):
                return chunks
            streams += following

    async def _submit_when_free(self, session: Session) -> list[RequestStream]:
        """Do what `_submit_step` does. While the queue is full, wait, so that the finished windows are not lost."""
        while True:
            try:
                return self._submit_step(session)
            except QueueFull:
                if self._async_llm.stopping:
                    raise
                await asyncio.sleep(_QUEUE_CHECK_INTERVAL)
