"""The options of `outrider load`."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import OUTPUT, Option
from outrider.core.params import MAX_DRAFT_LENGTH
from outrider.errors import OutriderError
from outrider.lab.client.settings import ClientSettings

# Titles of the groups of options in `outrider load --help`.
_REQUESTS = "Requests"
_LOAD = "Load"
_GOODPUT = "Goodput"
_COMPARE = "Compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ClientSettings):
    """The options of `outrider load`. They are checked when they are made."""

    base_url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the server, with /v1."""
    against: Annotated[str | None, Option("URL", _COMPARE)] = None
    """A second server, which gets the same requests in turns with the first one."""
    against_model: Annotated[str | None, Option(panel=_COMPARE)] = None
    """Model name at the second server. Default: its first model."""
    report: Annotated[str | None, Option("FILE", OUTPUT)] = None
    """Write the tables and the JSON document as an HTML page, for example report.html."""
    prompts: Annotated[str | None, Option("FILE", _REQUESTS)] = None
    """Prompts as JSON lines, as for bench. Default: an embedded set."""
    max_tokens: Annotated[int, Option(panel=_REQUESTS, min=1)] = 128
    """Most output tokens of a request."""
    temperature: Annotated[float, Option(panel=_REQUESTS, min=0.0)] = 0.0
    """Sampling temperature."""
    k: Annotated[int | None, Option(panel=_REQUESTS, min=0, max=MAX_DRAFT_LENGTH)] = None
    """Most draft tokens per round, for Outrider."""
    ignore_eos: Annotated[bool, Option(panel=_REQUESTS)] = False
    """Continue after end-of-text, for Outrider and vLLM."""
    user: Annotated[str | None, Option(panel=_REQUESTS)] = None
    """User of all requests. Outrider shares cached prefixes only within one user."""
    mixed: Annotated[bool, Option(panel=_REQUESTS)] = False
    """Draw length (at most --max-tokens), temperature, top_p, penalty and seed of each request at random."""
    cancel: Annotated[float, Option(panel=_REQUESTS, min=0.0, max=1.0)] = 0.0
    """Share of requests that the client cancels while they run."""
    num_requests: Annotated[int, Option(panel=_LOAD, min=1)] = 64
    """Number of requests."""
    request_rate: Annotated[float | None, Option(panel=_LOAD, min=0.0)] = None
    """Open loop: mean number of requests per second, with Poisson arrivals."""
    max_concurrency: Annotated[int | None, Option(panel=_LOAD, min=1)] = None
    """Closed loop: number of requests that run at a time. Default: 1."""
    seed: Annotated[int, Option(panel=_LOAD)] = 0
    """Seed of arrival times and of random requests."""
    goodput_ttft: Annotated[float, Option(panel=_GOODPUT, min=0.0)] = 1.0
    """Longest time to first token of a request that counts, in seconds."""
    goodput_tpot: Annotated[float, Option(panel=_GOODPUT, min=0.0)] = 0.1
    """Longest mean time per output token of a request that counts, in seconds."""

    def __post_init__(self) -> None:
        if self.request_rate is not None and self.max_concurrency is not None:
            raise OutriderError(
                "--request-rate makes an open loop and --max-concurrency a closed loop; give one of them"
            )
        if self.against_model is not None and self.against is None:
            raise OutriderError("--against-model needs --against URL; give it, or leave it out")
        if self.request_rate == 0:
            raise OutriderError("--request-rate is 0, so no request would be sent; use a number above 0")
