"""The sampling options of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.core.params import DEFAULT_MAX_TOKENS, SamplingParams
from outrider.core.text import is_utf8
from outrider.errors import OutriderError

SAMPLING = "Sampling"

Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest mass, in (0, 1].", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the likeliest one.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1 discourages tokens of prompt and output.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted once from the logits of tokens in the output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtracted for each occurrence in the output.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID=VALUE", help="Added to a token's logit; -inf forbids it. Repeatable.", rich_help_panel=SAMPLING
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Most output tokens. 0: until the context is full. Default: 128; with --chat and for transcripts no"
        " limit.",
        rich_help_panel=SAMPLING,
    ),
]
MinTokens = Annotated[int, typer.Option(help="Fewest output tokens.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="A string that ends the completion; not part of it. Repeatable.", rich_help_panel=SAMPLING
    ),
]
StopTokenId = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", help="A token that ends the completion. Repeatable.", rich_help_panel=SAMPLING),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue after end-of-text.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The same seed gives the same text. If the text depends on the draft, as with --verifier block, --k auto"
        " uses 4 draft tokens for it. Trees and combinations need --verifier walk or coupled. Default: a random seed,"
        " which is reported.",
        rich_help_panel=SAMPLING,
    ),
]
Count = Annotated[int, typer.Option("--n", help="Completions of each prompt.", rich_help_panel=SAMPLING)]
Logprobs = Annotated[
    int | None,
    typer.Option(help="Report log-probabilities of each token and of the likeliest N.", rich_help_panel=SAMPLING),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling options."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: PresencePenalty = 0.0
    frequency_penalty: FrequencyPenalty = 0.0
    logit_bias: LogitBias = None
    max_tokens: MaxTokens = None
    min_tokens: MinTokens = 0
    stop: Stop = None
    stop_token_id: StopTokenId = None
    ignore_eos: IgnoreEos = False
    seed: Seed = None
    n: Count = 1
    logprobs: Logprobs = None

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
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_parse_bias(self.logit_bias),
            max_tokens=max_tokens or None,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            n=self.n,
            logprobs=self.logprobs,
        )


def _parse_bias(entries: list[str] | None) -> dict[int, float]:
    """Return the bias by token id."""
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
