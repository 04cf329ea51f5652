"""The results: `Transcript` and its segments."""

from dataclasses import dataclass
from functools import reduce
from operator import add

from outrider.core.stats import Stats
from outrider.core.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a transcript between two timestamps."""

    start: float  # seconds from the beginning of the recording
    end: float
    text: str
    token_ids: tuple[int, ...]  # with timestamps
    window_start: float  # seconds from the beginning of the recording to that of its window


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The text of a recording."""

    text: str
    segments: tuple[Segment, ...]  # (): the transcript has no timestamps
    language: str | None  # the code of the language of the audio; None: unknown
    language_detected: bool  # whether the model has detected it
    task: str  # transcribe or translate
    seconds: float  # of the recording
    temperature: float  # of sampling; 0: greedy
    completions: tuple[Completion, ...]  # by window; the end of one may be dropped, because the next window repeats it

    @property
    def stats(self) -> Stats:
        """Sums over the rounds of all windows."""
        return reduce(add, (completion.stats for completion in self.completions), Stats())
