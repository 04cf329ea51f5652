"""The route of OpenAI's API that turns speech into text."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from outrider.core.types import Completion
from outrider.errors import OutriderError
from outrider.serve.audio.schema import FORM_LIMITS, TranscriptionFields, TranscriptionRequest, parse_form
from outrider.serve.handler import RequestHandler
from outrider.serve.openai.errors import RESPONSES, UnknownName, attribute_errors
from outrider.serve.openai.responses import usage
from outrider.serve.prompt_encoder import EncodedInput

PATH = "/v1/audio/transcriptions"
_SCHEMA = TranscriptionFields.model_json_schema()
_FILE = {"type": "string", "format": "binary", "description": "A WAV file of PCM samples."}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {**_SCHEMA, "properties": {"file": _FILE, **_SCHEMA["properties"]}, "required": ["file"]}
            }
        },
    }
}
_TEXT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The transcript.", "content": {"application/json": {}, "text/plain": {}}},
    **RESPONSES,
}


def add_audio_routes(app: FastAPI, handler: RequestHandler) -> None:
    """Add the route.

    Raises:
        OutriderError: the package that reads forms is not installed.
    """
    if find_spec("python_multipart") is None:
        raise OutriderError('a server of a speech model needs python-multipart; run pip install "outrider[serve]"')

    @app.post(PATH, responses=_TEXT_RESPONSES, response_class=Response, openapi_extra=_BODY)
    async def transcribe(request: Request) -> Response:
        """Transcribe a WAV file."""
        async with request.form(**FORM_LIMITS) as form:
            asked = await parse_form(form)
        handler.check_model(asked.fields.model)
        encoded = await _encode(handler, asked)

        def respond(completions: list[Completion]) -> Response:
            return _response(asked.fields, completions[0])

        return await handler.complete(encoded, asked.fields.params(), request, respond)


def add_missing_audio_route(app: FastAPI) -> None:
    """Add a route that says that the server transcribes nothing."""

    async def refuse() -> NoReturn:
        raise UnknownName("model", "this server transcribes no audio; start it with a speech model as --target")

    app.add_api_route(PATH, refuse, methods=["POST"], include_in_schema=False, response_model=None)


async def _encode(handler: RequestHandler, asked: TranscriptionRequest) -> EncodedInput:
    fields = asked.fields
    with attribute_errors("language" if fields.task is None else "task"):
        prompt = handler.frontend.start_tokens(fields.language, fields.task)
    with attribute_errors("file"):
        source = await handler.prompt_encoder.encode_recording(asked.audio, asked.name)
    return EncodedInput(prompt=prompt, source=source)


def _response(fields: TranscriptionFields, completion: Completion) -> Response:
    text = completion.text.strip()
    if fields.response_format == "text":
        return PlainTextResponse(text + "\n")
    used = usage([completion], 1)
    counts = {
        "type": "tokens",
        "input_tokens": used["prompt_tokens"],
        "output_tokens": used["completion_tokens"],
        "total_tokens": used["total_tokens"],
        "speculation": used["speculation"],
    }
    return JSONResponse({"text": text, "usage": counts})
