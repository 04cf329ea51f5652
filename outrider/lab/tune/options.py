"""Options of `outrider tune` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import MEASURE, MODEL, OUTPUT, Option

_MODEL, _MEASURE, _OUTPUT = "Models", "Measuring", "Output"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What to compare, as text of the command line."""

    proposers: Annotated[str | None, Option("LIST", MODEL)] = None
    """Proposers to compare, separated by semicolons: 'ngram;suffix;draft:DIR'. Default: ngram, suffix and the default
    proposer of the target."""
    k: Annotated[str, Option("LIST", MODEL)] = "2,4,8,auto"
    """Draft tokens per round to compare, and auto."""
    batch: Annotated[str, Option("LIST", MEASURE)] = "1,8,32"
    """Sequences at once; the advice is for the first."""
    temperature: Annotated[str, Option("LIST", MEASURE)] = "0"
    """0 is greedy; the advice is for the first."""
    repeats: Annotated[int, Option(panel=MEASURE)] = 3
    """How often each prompt is measured."""
    out: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write the advice, for --config of `outrider run`, `serve` and `bench`."""
