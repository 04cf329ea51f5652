"""Options of the commands that measure or audit a server."""

from __future__ import annotations

from typing import Annotated

import typer

SERVER_PANEL = "Server"

ModelName = Annotated[
    str | None,
    typer.Option(help="Name of the model. Default: the first one of the server.", rich_help_panel=SERVER_PANEL),
]
ApiKey = Annotated[str, typer.Option(help="API key of the server.", rich_help_panel=SERVER_PANEL)]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds until a request fails.", rich_help_panel=SERVER_PANEL)]
