"""Turns one recording into a transcript: which request comes next, and what its output means."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.core.noise import derive_seed
from outrider.core.params import InvalidParam, SamplingParams
from outrider.core.prompts import text_tokens
from outrider.core.types import Completion, FinishReason, SpeechOutput
from outrider.engine.codec import EncodedPrompt, TextCodec
from outrider.errors import OutriderError
from outrider.models.torch.speech.audio import Audio
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.segments import TokenSegment
from outrider.models.torch.speech.windows import PreviousText, Windows
from outrider.serve.speech.options import TranscriptionOptions, check_options
from outrider.serve.speech.transcript import Segment, Transcript

_PREVIOUS = "<|startofprev|>"  # in tokenizers of checkpoints without a prev_sot_token_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request of a session."""

    encoded: EncodedPrompt
    params: SamplingParams
    output: SpeechOutput


class Session:
    """Makes one transcript.

    The caller submits `step()` to an engine and hands the completion to `add`, until `step` returns
    None. A session does not use the engine itself, so a server and a loop in Python share it.
    """

    def __init__(
        self, codec: TextCodec, audio: Audio, options: TranscriptionOptions, params: SamplingParams, *, context: int
    ) -> None:
        """Prepare for a recording.

        Args:
            codec: that of the speech model.
            audio: the recording.
            options: what the transcript should be.
            params: how to sample each window.
            context: most tokens of prompt and completion together.

        Raises:
            OutriderError: an option does not fit the model.
        """
        check_options(options, params)
        self._codec = codec
        self._context = context
        self._rules = speech_rules(codec)
        self._audio = audio
        self._options = options
        self._params = params
        self._windows = Windows(audio, self._rules, self._previous_text())
        self._detects = self._rules.needs_detection(options.language, options.task)
        self._language = options.language
        self._task = self._rules.default_task(options.task, options.language)
        self._completions: list[Completion] = []
        self._done = False
        if self._detects:
            self._rules.start_tokens(next(iter(self._rules.languages)), self._task)  # checks the task
        else:
            self._start = self._start_tokens(options.task)

    def step(self) -> Step | None:
        """Return the next request; None: the transcript is complete."""
        if self._done:
            return None
        if self._detects:
            params = SamplingParams(max_tokens=1, scope=self._params.scope, priority=self._params.priority)
            start = self._rules.start_tokens(next(iter(self._rules.languages)))
            encoded = EncodedPrompt(start[:1], self._windows.features)
            return Step(encoded=encoded, params=params, output=SpeechOutput.LANGUAGE)
        output = SpeechOutput.TIMESTAMPS if self._audio.timestamps else SpeechOutput.TEXT
        params = self._params
        if params.seed is not None:
            params = replace(params, seed=derive_seed(params.seed, len(self._completions)))
        encoded = EncodedPrompt(self._windows.prompt(self._start), self._windows.features)
        return Step(encoded=encoded, params=params, output=output)

    def add(self, completion: Completion) -> None:
        """Take the completion of the last `step`. Raises OutriderError if it has failed."""
        if completion.finish_reason is FinishReason.ERROR:
            raise OutriderError(completion.error)
        if self._detects:
            self._detects = False
            self._language = self._rules.language_of(completion.token_ids)
            self._start = self._start_tokens(self._task)
            return
        self._completions.append(completion)
        if self._audio.timestamps:
            self._windows.add(self._without_end(completion))
            self._done = self._windows.done
        else:
            self._done = True

    def text(self) -> str:
        """Return the text so far. It only grows."""
        if self._audio.timestamps:
            return "".join(segment.text for segment in self._segments())
        return "".join(completion.text for completion in self._completions)

    def transcript(self) -> Transcript:
        """Return the transcript of a complete session."""
        return Transcript(
            text=self.text(),
            segments=tuple(self._segments()),
            language=self._rules.language_of(self._start),
            language_detected=self._rules.needs_detection(self._options.language, self._options.task),
            task=self._task,
            seconds=self._audio.seconds,
            temperature=self._params.temperature,
            completions=tuple(self._completions),
        )

    def _start_tokens(self, task: str | None) -> tuple[int, ...]:
        return self._rules.start_tokens(self._language, task, timestamps=self._audio.timestamps)

    def _segments(self) -> Iterator[Segment]:
        return map(self._segment, self._windows.segments)

    def _segment(self, segment: TokenSegment) -> Segment:
        begin = self._rules.check_timestamps().begin
        return Segment(
            start=segment.start,
            end=segment.end,
            text=self._codec.decode([token for token in segment.token_ids if token < begin]),
            token_ids=segment.token_ids,
            window_start=segment.frame / self._rules.frames_per_second,
        )

    def _without_end(self, completion: Completion) -> Sequence[int]:
        tokens = completion.token_ids
        return tokens[:-1] if tokens and tokens[-1] in self._codec.end_ids else tokens

    def _previous_text(self) -> PreviousText:
        options = self._options
        prompt = (options.prompt or "").strip()
        if not prompt and not options.condition_on_previous_text:
            return PreviousText(token=None)
        # Half of the context is for the output. The other half begins with the token before
        # previous text.
        limit = min(self._rules.positions, self._context) // 2 - 1
        return PreviousText(
            token=_previous_token(self._codec, self._rules),
            prompt=_prompt_tokens(self._codec, prompt) if prompt else (),
            condition=options.condition_on_previous_text,
            limit=max(limit, 1),
        )


def speech_rules(codec: TextCodec) -> SpeechRules:
    """Return what the checkpoint of a speech model says about speech.

    Raises:
        OutriderError: the target is no speech model.
    """
    if codec.speech_rules is None:
        raise OutriderError("this target is no speech model and transcribes no audio; use a model such as Whisper")
    return codec.speech_rules


def _previous_token(codec: TextCodec, rules: SpeechRules) -> int:
    """Return the token before previous text."""
    if rules.previous is not None:
        return rules.previous
    token = codec.tokenizer.get_vocab().get(_PREVIOUS)
    if token is None:
        raise InvalidParam(
            "prompt",
            "the target's checkpoint has no prev_sot_token_id, so its transcripts follow no other"
            " text; set it in its generation_config.json, or leave prompt and"
            " condition_on_previous_text out",
        )
    return int(token)


def _prompt_tokens(codec: TextCodec, prompt: str) -> tuple[int, ...]:
    """Return the tokens of a prompt. They begin with a space, as words within a text do."""
    tokens = text_tokens(codec.tokenizer, " " + prompt, special=False)
    added = codec.tokenizer.added_tokens_decoder
    found = next((token for token in tokens if token in added), None)
    if found is not None:
        name = codec.tokenizer.convert_ids_to_tokens(found)
        raise InvalidParam("prompt", f"prompt has the special token {name}; leave it out")
    return tokens
