"""The options of `outrider serve`, except those of the models."""

from __future__ import annotations

from dataclasses import dataclass
from re import fullmatch
from typing import Annotated

import typer

from outrider.errors import OutriderError

# Titles of the groups of options in `outrider serve --help`.
_SERVER = "Server"
_LIMITS = "Limits"
_STREAMING = "Streaming"
_VIDEOS = "Videos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider serve`. They are checked when they are made."""

    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=_SERVER)] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on. 0: a free port.", rich_help_panel=_SERVER)
    ] = 8000
    served_model_name: Annotated[
        str | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="Model name in the API. Default: the name of the target's folder.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="API key. If there are any, clients must send one of them. Repeatable. Default: none.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_keys: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON file of named API keys with optional quotas: a list of objects with name, key and"
            " tokens_per_minute.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Certificate chain (PEM). Serves HTTPS.", rich_help_panel=_SERVER),
    ] = None
    tls_key: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Private key (PEM) of the certificate.", rich_help_panel=_SERVER),
    ] = None
    otel: Annotated[
        bool,
        typer.Option(
            "--otel",
            help="Send OpenTelemetry traces by OTLP over HTTP. The OTEL_* variables configure it.",
            rich_help_panel=_SERVER,
        ),
    ] = False
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at once.", rich_help_panel=_LIMITS)] = 16
    cache_gb: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            help="Memory of the KV caches of target and draft models, with the native kernels. Default: a full context"
            " for every sequence, as far as memory is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    prefix_caching: Annotated[
        bool, typer.Option(help="Reuse the KV cache of common prompt prefixes of one user.", rich_help_panel=_LIMITS)
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
    max_queued_requests: Annotated[
        int,
        typer.Option(
            min=0, help="Requests that may wait. The response to further requests is 429.", rich_help_panel=_LIMITS
        ),
    ] = 256
    max_n: Annotated[
        int,
        typer.Option(
            "--max-n",
            min=1,
            help="Most completions of one request, summed over its prompts.",
            rich_help_panel=_LIMITS,
        ),
    ] = 16
    max_body_kb: Annotated[
        int, typer.Option(min=1, help="Largest request body, in kilobytes.", rich_help_panel=_LIMITS)
    ] = 1024
    request_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds until a request is canceled. 0: no limit.", rich_help_panel=_LIMITS)
    ] = 0.0
    smooth: Annotated[
        bool,
        typer.Option(
            "--smooth", help="Spread the tokens of a round over the duration of a round.", rich_help_panel=_STREAMING
        ),
    ] = False
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Origin that may send requests from a browser, such as https://example.org; *: any. Repeatable."
            " Default: the server's own page.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse requests with fields that have no effect, such as service_tier. Default: list these fields in"
            " a header of the response and in the log.",
            rich_help_panel=_SERVER,
        ),
    ] = False
    weight_updates: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Let all clients pause the server, put it to sleep, and load new weights from folders below DIR."
            " Default: off.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    media: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Video models for /v1/videos: a folder that recipes.video wrote, or @media for the included ones. The"
            " text model is served as well. Default: no videos.",
            rich_help_panel=_VIDEOS,
        ),
    ] = None
    max_queued_videos: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Videos that may wait. The response to further requests is 429. Default: 16.",
            rich_help_panel=_VIDEOS,
        ),
    ] = None
    max_kept_videos: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Videos that are kept in memory after they have ended. Default: 64.",
            rich_help_panel=_VIDEOS,
        ),
    ] = None
    log_format: Annotated[
        str, typer.Option(metavar="NAME", help="Format of the request log: text or json.", rich_help_panel=_SERVER)
    ] = "text"
    shutdown_timeout: Annotated[
        int,
        typer.Option(
            min=0, help="Seconds that running requests have to finish when the server stops.", rich_help_panel=_LIMITS
        ),
    ] = 30

    def __post_init__(self) -> None:
        if self.media is None and (self.max_queued_videos is not None or self.max_kept_videos is not None):
            option = "--max-kept-videos" if self.max_queued_videos is None else "--max-queued-videos"
            raise OutriderError(f"{option} belongs to --media; give --media, or leave {option} out")
        if any(not key.strip() for key in self.api_key or ()):
            raise OutriderError("an API key is empty; give a key of at least one character, or remove --api-key")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OutriderError("HTTPS needs a certificate and its key; give both --tls-cert and --tls-key")
        if self.log_format not in ("text", "json"):
            raise OutriderError(f"--log-format is {self.log_format!r}; use text or json")
        for origin in self.allow_origin or ():
            if origin != "*" and not fullmatch(r"https?://[^/\s]+", origin):
                raise OutriderError(f"--allow-origin is {origin!r}; write it as https://example.org, or *")
