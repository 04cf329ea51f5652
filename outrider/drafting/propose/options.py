"""Options of the command line for draft models."""

from __future__ import annotations

from typing import Annotated

import typer

DraftWindow = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="The latest tokens that a draft model or draft head reads. Default: as many as it was made for.",
        rich_help_panel="Models",
    ),
]
DraftPlacement = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="With --tp: replicated (each rank runs the whole draft model), sharded (it is split, too), or auto (the"
        " faster one, by measured costs).",
        rich_help_panel="Models",
    ),
]
DraftQuantize = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="int8 or int4 weights for a draft model or draft head, LM head included, on the native kernels of a CPU."
        " The output does not change. Default: the weights as stored.",
        rich_help_panel="Models",
    ),
]
