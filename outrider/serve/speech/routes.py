"""The routes of OpenAI's API that turn speech into text."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from outrider.errors import OutriderError
from outrider.serve.openai.errors import RESPONSES, UnknownName
from outrider.serve.openai.responses import usage
from outrider.serve.speech.formats import to_document, to_srt, to_verbose_document, to_vtt
from outrider.serve.speech.schema import (
    FORM_LIMITS,
    AudioFields,
    TranscriptionFields,
    TranslationFields,
    parse_form,
)
from outrider.serve.speech.transcriber import Transcriber
from outrider.serve.speech.transcript import Transcript

TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
_FILE = {"type": "string", "format": "binary", "description": "A WAV file of PCM samples."}
_TEXT_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The transcript.", "content": {"application/json": {}, "text/plain": {}, "text/vtt": {}}},
    **RESPONSES,
}


def add_audio_routes(app: FastAPI, transcriber: Transcriber, check_model: Callable[[str | None], None]) -> None:
    """Add the routes. `check_model` raises UnknownModel for a model that is not served.

    Raises:
        OutriderError: the package that reads forms is not installed.
    """
    if find_spec("python_multipart") is None:
        raise OutriderError('a server of a speech model needs python-multipart; run pip install "outrider[serve]"')

    async def answer(request: Request, model: type[AudioFields]) -> Response:
        async with request.form(**FORM_LIMITS) as form:
            asked = await parse_form(form, model)
        fields = asked.fields
        check_model(fields.model)
        session = await transcriber.session(asked)
        return await transcriber.transcribe(session, request, lambda transcript: _response(fields, transcript))

    @app.post(
        TRANSCRIPTIONS, responses=_TEXT_RESPONSES, response_class=Response, openapi_extra=_body(TranscriptionFields)
    )
    async def transcribe(request: Request) -> Response:
        """Transcribe a WAV file."""
        return await answer(request, TranscriptionFields)

    @app.post(TRANSLATIONS, responses=_TEXT_RESPONSES, response_class=Response, openapi_extra=_body(TranslationFields))
    async def translate(request: Request) -> Response:
        """Translate the speech of a WAV file to English."""
        return await answer(request, TranslationFields)


def add_missing_audio_routes(app: FastAPI) -> None:
    """Add routes that say that the server transcribes nothing."""

    async def refuse() -> NoReturn:
        raise UnknownName("model", "this server transcribes no audio; start it with a speech model as --target")

    for path in (TRANSCRIPTIONS, TRANSLATIONS):
        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False, response_model=None)


def _body(fields: type[AudioFields]) -> dict[str, Any]:
    """Return the description of a form."""
    schema = fields.model_json_schema()
    form = {**schema, "properties": {"file": _FILE, **schema["properties"]}, "required": ["file"]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}


def _response(fields: AudioFields, transcript: Transcript) -> Response:
    if fields.response_format == "text":
        return PlainTextResponse(transcript.text.strip() + "\n")
    if fields.response_format == "srt":
        return PlainTextResponse(to_srt(transcript))
    if fields.response_format == "vtt":
        return PlainTextResponse(to_vtt(transcript), media_type="text/vtt")
    if fields.response_format == "verbose_json":
        document = to_verbose_document(transcript)
    else:
        document = to_document(transcript)
    return JSONResponse({**document, "usage": _usage(transcript)})


def _usage(transcript: Transcript) -> dict[str, Any]:
    """Return the tokens of all windows."""
    used = usage(transcript.completions, len(transcript.completions))
    return {
        "type": "tokens",
        "input_tokens": used["prompt_tokens"],
        "output_tokens": used["completion_tokens"],
        "total_tokens": used["total_tokens"],
        "speculation": used["speculation"],
    }
