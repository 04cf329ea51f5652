"""The greedy test: replay a server's greedy completions on the model, and measure the margin of every difference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.lab.audit.flips import NEAR
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.prompts import Prompt
from outrider.lab.audit.replay import LOGITS
from outrider.lab.audit.server.client import Answer
from outrider.lab.audit.server.model import Texts, Tokens
from outrider.lab.audit.server.tokenizations import Choice, Tolerance, follow
from outrider.lab.audit.statistics import wilson

_SPREAD = 6.0  # near-ties may differ by this many standard deviations of the rounding
_SHOWN = 40  # characters of the text around a difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A greedy token of the server that is not the model's likeliest one."""

    prompt: int  # from 0
    position: int  # of the output token, from 0
    before: str  # the text before it
    model_token: int
    server_token: int  # for a server that returns text, of the tokenization that fits best
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of the greedy test, as in the JSON document."""

    passed: bool
    prompts: int
    tokens: int  # compared tokens
    unread_characters: int  # characters that could not be compared
    by: str  # what was compared: token ids or text
    differences: int
    near_ties: int  # differences that rounding explains
    real_differences: int
    real_per_1000_95: list[float]  # bounds of the real differences per 1000 tokens
    largest_near_tie: float  # margin in logits
    details: list[Difference]


def replay(
    pair: Pair,
    texts: Texts,
    prompts: Sequence[tuple[Prompt, Tokens]],
    answers: Sequence[Answer],
    *,
    dtype: torch.dtype,
    rounding: float,
) -> ReplayResult:
    """Return the differences of greedy completions from the model, which reads the server's own tokens.

    Args:
        pair: the model in float32.
        texts: turns tokens into text.
        prompts: the prompts with their tokens.
        answers: the greedy completion of each.
        dtype: the type of the numbers that the server computes with.
        rounding: standard deviation of the server's logits.
    """
    eps = torch.finfo(dtype).eps if dtype is not torch.float32 else 0.0
    tolerance = Tolerance(relative=NEAR * eps, least=max(_SPREAD * rounding, LOGITS))
    replayer = _Replayer(pair, texts, tolerance)
    replayed = [
        replayer.run(number, tokens, answer)
        for number, ((_, tokens), answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    differences = [each for one in replayed for each in one.differences]
    compared = sum(one.tokens for one in replayed)
    real = sum(not each.near_tie for each in differences)
    bounds = wilson(real, max(compared, real))
    return ReplayResult(
        passed=not real and compared > 0,
        prompts=len(prompts),
        tokens=compared,
        unread_characters=sum(one.unread for one in replayed),
        by="token ids" if answers and answers[0].tokens is not None else "text",
        differences=len(differences),
        near_ties=len(differences) - real,
        real_differences=real,
        real_per_1000_95=[1e3 * bounds.low, 1e3 * bounds.high],
        largest_near_tie=max((each.margin for each in differences if each.near_tie), default=0.0),
        details=differences,
    )


class _Replayer:
    """Follows the completions."""

    def __init__(self, pair: Pair, texts: Texts, tolerance: Tolerance) -> None:
        self._pair = pair
        self._texts = texts
        self._tolerance = tolerance

    def run(self, number: int, prompt: Tokens, answer: Answer) -> Replayed:
        """Return the comparison of the completion of a prompt with the model."""
        if answer.tokens is not None:
            choices = self._by_tokens(prompt, answer.tokens, ended=answer.ended)
            return self._replayed(number, prompt, answer.tokens, choices, unread=0)
        path = follow(self._pair, self._texts, prompt, answer.text, self._tolerance, ended=answer.ended)
        unread = answer.text.encode(errors="replace")[path.done :].decode(errors="replace")
        return self._replayed(number, prompt, path.tokens, path.choices, unread=len(unread))

    def _by_tokens(self, prompt: Tokens, output: Tokens, *, ended: bool) -> list[Choice]:
        """Return the margins of the server's own tokens, and of the end of the text."""
        rows = self._pair.logits_along(prompt, output)
        choices = [
            self._tolerance.choice(logits, token, position)
            for position, (logits, token) in enumerate(zip(rows[:-1], output, strict=True))
        ]
        end_ids = self._pair.end_ids
        if ended and end_ids and not end_ids.intersection(output[-1:]):  # some servers leave the end token out
            end = max(end_ids, key=lambda token: float(rows[-1][token]))
            choices.append(self._tolerance.choice(rows[-1], end, len(output)))
        return choices

    def _replayed(
        self, number: int, prompt: Tokens, output: Tokens, choices: Sequence[Choice], *, unread: int
    ) -> Replayed:
        different = [choice for choice in choices if choice.token != choice.best]
        found = tuple(self._difference(number, prompt, output[: choice.position], choice) for choice in different)
        return Replayed(tokens=len(output), unread=unread, differences=found)

    def _difference(self, number: int, prompt: Tokens, before: Tokens, choice: Choice) -> Difference:
        context = (*prompt, *before)
        return Difference(
            prompt=number,
            position=choice.position,
            before=self._texts.after(prompt, before)[-_SHOWN:],
            model_token=choice.best,
            server_token=choice.token,
            model_text=self._texts.after(context, (choice.best,)),
            server_text=self._texts.after(context, (choice.token,)),
            margin=choice.margin,
            tolerance=choice.tolerance,
            near_tie=choice.near,
        )
