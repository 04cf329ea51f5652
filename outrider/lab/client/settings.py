"""How commands reach a server of OpenAI's API."""

from dataclasses import dataclass
from typing import Annotated

from outrider.core.option import SERVER, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """The settings of a client, besides the URL of its server."""

    model: Annotated[str | None, Option(panel=SERVER)] = None
    """Name of the model. Default: the first one of the server."""
    api_key: Annotated[str, Option(panel=SERVER)] = ""
    """API key for the server."""
    timeout: Annotated[float, Option(panel=SERVER, min=0.1)] = 300.0
    """Seconds until a request fails."""
