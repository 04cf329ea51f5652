"""Transcripts of `outrider run`: which requests are transcripts, and how they are printed."""

import json
from dataclasses import replace
from time import perf_counter

from outrider.cli.output import Outcome, Output
from outrider.cli.source import SourceOptions
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, either
from outrider.lab.common.clock import DecodeSpeed, with_times
from outrider.llm import LLM
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.source import too_long
from outrider.models.torch.speech.wav import Recording
from outrider.serve.speech.formats import FORMATS, WITH_SEGMENTS, to_document, to_srt, to_verbose_document, to_vtt
from outrider.serve.speech.options import TranscriptionOptions
from outrider.serve.speech.run import open_session, run_sessions
from outrider.serve.speech.transcript import Transcript


def with_default_length(llm: LLM, params: SamplingParams) -> SamplingParams:
    """Return parameters without a limit for a speech target, because a transcript is as long as the audio."""
    rules = llm.parts.source_rules
    return params if rules is None or rules.speech is None else replace(params, max_tokens=None)


def needs_transcript(rules: SpeechRules, recording: Recording, options: SourceOptions) -> str:
    """Return the first reason why a recording needs a transcript rather than one completion; "": there is none.

    A single completion is printed while it is generated, and a prompt may begin it.

    Raises:
        OutriderError: the format is unknown.
    """
    if options.response_format not in (None, *FORMATS):
        raise OutriderError(f"--response-format is {options.response_format!r}; use {either(FORMATS)}")
    reasons = {
        **_transcript_options(options),
        "detection of the language": rules.needs_detection(options.language, options.task),
        f"audio of more than {rules.seconds} s": too_long(recording, rules),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def refuse_transcript_options(options: SourceOptions) -> None:
    """Raise OutriderError if an option is set that only speech targets have."""
    for name, is_given in _transcript_options(options).items():
        if is_given:
            raise OutriderError(f"{name} is for speech targets, and this target is none; leave it out")


def _transcript_options(options: SourceOptions) -> dict[str, bool]:
    """Return the options that only transcripts have, and whether each is given."""
    return {
        "--response-format": options.response_format is not None,
        "--previous-text": options.previous_text is not None,
        "--condition-on-previous-text": options.condition_on_previous_text,
    }


def print_transcript(
    llm: LLM, recording: Recording, params: SamplingParams, options: SourceOptions, output: Output
) -> bool:
    """Transcribe a recording, print the transcript, and return whether that succeeded."""
    name = options.response_format or "text"
    before = llm.stats
    began = perf_counter()
    asked = TranscriptionOptions(
        language=options.language,
        task=options.task,
        prompt=options.previous_text,
        timestamps=name in WITH_SEGMENTS,
        condition_on_previous_text=options.condition_on_previous_text,
    )
    session = open_session(llm, recording, asked, params)
    printed = 0  # characters
    for _ in run_sessions(llm, [session]):
        if name == "text":
            text = session.text()
            output.painter.write(text[printed:], (), ())
            printed = len(text)
    transcript = session.transcript()
    if name != "text":
        output.painter.write(_format(transcript, name), (), ())
    output.painter.end()
    seconds = perf_counter() - began
    tokens = sum(len(completion.token_ids) for completion in transcript.completions)
    return output.sum_up(
        Outcome(
            completions=transcript.completions,
            sampled=params.temperature > 0,
            seconds=seconds,
            first=None,
            speed=DecodeSpeed(tokens=tokens, seconds=seconds),
            stats=with_times(transcript.stats, before, llm.stats),
            transcript=transcript,
        )
    )


def _format(transcript: Transcript, name: str) -> str:
    if name == "srt":
        return to_srt(transcript)
    if name == "vtt":
        return to_vtt(transcript)
    document = to_verbose_document(transcript) if name == "verbose_json" else to_document(transcript)
    return json.dumps(document, ensure_ascii=False)
