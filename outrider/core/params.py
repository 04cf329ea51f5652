"""Sampling parameters of a request. They are validated when they are created."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any, TypeGuard, TypeVar

from outrider.core.constraint import Constraint
from outrider.errors import OutriderError

AUTO = "auto"  # the value of k with which the planner decides in each round
DEFAULT_MAX_TOKENS = 128  # output tokens of a completion
MAX_DRAFT_LENGTH = 256  # draft tokens of a sequence per round
_MAX_PRIORITY = 100  # in absolute value, so that no request waits forever
# Limits of temperature and repetition penalty. Logits are float32. Beyond these limits, rounding
# decides between tokens and logits overflow.
_MIN_SCALE = 1e-6
_MAX_SCALE = 1e4


class InvalidParam(OutriderError):
    """An invalid parameter of a request. `param` is its name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


_Params = TypeVar("_Params")


def _with_names_in_errors(kind: type[_Params]) -> type[_Params]:
    """Make the constructor of a dataclass name the parameter to use in place of an unknown one."""
    known = dict.fromkeys(field.name for field in fields(kind)).keys()  # type: ignore[arg-type]
    init = kind.__init__

    @wraps(init)
    def checked_init(self: _Params, *args: Any, **options: Any) -> None:
        if not options.keys() <= known:
            from outrider.core.foreign_names import unknown_name  # here, so that proposers import little

            name = next(name for name in options if name not in known)
            raise InvalidParam(name, f"{name} is not a sampling parameter; {unknown_name(name, known)}")
        init(self, *args, **options)

    kind.__init__ = checked_init  # type: ignore[assignment, method-assign]
    return kind


@_with_names_in_errors
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample a completion. Every field holds exactly, with and without speculation.

    The target distribution is computed in this order: constraint, logit_bias, repetition_penalty (prompt and output),
    presence and frequency penalty (output), min_tokens, temperature, top_k, top_p, min_p.

    Attributes:
        temperature: 0 is greedy; otherwise in [0.000001, 10000].
        top_k: keep the k likeliest tokens; 0 and -1 keep all, and -1 becomes 0.
        top_p: keep the smallest set of likeliest tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens below min_p times the likeliest one's probability, in [0, 1].
        repetition_penalty: above 1 discourages tokens of prompt and output (Keskar et al. 2019); 1
            is off; in [0.000001, 10000].
        presence_penalty: subtracted once from the logit of a token in the output; in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output; in [-2, 2].
        logit_bias: added to the logits, by token id; in [-100, 100] or -inf to forbid.
        max_tokens: maximum number of output tokens; None: until the context is full.
        min_tokens: minimum number of output tokens before end-of-text, a stop token or a stop
            string. A constraint takes precedence: if no token can follow, the text ends.
        stop: strings that end the completion; they are not part of the text.
        stop_token_ids: tokens that end the completion; they are not part of the text.
        ignore_eos: continue after end-of-text.
        seed: the same seed gives the same completion, alone or in a batch. None: a random seed, which is reported. If
            the text depends on the draft, k="auto" uses a fixed draft length for a request with its own seed.
        n: number of independent completions of the prompt.
        logprobs: report the log-probabilities of each output token and of this many likeliest tokens; None: no report.
        k: maximum number of draft tokens per round, at most 256; 0: plain decoding; None: the planner decides.
        proposer: the proposer of this request, one of `EngineParts.proposers`, with 4 draft tokens
            per round unless `k` is given. None: the planner decides.
        verifier: the exact rule of this request, one of `EngineParts.verifiers`. None: the engine's own.
        constraint: the form that the text must have.
        scope: the tenant of the request. Prefix caching and proposers that learn from finished outputs work within one
            scope only, so that the speed of a request does not reveal the text of another tenant.
        priority: lower values are scheduled first. 64 rounds of waiting count as much as one step of priority.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    k: int | None = None
    proposer: str | None = None
    verifier: str | None = None
    constraint: Constraint | None = None
    scope: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1 and is_whole(self.top_k):
            object.__setattr__(self, "top_k", 0)
        self._check_types()
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check_numbers()
        self._check_stops()
        self._check_constraint()

    def _check_types(self) -> None:
        for name, expected, hint in (
            ("stop", Iterable, "a string or several strings; () for none"),
            ("stop_token_ids", Iterable, "several token ids; () for none"),
            ("logit_bias", Mapping, "a mapping from token id to bias; {} for none"),
            ("ignore_eos", bool, "True or False"),
            ("scope", str, "a string, such as a tenant's name"),
            ("proposer", str | None, "a name from EngineParts.proposers, or None to let the planner decide"),
            ("verifier", str | None, "a name from EngineParts.verifiers, or None for the engine's verifier"),
        ):
            if not isinstance(getattr(self, name), expected):
                raise InvalidParam(name, f"{name} is {getattr(self, name)!r}; use {hint}")

    def _check_numbers(self) -> None:
        if not _is_number(self.temperature, 0.0 if self.temperature == 0 else _MIN_SCALE, _MAX_SCALE):
            raise InvalidParam(
                "temperature",
                f"temperature is {self.temperature!r}; use 0 for greedy decoding, or a number from {_MIN_SCALE:f} to"
                f" {_MAX_SCALE:g} (1 samples the model's distribution)",
            )
        _check_whole("top_k", self.top_k, 0, "0 keeps every token")
        if not _is_number(self.top_p, 0.0, 1.0) or self.top_p == 0:
            message = f"top_p is {self.top_p!r}; use a number above 0 and up to 1 (1 keeps every token)"
            raise InvalidParam("top_p", message)
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        _check_number("repetition_penalty", self.repetition_penalty, _MIN_SCALE, _MAX_SCALE, "1 is off")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 is off")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 is off")
        if self.max_tokens is not None:
            _check_whole("max_tokens", self.max_tokens, 1, "None continues until the context is full")
        _check_whole("min_tokens", self.min_tokens, 0, "0 is off")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}; lower min_tokens"
            raise InvalidParam("min_tokens", message)
        _check_whole("n", self.n, 1, "1 gives one completion")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, "0 reports only the emitted token")
        if self.k is not None:
            check_draft_length(self.k)
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, "None gives a random one")
        if not is_whole(self.priority) or abs(self.priority) > _MAX_PRIORITY:
            raise InvalidParam(
                "priority",
                f"priority is {self.priority!r}; use a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}",
            )
        for token, bias in self.logit_bias.items():
            _check_whole("logit_bias key", token, 0, "a token id")
            if bias != -math.inf:
                _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0, "or -inf to forbid the token")

    def _check_stops(self) -> None:
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise InvalidParam("stop", f"stop contains {stop!r}; use strings of at least one character")
        for token in self.stop_token_ids:
            _check_whole("stop_token_ids", token, 0, "a token id")

    def _check_constraint(self) -> None:
        if self.constraint is None:
            return
        if not isinstance(self.constraint, Constraint):
            message = f"constraint is {self.constraint!r}; use for example Constraint.json_schema({{...}})"
            raise InvalidParam("constraint", message)
        if -math.inf in self.logit_bias.values():
            message = "logit_bias forbids tokens that the constraint may need; use a bias of -99 for them"
            raise InvalidParam("logit_bias", message)
        if self.min_tokens and self.stop_token_ids:
            message = "min_tokens forbids stop_token_ids that the constraint may need; leave one of them out"
            raise InvalidParam("min_tokens", message)


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer. Booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_draft_length(k: object, *, least: int = 0, or_auto: bool = False) -> None:
    """Check a number of draft tokens per round.

    Args:
        least: the smallest number that is allowed.
        or_auto: "auto" is allowed as well.

    Raises:
        InvalidParam: it is not a whole number from `least` to `MAX_DRAFT_LENGTH`.
    """
    if or_auto and k == AUTO:
        return
    if is_whole(k) and least <= k <= MAX_DRAFT_LENGTH:
        return
    low = str(least) if least else "0 (plain decoding)"
    choice = f", or {AUTO}" if or_auto else ""
    kind = ", a string" if isinstance(k, str) else ""
    raise InvalidParam("k", f"k is {k!r}{kind}; use a number of draft tokens from {low} to {MAX_DRAFT_LENGTH}{choice}")


def parse_draft_length(option: str, text: str) -> int | str:
    """Return the number of an option, or auto. Its range is not checked. Raises OutriderError if it is neither."""
    try:
        return AUTO if text == AUTO else int(text)
    except ValueError:
        raise OutriderError(
            f"{option} is {text!r}, and not a number of draft tokens; use for example 4, or {AUTO}"
        ) from None


def _check_number(name: str, value: float, low: float, high: float, hint: str) -> None:
    if not _is_number(value, low, high):
        raise InvalidParam(_parameter(name), f"{name} is {value!r}; use a number from {low:g} to {high:g} ({hint})")


def _is_number(value: object, low: float, high: float) -> bool:
    """Return whether a value is a number in [low, high]. NaN and booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _check_whole(name: str, value: int, low: int, hint: str) -> None:
    if is_whole(value) and value >= 2**63:
        raise InvalidParam(_parameter(name), f"{name} is {value!r}; use a whole number below 2**63")
    if not is_whole(value) or value < low:
        raise InvalidParam(_parameter(name), f"{name} is {value!r}; use a whole number of at least {low} ({hint})")


def _parameter(name: str) -> str:
    """Return the parameter that `name` belongs to, for example logit_bias for logit_bias[5]."""
    return name.partition("[")[0].partition(" ")[0]
