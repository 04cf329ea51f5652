"""The options of `outrider serve`."""

from dataclasses import dataclass
from re import fullmatch
from typing import Annotated

from outrider.core.config import ENGINE_OPTIONS, LIMIT_OPTIONS, SERVER_ENGINE, EngineConfig
from outrider.core.option import LIMITS, SERVER, Option, Shown
from outrider.errors import OutriderError

_STREAMING, _VIDEOS = "Streaming", "Videos"  # titles of groups of options
_ENGINE_SHOWN = Shown((*ENGINE_OPTIONS, "speculative_config", "max_model_len", *LIMIT_OPTIONS), config=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `outrider serve`. They are checked when they are made."""

    engine: Annotated[EngineConfig, _ENGINE_SHOWN] = SERVER_ENGINE
    host: Annotated[str, Option(panel=SERVER)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Option(panel=SERVER, min=0, max=65535)] = 8000
    """Port to listen on. 0: a free port."""
    served_model_name: Annotated[str | None, Option("NAME", SERVER)] = None
    """Model name in the API. Default: the name of the target's folder."""
    api_key: Annotated[list[str] | None, Option("KEY", SERVER)] = None
    """API key. If there are any, clients must send one of them. Repeatable. Default: none."""
    api_keys: Annotated[str | None, Option("FILE", SERVER)] = None
    """JSON file of named API keys with optional quotas: a list of objects with name, key and tokens_per_minute."""
    tls_cert: Annotated[str | None, Option("FILE", SERVER)] = None
    """Certificate chain (PEM). Serves HTTPS."""
    tls_key: Annotated[str | None, Option("FILE", SERVER)] = None
    """Private key (PEM) of the certificate."""
    vllm_metrics: Annotated[bool, Option(panel=SERVER)] = False
    """Add the counters of speculation under vLLM's names to /metrics, such as vllm:spec_decode_num_drafts_total."""
    otel: Annotated[bool, Option(panel=SERVER)] = False
    """Send OpenTelemetry traces by OTLP over HTTP. The OTEL_* variables configure it."""
    max_queued_requests: Annotated[int, Option(panel=LIMITS, min=0)] = 256
    """Requests that may wait. The response to further requests is 429."""
    max_n: Annotated[int, Option(panel=LIMITS, min=1)] = 16
    """Most completions of one request, summed over its prompts."""
    max_body_kb: Annotated[int, Option(panel=LIMITS, min=1)] = 1024
    """Largest request body, in kilobytes."""
    request_timeout: Annotated[float, Option(panel=LIMITS, min=0.0)] = 0.0
    """Seconds until a request is canceled. 0: no limit."""
    smooth: Annotated[bool, Option(panel=_STREAMING)] = False
    """Spread the tokens of a round over the duration of a round."""
    allow_origin: Annotated[list[str] | None, Option("ORIGIN", SERVER)] = None
    """Origin that may send requests from a browser, such as https://example.org; *: any. Repeatable. Default: the
    server's own page."""
    strict: Annotated[bool, Option(panel=SERVER)] = False
    """Refuse requests with fields that have no effect, such as service_tier. Default: list these fields in a header of
    the response and in the log."""
    weight_updates: Annotated[str | None, Option("DIR", SERVER)] = None
    """Let all clients pause the server, put it to sleep, and load new weights from folders below DIR. Default: off."""
    media: Annotated[str | None, Option("DIR", _VIDEOS)] = None
    """Video models for /v1/videos: a folder that recipes.video wrote, or @media for the embedded ones. The text model
    is served as well. Default: no videos."""
    max_queued_videos: Annotated[int | None, Option(panel=_VIDEOS, min=0)] = None
    """Videos that may wait. The response to further requests is 429. Default: 16."""
    max_kept_videos: Annotated[int | None, Option(panel=_VIDEOS, min=1)] = None
    """Videos that are kept in memory after they have ended. Default: 64."""
    log_format: Annotated[str, Option("NAME", SERVER)] = "text"
    """Format of the request log: text or json."""
    shutdown_timeout: Annotated[int, Option(panel=LIMITS, min=0)] = 30
    """Seconds that running requests have to finish when the server stops."""

    def __post_init__(self) -> None:
        if self.engine.tp > 1 and self.weight_updates is not None:
            raise OutriderError(
                "--weight-updates loads weights into one process, and not into --tp ranks; leave one out"
            )
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
