"""Find the tokenization of a server's text that fits the model best, of all that spell the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

import torch

from outrider.lab.audit.pair import Pair
from outrider.lab.audit.server.model import Texts, Tokens

_AHEAD = 15  # tokens of the tokenizer's own tokenization that one pass scores
_MAX_PASSES = 200  # passes without a real difference after which only the path that has come furthest is kept
_INCOMPLETE = "\ufffd".encode()  # what servers write for a part of a character


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A greedy token of the server, and how far it is from the model's likeliest one."""

    position: int  # of the output token, from 0
    token: int
    best: int  # the model's likeliest token
    margin: float  # in logits; 0 for the likeliest token
    tolerance: float  # largest margin that rounding explains, in logits; above 0

    @property
    def near(self) -> bool:
        """Whether rounding explains the choice."""
        return self.margin <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far rounding moves logits."""

    relative: float  # of the largest logit
    least: float  # in logits

    def choice(self, logits: torch.Tensor, token: int, position: int) -> Choice:
        """Return how far a token is below the likeliest one, by the logits [V] before it."""
        best = int(logits.argmax())
        return Choice(
            position=position,
            token=token,
            best=best,
            margin=float(logits[best] - logits[token]),
            tolerance=max(self.relative * float(logits.abs().max()), self.least),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A tokenization of the beginning of a text."""

    tokens: Tokens = ()
    done: int = 0  # bytes of the text that the tokens spell
    before: int = 0  # bytes before the last token
    worst: float = 0.0  # largest margin since the last real difference, as a share of its tolerance
    choices: tuple[Choice, ...] = ()  # those that are not the model's likeliest token
    complete: bool = False

    def add(self, choice: Choice, size: int) -> Path:
        """Return the path with one more token, which spells `size` bytes."""
        return replace(
            self,
            tokens=(*self.tokens, choice.token),
            done=self.done + size,
            before=self.done,
            worst=max(self.worst, choice.margin / choice.tolerance),
            choices=(*self.choices, choice) if choice.token != choice.best else self.choices,
        )


def follow(pair: Pair, texts: Texts, prompt: Tokens, text: str, tolerance: Tolerance, *, ended: bool) -> Path:
    """Return the tokenization of a text that the model prefers.

    It is the one whose largest margin is smallest, as long as rounding explains all margins of at least one. So a
    correct server passes, whichever tokenization it has chosen. Where rounding explains none, the server differs. Then
    only the tokenization that comes furthest is kept, and goes on after its difference.

    Args:
        texts: spells tokens.
        prompt: the tokens before the text.
        text: the completion.
        tolerance: what counts as rounding.
        ended: whether the server ended the text by itself, so that an end-of-text token follows it.
    """
    return _Search(pair, texts, prompt, text.encode(errors="replace"), tolerance, ended).run()


class _Search:
    """A best-first search over the tokenizations of one text."""

    def __init__(
        self, pair: Pair, texts: Texts, prompt: Tokens, text: bytes, tolerance: Tolerance, ended: bool
    ) -> None:
        self._pair = pair
        self._texts = texts
        self._prompt = prompt
        self._text = text
        self._tolerance = tolerance
        self._ended = ended
        self._numbers = count()  # paths that are equally good wait in the order in which they were found
        self._waiting: list[tuple[float, int, int, Path]] = []

    def run(self) -> Path:
        path = Path()
        passes = 0
        while not path.complete:
            self._score(path)
            passes += 1
            path = heappop(self._waiting)[-1]
            if path.worst <= 1 and passes < _MAX_PASSES:
                continue
            heappush(self._waiting, self._entry(path))
            furthest = max((entry[-1] for entry in self._waiting), key=lambda each: (each.before, -each.worst))
            path = replace(furthest, worst=0.0) if furthest.worst > 1 else furthest
            self._waiting.clear()
            passes = 0
        return path

    def _entry(self, path: Path) -> tuple[float, int, int, Path]:
        return path.worst, -path.done, next(self._numbers), path

    def _score(self, path: Path) -> None:
        """Add the paths that continue a path.

        One pass scores the next tokens as the tokenizer has them. They are followed until the path becomes worse.
        """
        guess = self._guess(path)
        rows = self._pair.logits_along((*self._prompt, *path.tokens), guess)
        for logits, expected in zip(rows, (*guess, None), strict=True):
            followed = None
            for longer in self._continue(path, logits):
                if not longer.complete and longer.tokens[-1] == expected and longer.worst == path.worst:
                    followed = longer
                else:
                    heappush(self._waiting, self._entry(longer))
            if followed is None:
                return
            path = followed

    def _guess(self, path: Path) -> Tokens:
        """Return the next tokens of the tokenizer, which are likely to be those of the server."""
        rest = self._text[path.done :]
        inside_character = rest and rest[0] & 0xC0 == 0x80  # a continuation byte of UTF-8
        return () if inside_character else self._texts.encode(rest.decode())[:_AHEAD]

    def _continue(self, path: Path, logits: torch.Tensor) -> list[Path]:
        """Return the path with each token that fits the text, or the complete path where the text ends."""
        rest = self._text[path.done :]
        position = len(path.tokens)
        if not rest and self._ended and self._pair.end_ids:
            end = max(self._pair.end_ids, key=lambda token: float(logits[token]))
            longer = path.add(self._tolerance.choice(logits, end, position), 0)
            return [replace(longer, tokens=path.tokens, complete=True)]
        if rest.startswith(_INCOMPLETE):
            rest = b""
        found = [
            path.add(self._tolerance.choice(logits, token, position), self._texts.size(token))
            for token in self._texts.beginnings(rest)
        ]
        return found or [replace(path, complete=True)]
