"""What `outrider load` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError

_WHAT, _HOW, _BOUND = "Requests", "Load", "Bounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, each once."""

    url: Annotated[str, typer.Option(help="Where the server's /v1 is.")] = "http://127.0.0.1:8000/v1"
    model: Annotated[
        str | None, typer.Option(help="Default: the first that the server names.", rich_help_panel=_WHAT)
    ] = None
    api_key: Annotated[str, typer.Option(envvar="OUTRIDER_API_KEY", help="Sent with each.", rich_help_panel=_WHAT)] = ""
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines as for bench. Default: an embedded set.", rich_help_panel=_WHAT),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.", rich_help_panel=_WHAT)] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the answers.", rich_help_panel=_WHAT)] = 0.0
    k: Annotated[
        int | None, typer.Option("--k", min=0, help="Guesses a round at most, for Outrider.", rich_help_panel=_WHAT)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length; Outrider and vLLM do.", rich_help_panel=_WHAT)
    ] = False
    user: Annotated[
        str | None,
        typer.Option(help="Who asks; Outrider lets only one user's texts share what is cached.", rich_help_panel=_WHAT),
    ] = None
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Draw each request's length (up to --max-tokens), temperature, top_p, penalty and seed.",
            rich_help_panel=_WHAT,
        ),
    ] = False
    cancel: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of requests that hang up midway.", rich_help_panel=_WHAT),
    ] = 0.0
    requests: Annotated[int, typer.Option(min=1, help="In all.", rich_help_panel=_HOW)] = 64
    rate: Annotated[
        float | None,
        typer.Option(min=0.0, help="Open loop: so many arrive a second, as Poisson has it.", rich_help_panel=_HOW),
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: so many at a time. Default: 1.", rich_help_panel=_HOW)
    ] = None
    seed: Annotated[int, typer.Option(help="Of arrivals, and of what is drawn.", rich_help_panel=_HOW)] = 0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer.", rich_help_panel=_HOW)] = 300.0
    first_within: Annotated[
        float, typer.Option(min=0.0, help="Goodput: seconds to the first token.", rich_help_panel=_BOUND)
    ] = 1.0
    token_within: Annotated[
        float, typer.Option(min=0.0, help="Goodput: seconds a token after it, in the mean.", rich_help_panel=_BOUND)
    ] = 0.1

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise OutriderError("--rate is an open loop and --concurrency a closed one; give one of them")
        if self.rate == 0:
            raise OutriderError("--rate is 0, and nobody would ever ask; use a number above it")
