"""The windows of a recording of any length (Radford et al. 2022, section 3.8: long-form transcription)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn import functional

from outrider.core.types import AudioFeatures
from outrider.models.torch.speech.audio import Audio
from outrider.models.torch.speech.rules import SpeechRules
from outrider.models.torch.speech.segments import TokenSegment, cut_window


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousText:
    """The text before a window, as the window's prompt gives it."""

    token: int | None  # the token before previous text; None: the model has none
    prompt: tuple[int, ...] = ()  # text that the user gives
    condition: bool = False  # whether the segments so far go before the next window
    limit: int = 0  # most tokens of previous text; the last ones are kept


class Windows:
    """Cuts the features of a recording into windows, each of which begins where the last segment before it ends.

    The caller reads the features and the prompt of a window, generates its output, and passes it to `add`, until
    `done`.
    """

    def __init__(self, audio: Audio, rules: SpeechRules, previous: PreviousText) -> None:
        self.segments: list[TokenSegment] = []
        self._audio = audio
        self._rules = rules
        self._previous = previous
        self._frame = 0  # the first one of the window
        self._features = self._cut()

    @property
    def done(self) -> bool:
        """Whether the recording has no more windows."""
        return self._frame >= self._audio.features.shape[1]

    @property
    def features(self) -> AudioFeatures:
        """The features of the window, padded to what the encoder takes."""
        return self._features

    def prompt(self, start: Sequence[int]) -> tuple[int, ...]:
        """Return the prompt of the window: previous text, if there is any, and the start tokens."""
        text = self._previous_text()
        if not text:
            return tuple(start)
        assert self._previous.token is not None
        return (self._previous.token, *text[-self._previous.limit :], *start)

    def add(self, tokens: Sequence[int]) -> None:
        """Take the output of the window, without the end of the text, and go to the next one."""
        output = cut_window(
            tokens,
            self._rules.check_timestamps(),
            frame=self._frame,
            frames=self._length(),
            frames_per_second=self._rules.frames_per_second,
        )
        self.segments += output.segments
        self._frame += output.frames
        if not self.done:
            self._features = self._cut()

    def _previous_text(self) -> list[int]:
        text = [*self._previous.prompt]
        if self._previous.condition and self.segments:
            begin = self._rules.check_timestamps().begin
            for segment in self.segments:
                tokens = segment.token_ids
                ends_with_pair = len(tokens) > 2 and tokens[-2] >= begin  # the second one begins the next segment
                text += tokens[:-1] if ends_with_pair else tokens
        return text

    def _length(self) -> int:
        """Return the frames of the window, without padding."""
        return min(self._audio.features.shape[1] - self._frame, self._rules.frames)

    def _cut(self) -> AudioFeatures:
        length = self._length()
        window = self._audio.features[:, self._frame : self._frame + length]
        return AudioFeatures(functional.pad(window, (0, self._rules.frames - length)))
