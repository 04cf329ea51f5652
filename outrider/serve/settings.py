"""What `outrider serve` is asked for, besides models."""

from __future__ import annotations

from dataclasses import dataclass
from re import fullmatch
from typing import Annotated

import typer

from outrider.errors import OutriderError

_WHERE, _LIMITS, _STREAMS = "Where", "Limits", "Streams"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options, each once."""

    host: Annotated[str, typer.Option(help="Address to listen at.", rich_help_panel=_WHERE)] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_WHERE)] = 8000
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What the model is called. Default: its folder's name.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="OUTRIDER_API_KEY",
            help="A key that clients must send. Repeatable. Default: none.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_LIMITS)] = 16
    cache_gb: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            help="For the caches of target and drafts together, on the native kernels. Default: a whole context for"
            " every row, as far as memory is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV cache of equal prompt prefixes of one user.", rich_help_panel=_LIMITS)
    ] = True
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt tokens that one round may process.", rich_help_panel=_LIMITS)
    ] = 512
    max_round_ms: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Milliseconds that a round may take while other sequences decode. Longer prompts are split over"
            " rounds. 0: no limit.",
            rich_help_panel=_LIMITS,
        ),
    ] = 60.0
    queue: Annotated[
        int, typer.Option(min=0, help="Completions that may wait; one more is turned away.", rich_help_panel=_LIMITS)
    ] = 256
    most_n: Annotated[
        int,
        typer.Option(
            "--max-n",
            min=1,
            help="Completions that one request may ask for, over all of its prompts.",
            rich_help_panel=_LIMITS,
        ),
    ] = 16
    body_kb: Annotated[int, typer.Option(min=1, help="Kilobytes of a request at most.", rich_help_panel=_LIMITS)] = 1024
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a request may take; 0 = any.", rich_help_panel=_LIMITS)
    ] = 0.0
    smooth: Annotated[
        bool,
        typer.Option("--smooth", help="Spread each round's tokens over the time of a round.", rich_help_panel=_STREAMS),
    ] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages of this origin may ask from a browser, as https://example.org; * is any. Repeatable. Default:"
            " the server's own page alone.",
            rich_help_panel=_WHERE,
        ),
    ] = None
    log_format: Annotated[
        str, typer.Option(metavar="NAME", help="text or json: a line for each request.", rich_help_panel=_WHERE)
    ] = "text"
    drain: Annotated[
        int,
        typer.Option(min=0, help="Seconds that requests have to end when the server stops.", rich_help_panel=_LIMITS),
    ] = 30

    def __post_init__(self) -> None:
        if any(not key.strip() for key in self.api_key or ()):
            raise OutriderError("an API key is empty; give one of at least one character, or none")
        if self.log_format not in ("text", "json"):
            raise OutriderError(f"--log-format is {self.log_format!r}; use text or json")
        for origin in self.allow_origin or ():
            if origin != "*" and not fullmatch(r"https?://[^/\s]+", origin):
                raise OutriderError(f"--allow-origin is {origin!r}; write it as https://example.org, or *")
