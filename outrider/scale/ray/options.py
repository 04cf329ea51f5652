"""The option that `outrider scale` and `outrider train` share."""

from __future__ import annotations

from typing import Any

import typer


def address_option(panel: str) -> Any:
    """Return the option for the address of a Ray cluster, in a panel of the help text."""
    return typer.Option(
        metavar="ADDRESS",
        help="Address of a running Ray cluster; auto: the cluster of this machine. Default: start Ray here.",
        rich_help_panel=panel,
    )
