"""The form of `POST /v1/audio/transcriptions`: OpenAI's fields and some extensions. Unknown fields are errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from outrider.core.params import InvalidParam, SamplingParams

_FORM_FIELDS = 32  # most fields of a form

FORM_LIMITS = {"max_files": 1, "max_fields": _FORM_FIELDS}


class TranscriptionFields(BaseModel):
    """The fields of a request beside its file. All values of a form are texts."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="Name of the model, as in /v1/models. Optional.")
    language: str | None = Field(
        None, description="The language of the audio, such as en. Required if the model knows several."
    )
    response_format: Literal["json", "text"] = "json"
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    stream: Literal["false", "False", ""] | None = Field(None, description="Only false is accepted.")
    task: str | None = Field(None, description="Extension. transcribe (default), or translate to English.")
    seed: int | None = Field(None, ge=0, lt=2**63, description="Extension. Seed of sampling. Default: random.")
    max_tokens: int | None = Field(None, ge=1, description="Extension. Most output tokens. Default: the context.")

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidParam: a value is out of range.
        """
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """A request for a transcript."""

    fields: TranscriptionFields
    audio: bytes  # of a WAV file
    name: str  # of the file, for messages


async def parse_form(form: FormData) -> TranscriptionRequest:
    """Return the request in a form.

    Raises:
        RequestValidationError: a field is unknown or invalid.
        InvalidParam: the file is missing.
    """
    fields: dict[str, Any] = {}
    file: UploadFile | None = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise InvalidParam(name, f"{name} is a file; send the audio as file, and nothing else as a file")
            file = value
        else:
            fields[name] = value
    if file is None:
        raise InvalidParam(
            "file", "file is missing; send a form (multipart/form-data) with a WAV file in the field file"
        )
    try:
        checked = TranscriptionFields.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return TranscriptionRequest(fields=checked, audio=await file.read(), name=(file.filename or "file")[:200])
