"""The source of an encoder-decoder target: the options of `outrider run`, and how they are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from outrider.core.option import Option
from outrider.core.text import is_utf8
from outrider.errors import OutriderError

_PANEL = "Source"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The input of an encoder-decoder target's encoder."""

    source: Annotated[str | None, Option("TEXT", _PANEL)] = None
    """The input of an encoder-decoder target's encoder: a text, or for a speech target the path of a WAV file. PROMPT
    begins the output."""
    source_file: Annotated[str | None, Option("FILE", _PANEL)] = None
    """A file with the source: UTF-8 text, or for a speech target WAV audio."""
    language: Annotated[str | None, Option("CODE", _PANEL)] = None
    """For a speech target that knows several languages: that of the audio, such as en. Default: as the checkpoint says,
    or the model detects it."""
    task: Annotated[str | None, Option("NAME", _PANEL)] = None
    """For a speech target that knows several languages: transcribe, or translate to English. Default: as the checkpoint
    says, or transcribe."""
    response_format: Annotated[str | None, Option("NAME", _PANEL)] = None
    """For a speech target: print the transcript as text, srt, vtt, json or verbose_json, with the names of OpenAI's
    API. Default: text."""
    previous_text: Annotated[str | None, Option("TEXT", _PANEL)] = None
    """For a speech target: text before the audio, such as names and their spelling."""
    condition_on_previous_text: Annotated[bool, Option(panel=_PANEL)] = False
    """For a speech target and long audio: put the text so far before each window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSource:
    """The source that a user gives, before the target is known."""

    text: str = ""  # for a speech target the path of a WAV file, if it was not read from `file`
    audio: bytes | None = None  # the content of `file`, if that is a WAV file
    file: str | None = None  # None: --source


def read_source(options: SourceOptions) -> GivenSource | None:
    """Return the source, or None if no option is set. A line break at the end of a text file is left out.

    Raises:
        OutriderError: both options are set, or the source cannot be read.
    """
    text, file = options.source, options.source_file
    if text is not None and file is not None:
        raise OutriderError("--source and --source-file were both given; use one of them")
    if text is not None:
        if not is_utf8(text):
            raise OutriderError("the source is not UTF-8 text; give UTF-8 text")
        return GivenSource(text=text)
    if file is None:
        return None
    path = Path(file).expanduser()
    try:
        data = path.read_bytes()
        if data.startswith(b"RIFF"):
            return GivenSource(audio=data, file=file)
        return GivenSource(text=data.decode().removesuffix("\n"), file=file)
    except OSError as error:
        raise OutriderError(f"{path} cannot be read ({error.strerror}); give a text file or a WAV file") from error
    except UnicodeDecodeError as error:
        raise OutriderError(
            f"{path} is not UTF-8 text; give a text file in UTF-8, or a WAV file for a speech target"
        ) from error
