"""The options of `outrider load`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.core.params import MAX_DRAFT_LENGTH
from outrider.errors import OutriderError

# Titles of the groups of options in `outrider load --help`.
_REQUESTS = "Requests"
_LOAD = "Load"
_GOODPUT = "Goodput"
_COMPARE = "Compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider load`. They are checked when they are made."""

    base_url: Annotated[str, typer.Option(help="Base URL of the server, with /v1.")] = "http://127.0.0.1:8000/v1"
    model: Annotated[
        str | None, typer.Option(help="Model name. Default: the first model of the server.", rich_help_panel=_REQUESTS)
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A second server, which gets the same requests in turns with the first one.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    against_model: Annotated[
        str | None,
        typer.Option(help="Model name at the second server. Default: its first model.", rich_help_panel=_COMPARE),
    ] = None
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="With --against: write one page that compares both servers, .html or .md.",
            rich_help_panel=_COMPARE,
        ),
    ] = None
    api_key: Annotated[str, typer.Option(help="API key for the server.", rich_help_panel=_REQUESTS)] = ""
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prompts as JSON lines, as for bench. Default: an embedded set.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Most output tokens of a request.", rich_help_panel=_REQUESTS)
    ] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.", rich_help_panel=_REQUESTS)] = 0.0
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            min=0,
            max=MAX_DRAFT_LENGTH,
            help="Most draft tokens per round, for Outrider.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Continue after end-of-text, for Outrider and vLLM.", rich_help_panel=_REQUESTS
        ),
    ] = False
    user: Annotated[
        str | None,
        typer.Option(
            help="User of all requests. Outrider shares cached prefixes only within one user.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Draw length (at most --max-tokens), temperature, top_p, penalty and seed of each request at random.",
            rich_help_panel=_REQUESTS,
        ),
    ] = False
    cancel: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of requests that the client cancels while they run.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 0.0
    num_requests: Annotated[int, typer.Option(min=1, help="Number of requests.", rich_help_panel=_LOAD)] = 64
    request_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Open loop: mean number of requests per second, with Poisson arrivals.", rich_help_panel=_LOAD
        ),
    ] = None
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Closed loop: number of requests that run at a time. Default: 1.", rich_help_panel=_LOAD
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of arrival times and of random requests.", rich_help_panel=_LOAD)] = 0
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a request fails.", rich_help_panel=_LOAD)] = (
        300.0
    )
    goodput_ttft: Annotated[
        float,
        typer.Option(
            min=0.0, help="Longest time to first token of a request that counts, in seconds.", rich_help_panel=_GOODPUT
        ),
    ] = 1.0
    goodput_tpot: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Longest mean time per output token of a request that counts, in seconds.",
            rich_help_panel=_GOODPUT,
        ),
    ] = 0.1

    def __post_init__(self) -> None:
        if self.request_rate is not None and self.max_concurrency is not None:
            raise OutriderError(
                "--request-rate makes an open loop and --max-concurrency a closed loop; give one of them"
            )
        for name in ("against_model", "report"):
            if getattr(self, name) is not None and self.against is None:
                raise OutriderError(f"--{name.replace('_', '-')} needs --against URL; give it, or leave it out")
        if self.request_rate == 0:
            raise OutriderError("--request-rate is 0, so no request would be sent; use a number above 0")
