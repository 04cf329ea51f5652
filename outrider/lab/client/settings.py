"""How commands reach a server of OpenAI's API."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import SERVER, Option
from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The settings of a client, besides the URL of its server."""

    model: Annotated[str | None, Option(panel=SERVER)] = None
    """Name of the model. Default: the first one of the server."""
    api_key: Annotated[str, Option(panel=SERVER)] = ""
    """API key for the server."""
    timeout: Annotated[float, Option(panel=SERVER, min=0.1)] = 300.0
    """Seconds until a request fails."""


def refuse(names: Iterable[str], server: str | None) -> None:
    """Raise OutriderError for the first of these options. They have no effect with --server, or without it."""
    fix = "does not go with --server; leave it out" if server else "needs --server; give it, or leave it out"
    for name in names:
        raise OutriderError(f"--{name.replace('_', '-')} {fix}")
