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

    base_url: Annotated[str, typer.Option(help="Base URL of the server, with /v1.")] = "http://127.0.0.1:8000/v1"
    model: Annotated[
        str | None, typer.Option(help="Default: the first model of the server.", rich_help_panel=_WHAT)
    ] = None
    api_key: Annotated[
        str, typer.Option(envvar="OUTRIDER_API_KEY", help="Sent with each request.", rich_help_panel=_WHAT)
    ] = ""
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON lines as for bench. Default: an embedded set.", rich_help_panel=_WHAT),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens of a request.", rich_help_panel=_WHAT)] = (
        128
    )
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.", rich_help_panel=_WHAT)] = 0.0
    k: Annotated[
        int | None, typer.Option("--k", min=0, help="Most draft tokens per round, for Outrider.", rich_help_panel=_WHAT)
    ] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Outputs of full length; for Outrider and vLLM.", rich_help_panel=_WHAT)
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
    num_requests: Annotated[int, typer.Option(min=1, help="Number of requests.", rich_help_panel=_HOW)] = 64
    request_rate: Annotated[
        float | None,
        typer.Option(min=0.0, help="Open loop: so many arrive a second, as Poisson has it.", rich_help_panel=_HOW),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: this many requests at a time. Default: 1.", rich_help_panel=_HOW),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of arrival times and random requests.", rich_help_panel=_HOW)] = 0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.", rich_help_panel=_HOW)] = 300.0
    goodput_ttft: Annotated[
        float, typer.Option(min=0.0, help="Goodput: most seconds to the first token.", rich_help_panel=_BOUND)
    ] = 1.0
    goodput_tpot: Annotated[
        float,
        typer.Option(min=0.0, help="Goodput: most seconds per output token, in the mean.", rich_help_panel=_BOUND),
    ] = 0.1

    def __post_init__(self) -> None:
        if self.request_rate is not None and self.max_concurrency is not None:
            raise OutriderError(
                "--request-rate makes an open loop and --max-concurrency a closed loop; give one of them"
            )
        if self.request_rate == 0:
            raise OutriderError("--request-rate is 0, so no request would be sent; use a number above 0")
