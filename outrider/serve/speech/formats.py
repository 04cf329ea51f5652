"""Formats of transcripts: text, JSON documents, and subtitles (SubRip and WebVTT)."""

from typing import Any

from outrider.models.torch.speech.rules import ENGLISH, TRANSCRIBE, language_name
from outrider.serve.speech.transcript import Segment, Transcript

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")  # of OpenAI's API
WITH_SEGMENTS = frozenset({"srt", "verbose_json", "vtt"})
_FRAMES_PER_SECOND = 100  # of `seek` in OpenAI's API


def to_srt(transcript: Transcript) -> str:
    """Return the segments as SubRip subtitles. Segments without text are left out."""
    cues = [
        f"{number}\n{_time(segment.start, ',')} --> {_time(segment.end, ',')}\n{_line(segment)}\n"
        for number, segment in enumerate(_spoken(transcript), 1)
    ]
    return "\n".join(cues)


def to_vtt(transcript: Transcript) -> str:
    """Return the segments as WebVTT subtitles. Segments without text are left out."""
    cues = [
        f"{_time(segment.start, '.')} --> {_time(segment.end, '.')}\n{_line(segment)}\n"
        for segment in _spoken(transcript)
    ]
    return "\n".join(["WEBVTT\n", *cues])


def to_document(transcript: Transcript) -> dict[str, Any]:
    """Return the JSON document `json` of OpenAI's API, with the language as an extension."""
    return {"text": transcript.text.strip(), **_languages(transcript)}


def to_verbose_document(transcript: Transcript) -> dict[str, Any]:
    """Return the JSON document `verbose_json` of OpenAI's API."""
    return {
        "task": transcript.task,
        **_languages(transcript),
        "duration": transcript.seconds,
        "text": transcript.text.strip(),
        "segments": [
            {
                "id": number,
                "seek": round(segment.window_start * _FRAMES_PER_SECOND),
                "start": round(segment.start, 3),
                "end": round(segment.end, 3),
                "text": segment.text,
                "tokens": list(segment.token_ids),
                "temperature": transcript.temperature,
            }
            for number, segment in enumerate(transcript.segments)
        ],
    }


def _languages(transcript: Transcript) -> dict[str, str | None]:
    """Return the language of the text, and that of the audio if it is another one."""
    spoken = transcript.language and language_name(transcript.language)
    if transcript.task == TRANSCRIBE:
        return {"language": spoken}
    return {"language": language_name(ENGLISH), "source_language": spoken}


def _spoken(transcript: Transcript) -> list[Segment]:
    return list(filter(_line, transcript.segments))


def _line(segment: Segment) -> str:
    """Return the text of a segment as one line, without the arrow that separates times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    """Return a time as HH:MM:SS and milliseconds after `point`."""
    whole, milliseconds = divmod(round(1000 * seconds), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"
