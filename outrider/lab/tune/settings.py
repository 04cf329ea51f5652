"""Settings of `outrider tune`, checked before any model is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from outrider.core.config import DRAFT_OPTIONS, TARGET_OPTIONS, EngineConfig
from outrider.core.option import MEASURE, MODEL, OUTPUT, PYTHON_ONLY, Option, Shown
from outrider.core.params import AUTO, SamplingParams, check_draft_length
from outrider.errors import OutriderError
from outrider.lab.common.number_lists import parse_real, parse_whole
from outrider.lab.common.settings import RepeatedSettings

_PLAIN = "none"
_THIRDS = 3


def parse_proposers(option: str, text: str) -> tuple[str, ...]:
    """Return the expressions of a list such as "ngram;merge(ngram,recycle)".

    A semicolon in double quotes does not separate.

    Raises:
        OutriderError: the list is empty.
    """
    parts = [""]
    quoted = False
    for char in text:
        quoted ^= char == '"'
        if char == ";" and not quoted:
            parts.append("")
        else:
            parts[-1] += char
    proposers = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not proposers:
        raise OutriderError(f"{option} names nothing to measure; give at least one, or leave it out")
    return proposers


def parse_ks(option: str, text: str) -> tuple[int | str, ...]:
    """Return the values of "2,4,8,auto". auto comes last. Raises OutriderError if `text` does not have this form."""
    parts = [part.strip() for part in text.split(",")]
    numbers = ",".join(part for part in parts if part != AUTO)
    try:
        ks: tuple[int | str, ...] = parse_whole(option, numbers) if numbers else ()
    except OutriderError:
        raise OutriderError(
            f"{option} is {text!r}; use numbers of draft tokens and {AUTO}, such as 2,4,8,{AUTO}"
        ) from None
    return (*ks, AUTO) if AUTO in parts else ks


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(RepeatedSettings):
    """The options of `outrider tune`, and what `outrider fit` adds to them."""

    engine: Annotated[EngineConfig, Shown((*TARGET_OPTIONS, *DRAFT_OPTIONS, "verifier", "max_model_len"))] = field(
        default_factory=EngineConfig
    )
    proposers: Annotated[tuple[str, ...], Option("LIST", MODEL, parse=parse_proposers)] = ()
    """Proposers to compare, separated by semicolons: 'ngram;suffix;draft:DIR'. Default: ngram, suffix and the default
    proposer of the target."""
    ks: Annotated[tuple[int | str, ...], Option("LIST", MODEL, flags="--k", parse=parse_ks)] = (2, 4, 8, AUTO)
    """Draft tokens per round to compare, and auto."""
    batches: Annotated[tuple[int, ...], Option("LIST", MEASURE, flags="--batch", parse=parse_whole)] = (1, 8, 32)
    """Sequences at once; the advice is for the first."""
    temperatures: Annotated[tuple[float, ...], Option("LIST", MEASURE, flags="--temperature", parse=parse_real)] = (
        0.0,
    )
    """0 is greedy; the advice is for the first."""
    out: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write the advice, for --config of `outrider run`, `serve` and `bench`."""
    draft_quantizes: Annotated[Mapping[str, tuple[str | None, ...]], PYTHON_ONLY] = field(default_factory=dict)
    """By proposer: what to compare in place of the engine's `draft_quantize`. None is the weights as stored."""

    def __post_init__(self) -> None:
        for name, values in {"k": self.ks, "batch": self.batches}.items():
            if not values:
                raise OutriderError(f"{name} names nothing to measure; give at least one")
        for k in self.ks:
            check_draft_length(k, least=1, or_auto=True)
        smallest = {"batch": min(self.batches), "repeats": self.repeats, "limit": self.limit}
        for name, value in smallest.items():
            if value is not None and value < 1:
                raise OutriderError(f"{name} is {value}; use at least 1")
        if self.max_tokens < _THIRDS:
            raise OutriderError(
                f"max_tokens is {self.max_tokens}; outputs are divided into thirds, so use at least {_THIRDS}"
            )
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises if it is out of range
        if self.proposers:
            self._check_proposers()

    def _check_proposers(self) -> None:
        from outrider.drafting.propose.registry import check_draft_settings, check_names, comma_list, parse

        for proposer in self.proposers:
            if len(several := comma_list(proposer)) > 1:
                raise OutriderError(
                    f"proposers has a comma between proposers; separate them by semicolons: '{';'.join(several)}'"
                )
            check_names(proposer)
        from outrider.engine.verifiers import find_verifier  # here, because it imports torch

        for proposer in self.proposers:
            find_verifier(self.engine.verifier, proposer)
            if _PLAIN in parse(proposer).names():
                raise OutriderError(
                    f"proposer {proposer!r} drafts no tokens, and plain decoding is always measured as well; leave"
                    f" {_PLAIN} out"
                )
        check_draft_settings(self.engine, *self.proposers)

    @property
    def max_num_seqs(self) -> int:
        """Sequences at once in the largest batch."""
        return max(self.batches)
