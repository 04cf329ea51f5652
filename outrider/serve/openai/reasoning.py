"""The reasoning of an answer: the markers around it, found by the chat template, and its parser."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.core.guidance_tokenizer import ANY_SPECIAL
from outrider.core.markers import CHANNEL, FINAL, THOUGHT_MARKERS, TURN
from outrider.serve.openai.call_formats import quoted

_ANALYSIS = f"{CHANNEL}analysis<|message|>"
_COMMENTARY = f"{CHANNEL}commentary<|message|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The form of the reasoning of a model: `open` reasoning `close` answer.

    Attributes:
        inside: whether the prompt ends within the reasoning, so that `open` is not part of the output.
        begun: whether the prompt has text of the reasoning as well.
        dropped: markers of the answer that are no text.
        anywhere: whether reasoning may begin in the middle of the output.
        header: what stands before an answer that has a constraint.
    """

    open: str
    close: str
    inside: bool = False
    begun: bool = False
    dropped: tuple[str, ...] = ()
    anywhere: bool = False
    header: str = ""

    def grammar(self, *, header: bool = False) -> str:
        """Return the grammar of what comes before a constrained answer; see `Constraint.prefix`."""
        rules = [
            "thought: silent* head SPACE?",
            f"silent: TEXT? {ANY_SPECIAL}",
            f"head[lazy]: TEXT {quoted(self.close)}",
            "TEXT: /(?s:.*)/ | ~/(?s:.*)/",  # ~ is the complement: bytes that are not UTF-8
            r"SPACE: /\s+/",
        ]
        written = f" {quoted(self.header)}" if header and self.header else ""
        if self.inside:
            return "\n".join([f"prefix: thought{written}", *rules])
        return "\n".join([f"prefix: (OPEN thought)?{written}", f"OPEN: {self.lead()}", *rules])

    def lead(self) -> str:
        """Return how an output with reasoning begins, for a grammar."""
        return rf"/\s*/ {quoted(self.open)}"


_HARMONY = Reasoning(open=_ANALYSIS, close=TURN, dropped=(FINAL, _COMMENTARY, TURN), anywhere=True, header=FINAL)


def reasoning_of(template: str, prompt_end: str, continued: str = "") -> Reasoning | None:
    """Return the form of the reasoning after a prompt; None: there is none, or the prompt has closed it.

    Args:
        template: the chat template.
        prompt_end: the last characters of the prompt.
        continued: the message of the assistant that the prompt ends with, and the output continues.
    """
    if _ANALYSIS in template:
        return _HARMONY
    end = prompt_end.rstrip()
    for open, close in THOUGHT_MARKERS:
        if close in template:
            opened, closed = continued.rfind(open), continued.rfind(close)
            if end.endswith(close) or closed > opened:
                return None
            at_open = end.endswith(open)
            begun = opened > closed and not at_open
            return Reasoning(open=open, close=close, inside=at_open or begun, begun=begun)
    return None


class ReasoningParser:
    """Splits generated text into reasoning and answer. The parts in which the text comes do not matter.

    White space at the ends of the reasoning, and before the answer that follows it, belongs to the markers.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self.spans: list[tuple[int, int]] = []  # where the text is reasoning, with its markers
        self._reasoning = reasoning
        self._buffer = ""
        self._taken = 0  # characters before the buffer
        self._begin = 0  # of the reasoning
        self._space = ""  # white space that the reasoning may end with
        self._inside = reasoning.inside
        self._trim = reasoning.inside and not reasoning.begun  # whether white space is left out until the next text
        self._lead = not reasoning.inside and not reasoning.anywhere  # whether the reasoning may still begin

    def add_text(self, text: str, *, last: bool) -> tuple[str, str]:
        """Add text, and return the new reasoning and the new part of the answer."""
        self._buffer += text
        thought, answer = "", ""
        if self._lead and not self._find_lead(last):
            return thought, answer
        more = True
        while more:
            inside = self._inside
            part, more = self._take(last)
            if inside:
                thought += part
            else:
                answer += part
        if last and self._inside:
            self.spans.append((self._begin, self._taken))
        return thought, answer

    def _find_lead(self, last: bool) -> bool:
        """Find out whether the output begins with reasoning. Return False if more text is needed to tell."""
        begin = self._buffer.lstrip()
        if self._reasoning.open.startswith(begin) and begin != self._reasoning.open and not last:
            return False
        self._lead = False
        if begin.startswith(self._reasoning.open):
            self._skip(len(self._buffer) - len(begin) + len(self._reasoning.open))
            self._inside = self._trim = True
        return True

    def _take(self, last: bool) -> tuple[str, bool]:
        """Take the text up to the next marker. Return it, and whether there was a marker."""
        reasoning = self._reasoning
        opens = (reasoning.open,) if reasoning.anywhere else ()
        markers = (reasoning.close,) if self._inside else (*opens, *reasoning.dropped)
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if not found:
            held = 0 if last else max((partial_marker_length(self._buffer, each) for each in markers), default=0)
            return self._trimmed(self._skip(len(self._buffer) - held)), False
        at, marker = min(found)
        text = self._trimmed(self._skip(at))
        self._skip(len(marker))
        if self._inside:
            self.spans.append((self._begin, self._taken))
            self._space = ""
        elif marker == reasoning.open:
            self._begin = self._taken - len(marker)
        if self._inside or marker == reasoning.open:
            self._inside = not self._inside
            self._trim = True
        return text, True

    def _skip(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._taken += length
        return text

    def _trimmed(self, text: str) -> str:
        """Return a text without white space at the end of a marker. Within reasoning, hold that at its end."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        if not self._inside:
            return text
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept


def partial_marker_length(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may be the start of `marker`."""
    longest = min(len(marker) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)


def thought_tokens(spans: Iterable[tuple[int, int]], length_of: Callable[[int], int], count: int) -> int:
    """Return how many of `count` tokens are reasoning. `length_of(n)` are the characters of the first n tokens."""
    total = 0
    for span in spans:
        begin, end = (bisect_left(range(count), at, key=length_of) for at in span)
        total += end - begin
    return total
