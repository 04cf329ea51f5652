"""The options of a transcript."""

from dataclasses import dataclass

from outrider.core.params import InvalidParam, SamplingParams

_UNSUPPORTED = ("stop", "stop_token_ids", "constraint", "ignore_eos", "min_tokens")
_COLD = 0.5  # below this temperature, the text of a window is good enough to go before the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """The wanted form of a transcript."""

    language: str | None = None  # of the audio: a code or an English name; None: see `SpeechRules.start_tokens`
    task: str | None = None  # transcribe, or translate for English text; None: as the checkpoint says, or transcribe
    prompt: str | None = None  # text before the audio, such as names and their spelling
    timestamps: bool = False  # whether the transcript has segments
    condition_on_previous_text: bool = False  # whether the text of earlier windows goes before the next one


def check_options(options: TranscriptionOptions, params: SamplingParams) -> None:
    """Raise InvalidParam for an option or a sampling parameter that transcripts do not support."""
    for name in ("language", "task", "prompt"):
        value = getattr(options, name)
        if not isinstance(value, str | None):
            raise InvalidParam(name, f"{name} is {value!r}; give a string, or None")
    if options.condition_on_previous_text and params.temperature >= _COLD:
        raise InvalidParam(
            "condition_on_previous_text",
            f"condition_on_previous_text needs a temperature below {_COLD}, because errors go on,"
            f" and it is {params.temperature}; lower it, or leave condition_on_previous_text out",
        )
    if params.n != 1:
        raise InvalidParam("n", f"n is {params.n}, and a recording has one transcript; use 1, or give it several times")
    default = SamplingParams()
    for name in _UNSUPPORTED:
        if getattr(params, name) != getattr(default, name):
            raise InvalidParam(name, f"{name} is not supported in transcripts; leave it out")
