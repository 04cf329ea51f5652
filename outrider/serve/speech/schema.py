"""The forms of `POST /v1/audio/transcriptions` and `/v1/audio/translations`: OpenAI's fields and some extensions.

Unknown fields are errors.
"""

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from outrider.core.params import InvalidParam, SamplingParams
from outrider.serve.speech.formats import WITH_SEGMENTS
from outrider.serve.speech.options import TranscriptionOptions

_FORM_FIELDS = 32  # most fields of a form

GRANULARITIES = "timestamp_granularities[]"
FORM_LIMITS = {"max_files": 1, "max_fields": _FORM_FIELDS}


class AudioFields(BaseModel):
    """The fields of both forms beside the file. All values of a form are texts."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="Name of the model, as in /v1/models. Optional.")
    prompt: str | None = Field(None, description="Text before the audio, such as names and their spelling.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, description="0 is greedy.")
    language: str | None = Field(
        None, description="The language of the audio, such as en. Default: the model detects it."
    )
    seed: int | None = Field(None, ge=0, lt=2**63, description="Extension. Seed of sampling. Default: random.")
    max_tokens: int | None = Field(
        None, ge=1, description="Extension. Most output tokens of a window of 30 seconds. Default: the context."
    )
    condition_on_previous_text: bool = Field(
        False, description="Extension. Whether the text of earlier windows goes before the next one."
    )

    def params(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidParam: a value is out of range.
        """
        return SamplingParams(temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens)

    def options(self) -> TranscriptionOptions:
        """Return what the transcript should be.

        Raises:
            InvalidParam: fields contradict each other, or ask for what is not supported.
        """
        return TranscriptionOptions(
            language=self.language or None,
            task=self.audio_task(),
            prompt=self.prompt,
            timestamps=self.response_format in WITH_SEGMENTS,
            condition_on_previous_text=self.condition_on_previous_text,
        )

    def audio_task(self) -> str | None:
        """Return what the model does; None: its default."""
        return "translate"


class TranslationFields(AudioFields):
    """The form of `POST /v1/audio/translations`."""


class TranscriptionFields(AudioFields):
    """The form of `POST /v1/audio/transcriptions`."""

    timestamp_granularities: list[str] = Field(
        default_factory=list,
        alias="timestamp_granularities[]",  # GRANULARITIES
        description="segment, with response_format verbose_json, which has segments in any case.",
    )
    stream: Literal["false", "False", ""] | None = Field(None, description="Only false is accepted.")
    task: str | None = Field(None, description="Extension. transcribe (default), or translate to English.")

    def audio_task(self) -> str | None:
        """Return what the model does; None: its default."""
        return self.task

    def options(self) -> TranscriptionOptions:
        """Return what the transcript should be. Raises as `AudioFields.options` does."""
        if "word" in self.timestamp_granularities:
            raise InvalidParam(GRANULARITIES, "timestamps of words are not supported; use segment")
        if unknown := set(self.timestamp_granularities) - {"segment"}:
            raise InvalidParam(GRANULARITIES, f"{GRANULARITIES} is {min(unknown)!r}; use segment")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidParam(
                GRANULARITIES,
                f"{GRANULARITIES} needs response_format verbose_json, and it is"
                f" {self.response_format}; set it, or leave {GRANULARITIES} out",
            )
        return super().options()


Fields = TypeVar("Fields", bound=AudioFields)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioRequest(Generic[Fields]):
    """A request for a transcript."""

    fields: Fields
    audio: bytes  # of a WAV file
    name: str  # of the file, for messages


async def parse_form(form: FormData, model: type[Fields]) -> AudioRequest[Fields]:
    """Return the request in a form with the fields of `model`.

    Raises:
        RequestValidationError: a field is invalid.
        InvalidParam: a field is unknown, or the file is missing.
    """
    known = {field.alias or name for name, field in model.model_fields.items()}
    fields: dict[str, Any] = {}
    file: UploadFile | None = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name != "file":
                raise InvalidParam(name, f"{name} is a file; send the audio as file, and nothing else as a file")
            file = value
        elif name not in known:
            raise InvalidParam(name, f"{name} is no field of this route; leave it out")
        elif name == GRANULARITIES:
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    if file is None:
        raise InvalidParam(
            "file", "file is missing; send a form (multipart/form-data) with a WAV file in the field file"
        )
    try:
        checked = model.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None
    return AudioRequest(fields=checked, audio=await file.read(), name=(file.filename or "file")[:200])
