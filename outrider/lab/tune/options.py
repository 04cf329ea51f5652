"""Options of `outrider tune` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

_MODEL, _MEASURE, _OUTPUT = "Models", "Measuring", "Output"

Proposers = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Proposers to compare, separated by semicolons: 'ngram;suffix;draft:DIR'. Default: ngram, suffix and the"
        " default proposer of the target.",
        rich_help_panel=_MODEL,
    ),
]
DraftLengths = Annotated[
    str,
    typer.Option("--k", metavar="LIST", help="Draft tokens per round to compare, and auto.", rich_help_panel=_MODEL),
]
Batches = Annotated[
    str,
    typer.Option(
        "--batch", metavar="LIST", help="Sequences at once; the advice is for the first.", rich_help_panel=_MEASURE
    ),
]
Temperatures = Annotated[
    str,
    typer.Option(
        "--temperature", metavar="LIST", help="0 is greedy; the advice is for the first.", rich_help_panel=_MEASURE
    ),
]
Repeats = Annotated[int, typer.Option(help="How often each prompt is measured.", rich_help_panel=_MEASURE)]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Write the advice, for --config of `outrider run`, `serve` and `bench`.",
        rich_help_panel=_OUTPUT,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What to compare, as text of the command line."""

    proposers: Proposers = None
    k: DraftLengths = "2,4,8,auto"
    batch: Batches = "1,8,32"
    temperature: Temperatures = "0"
    repeats: Repeats = 3
    out: Out = None
