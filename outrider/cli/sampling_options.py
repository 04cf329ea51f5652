"""The options of the command line that choose tokens: sampling, and the form of the text."""

from dataclasses import dataclass, fields
from typing import Annotated

from outrider.core.constraint import Constraint
from outrider.core.option import SAMPLING, Option
from outrider.core.params import DEFAULT_MAX_TOKENS, SamplingParams
from outrider.core.text import is_utf8, read_text
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
    """Return the biases by token id."""
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


_PANEL = "Constraint"
_FIX = "give the path of a text file"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintOptions:
    """The options of a constraint. At most one may be given."""

    json_schema: Annotated[str | None, Option("FILE", _PANEL)] = None
    """Generate JSON that matches the schema in this file."""
    regex: Annotated[str | None, Option("PATTERN", _PANEL)] = None
    """Generate text that matches the whole pattern."""
    grammar: Annotated[str | None, Option("FILE", _PANEL)] = None
    """Generate text of the grammar in this file: Lark or GBNF."""

    def constraint(self) -> Constraint | None:
        """Return the constraint, or None if no option is given.

        Raises:
            OutriderError: a file cannot be read, a constraint is invalid, or several options are given.
        """
        given = [value for value in (self.json_schema, self.regex, self.grammar) if value is not None]
        if len(given) > 1:
            raise OutriderError("--json-schema, --regex and --grammar cannot be combined; give one of them")
        if self.regex is not None and not is_utf8(self.regex):
            raise OutriderError(f"--regex {self.regex!r} is not UTF-8 text; give UTF-8 text")
        if self.json_schema is not None:
            return Constraint.json_schema(read_text(self.json_schema, f"--json-schema {self.json_schema}", fix=_FIX))
        if self.grammar is not None:
            return Constraint.grammar(read_text(self.grammar, f"--grammar {self.grammar}", fix=_FIX))
        return None if self.regex is None else Constraint.regex(self.regex)
