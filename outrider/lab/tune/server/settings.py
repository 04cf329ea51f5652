"""The options of `outrider tune --server`."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import SERVER, Option
from outrider.errors import OutriderError
from outrider.lab.client.settings import ClientSettings, refuse

# Options of `outrider tune` that mean something for a server. All others are refused.
_FOR_SERVER = frozenset(
    {"server", "baseline", "model", "api_key", "num_requests", "timeout", "batch", "prompts", "limit", "max_tokens"}
    | {"temperature", "seed", "json", "out"}
)
_NEEDS_SERVER = ("baseline", "model", "num_requests", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ClientSettings):
    """Which server to measure."""

    server: Annotated[str | None, Option("URL", SERVER)] = None
    """Measure this running server of OpenAI's API in place of a model: is speculation on, what does it gain at each
    --batch, and what to set. See docs/how-to/tune-a-server.md."""
    baseline: Annotated[str | None, Option("URL", SERVER)] = None
    """A second server with the same model and no speculation, for servers that cannot switch it off for a request
    (vLLM, SGLang)."""
    num_requests: Annotated[int | None, Option(panel=SERVER, min=1)] = None
    """Requests at each load. Default: 4 times the requests at a time."""


def check_given(server: str | None, given: set[str]) -> None:
    """Refuse options that would have no effect.

    Raises:
        OutriderError: an option needs --server, or does not go with it.
    """
    if server and "out" in given:
        raise OutriderError("--out writes settings of this program, and --server measures another one; leave it out")
    refuse(sorted(given - _FOR_SERVER if server else given & set(_NEEDS_SERVER)), server)
