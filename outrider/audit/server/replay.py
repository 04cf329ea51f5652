"""The greedy test: replay a server's greedy completions on the model, and measure the margin of every difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from outrider.audit.flips import NEAR
from outrider.audit.pair import Pair
from outrider.audit.prompts import Prompt
from outrider.audit.replay import LOGITS
from outrider.audit.server.client import Answer
from outrider.audit.server.model import Texts, Tokens, is_incomplete
from outrider.audit.statistics import wilson

_SPREAD = 6.0  # near-ties may differ by this many standard deviations of the rounding
_SHOWN = 40  # characters of the text around a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A greedy token of the server that is not the model's likeliest one."""

    prompt: int  # from 0
    position: int  # of the output token, from 0
    before: str  # the text before it
    model_token: int
    server_token: int  # of several tokens that fit the text, the likeliest one; -1: no token fits
    model_text: str
    server_text: str
    margin: float  # in logits
    tolerance: float
    near_tie: bool  # whether rounding explains it


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replay of one completion."""

    tokens: int  # compared tokens
    unread: int  # characters at the end that could not be compared
    differences: tuple[Difference, ...]


def replay(
    pair: Pair,
    texts: Texts,
    prompts: Sequence[tuple[Prompt, Tokens]],
    answers: Sequence[Answer],
    *,
    dtype: torch.dtype,
    rounding: float,
) -> dict[str, Any]:
    """Compare greedy completions with the model, teacher-forced: after a difference it goes on from the server's token.

    Args:
        pair: the model in float32.
        texts: turns tokens into text.
        prompts: the prompts with their tokens.
        answers: the greedy completion of each.
        dtype: the type of the numbers that the server computes with.
        rounding: standard deviation of the server's logits.
    """
    replayed = [
        _Replayer(pair, texts, number, tokens, dtype, rounding).run(answer)
        for number, ((_, tokens), answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    differences = [each for one in replayed for each in one.differences]
    compared = sum(one.tokens for one in replayed)
    real = sum(not each.near_tie for each in differences)
    bounds = wilson(real, max(compared, real))
    return {
        "passed": not real and compared > 0,
        "prompts": len(prompts),
        "tokens": compared,
        "unread_characters": sum(one.unread for one in replayed),
        "by": "token ids" if answers and answers[0].tokens is not None else "text",
        "differences": len(differences),
        "near_ties": len(differences) - real,
        "real_differences": real,
        "real_per_1000_95": [1e3 * bounds.low, 1e3 * bounds.high],
        "largest_near_tie": max((each.margin for each in differences if each.near_tie), default=0.0),
        "details": [asdict(each) for each in differences],
    }


class _Replayer:
    """Follows one completion."""

    def __init__(
        self, pair: Pair, texts: Texts, number: int, prompt: Tokens, dtype: torch.dtype, rounding: float
    ) -> None:
        self._pair = pair
        self._texts = texts
        self._number = number
        self._prompt = prompt
        self._eps = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
        self._rounding = rounding
        self._found: list[Difference] = []

    def run(self, answer: Answer) -> Replayed:
        output = self._by_tokens(answer.tokens) if answer.tokens is not None else self._by_text(answer.text)
        unread = 0 if answer.tokens is not None else len(answer.text) - len(self._texts.after(self._prompt, output))
        ended = answer.tokens is not None and bool(output) and output[-1] in self._pair.end_ids
        if answer.ended and not ended and not unread:
            self._check_end(output)
        return Replayed(tokens=len(output), unread=max(unread, 0), differences=tuple(self._found))

    def _by_tokens(self, output: Tokens) -> Tokens:
        if output:
            rows = self._pair.logits_along(self._prompt, output[:-1])
            for position, (logits, token) in enumerate(zip(rows, output, strict=True)):
                if int(logits.argmax()) != token:
                    self._add(logits, token, output[:position])
        return output

    def _by_text(self, text: str) -> Tokens:
        """Follow the text with the model's own tokens, and where they do not fit, with the likeliest ones that do."""
        output: Tokens = ()
        while rest := text[len(self._texts.after(self._prompt, output)) :]:
            guess = self._texts.encode(rest)
            rows = self._pair.logits_along((*self._prompt, *output), guess[:-1])
            length = len(output)
            for logits, expected in zip(rows, guess, strict=True):
                token = self._next(logits, output, text)
                if token is None:
                    return output
                output = (*output, token)
                if token != expected:
                    break  # the rest of the guess does not follow this token
            if len(output) == length:
                return output
        return output

    def _next(self, logits: torch.Tensor, output: Tokens, text: str) -> int | None:
        """Return the next token of a text, or None where the text ends or holds a part of a character."""
        best = int(logits.argmax())
        if self._fits(best, output, text):
            return best
        done = self._texts.after(self._prompt, output)
        rest = text[len(done) :]
        if not rest or is_incomplete(rest[:1]):
            return None
        found = [token for token in self._texts.beginnings(rest) if self._fits(token, output, text)]
        # A character of several tokens begins with a part of it, which is no beginning of the text.
        found += [token for token in self._texts.encode(rest)[:1] if token not in found]
        token = max(found, key=lambda each: float(logits[each]))
        self._add(logits, token, output)
        return token

    def _fits(self, token: int, output: Tokens, text: str) -> bool:
        longer = self._texts.after(self._prompt, (*output, token))
        if longer == self._texts.after(self._prompt, output):
            return False  # a special token has no text
        return text.startswith(longer.rstrip("\ufffd"))

    def _check_end(self, output: Tokens) -> None:
        logits = self._pair.logits((*self._prompt, *output))
        if int(logits.argmax()) not in self._pair.end_ids and self._pair.end_ids:
            self._add(logits, max(self._pair.end_ids, key=lambda token: float(logits[token])), output)

    def _add(self, logits: torch.Tensor, token: int, output: Tokens) -> None:
        best = int(logits.argmax())
        margin = float(logits[best] - logits[token])
        tolerance = max(NEAR * self._eps * float(logits.abs().max()), _SPREAD * self._rounding, LOGITS)
        self._found.append(
            Difference(
                prompt=self._number,
                position=len(output),
                before=self._texts.after(self._prompt, output)[-_SHOWN:],
                model_token=best,
                server_token=token,
                model_text=self._texts.after((*self._prompt, *output), (best,)),
                server_text=self._texts.after((*self._prompt, *output), (token,)),
                margin=margin,
                tolerance=tolerance,
                near_tie=margin <= tolerance,
            )
        )
