"""The sampling options of the command line."""

from dataclasses import dataclass, fields
from typing import Annotated

from outrider.core.option import SAMPLING, Option
from outrider.core.params import DEFAULT_MAX_TOKENS, SamplingParams
from outrider.core.text import is_utf8
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling options."""

    temperature: Annotated[float, Option(panel=SAMPLING)] = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Option(panel=SAMPLING)] = 0
    """Keep the likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Option(panel=SAMPLING)] = 1.0
    """Keep the likeliest mass, in (0, 1]."""
    min_p: Annotated[float, Option(panel=SAMPLING)] = 0.0
    """Drop tokens below this share of the likeliest one."""
    repetition_penalty: Annotated[float, Option(panel=SAMPLING)] = 1.0
    """Above 1 discourages tokens of prompt and output."""
    presence_penalty: Annotated[float, Option(panel=SAMPLING)] = 0.0
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: Annotated[float, Option(panel=SAMPLING)] = 0.0
    """Subtracted for each occurrence in the output."""
    logit_bias: Annotated[list[str] | None, Option("ID=VALUE", SAMPLING)] = None
    """Added to a token's logit; -inf forbids it. Repeatable."""
    max_tokens: Annotated[int | None, Option(panel=SAMPLING, min=0)] = None
    """Most output tokens. 0: until the context is full. Default: 128; with --chat and for transcripts no limit."""
    min_tokens: Annotated[int, Option(panel=SAMPLING)] = 0
    """Fewest output tokens."""
    stop: Annotated[list[str] | None, Option("TEXT", SAMPLING)] = None
    """A string that ends the completion; not part of it. Repeatable."""
    stop_token_id: Annotated[list[int] | None, Option("ID", SAMPLING)] = None
    """A token that ends the completion. Repeatable."""
    ignore_eos: Annotated[bool, Option(panel=SAMPLING)] = False
    """Continue after end-of-text."""
    seed: Annotated[int | None, Option(panel=SAMPLING)] = None
    """The same seed gives the same text. If the text depends on the draft, as with --verifier block, --k auto uses 4
    draft tokens for it. Trees and combinations need --verifier walk or coupled. Default: a random
    seed, which is reported."""
    n: Annotated[int, Option(panel=SAMPLING)] = 1
    """Completions of each prompt."""
    logprobs: Annotated[int | None, Option(panel=SAMPLING)] = None
    """Report log-probabilities of each token and of the likeliest N."""

    def params(self, *, unlimited: bool = False) -> SamplingParams:
        """Return the sampling parameters. `unlimited`: without --max-tokens, the model decides where the text ends.

        Raises:
            OutriderError: a value is out of range.
        """
        for stop in self.stop or ():
            if not is_utf8(stop):
                raise OutriderError(f"--stop {stop!r} is not UTF-8 text; give UTF-8 text")
        default = 0 if unlimited else DEFAULT_MAX_TOKENS
        max_tokens = default if self.max_tokens is None else self.max_tokens
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {
            "logit_bias": _parse_bias(self.logit_bias),
            "max_tokens": max_tokens or None,
            "stop": tuple(self.stop or ()),
            "stop_token_ids": tuple(values.pop("stop_token_id") or ()),
        }
        return SamplingParams(**values)


def _parse_bias(entries: list[str] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for entry in entries or ():
        name, _, value = entry.partition("=")
        try:
            token, number = int(name), float(value)
        except ValueError:
            raise OutriderError(
                f"--logit-bias {entry!r} is not ID=VALUE; write for example 42=-1.5 or 42=-inf"
            ) from None
        if token in bias:
            raise OutriderError(f"--logit-bias is given twice for token {token}; give one value for it")
        bias[token] = number
    return bias
