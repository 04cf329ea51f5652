"""The options of `outrider audit --server`."""

from dataclasses import dataclass, fields
from typing import Annotated

from outrider.core.config import DRAFT_OPTIONS
from outrider.core.option import SERVER, Option
from outrider.errors import OutriderError
from outrider.lab.client.settings import ClientSettings, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(ClientSettings):
    """Which server to audit, and how."""

    server: Annotated[str | None, Option("URL", SERVER)] = None
    """Audit this running server of OpenAI's API: is its output that of --target? See docs/how-to/audit-a-server.md."""
    draft: Annotated[str | None, Option("DIR", SERVER)] = None
    """The draft model that the server uses. With it, the report can tell more causes apart."""
    chat: bool = False
    """Use chat completions. Default: only if there are no completions."""
    concurrency: Annotated[int, Option(panel=SERVER, min=1)] = 8
    """Requests at a time."""
    max_tokens: Annotated[int, Option(panel=SERVER, min=2)] = 64
    """Greedy output tokens per prompt to replay."""
    server_dtype: Annotated[str, Option("NAME", SERVER)] = "auto"
    """Type of the numbers that the server computes with. It sets what counts as rounding. Default: as the checkpoint is
    stored."""
    tolerance: Annotated[float | None, Option(panel=SERVER, min=0.0)] = None
    """Standard deviation of the server's logits from the model's that counts as rounding. Default: measured between
    float32 and --server-dtype."""
    tests: Annotated[str | None, Option("LIST", SERVER)] = None
    """Sampling tests to run: first, sampled, cooler, top-k, top-p, penalties. Default: all."""
    seed: Annotated[int, Option(panel=SERVER, min=0)] = 0
    """Seed of the sampled requests."""


# Options of `outrider audit` that mean nothing for a server.
NOT_FOR_SERVER = ("proposer", "verifier", "tp", "draft_placement", *DRAFT_OPTIONS)


def check_given(server: str | None, given: set[str]) -> None:
    """Refuse options that would have no effect.

    Raises:
        OutriderError: an option needs --server or --draft, or does not go with --server.
    """
    # The key may come from the environment, for other commands.
    needs_server = [field.name for field in fields(ServerOptions) if field.name not in ("server", "api_key")]
    refuse([name for name in (NOT_FOR_SERVER if server else needs_server) if name in given], server)
    if server and "k" in given and "draft" not in given:
        raise OutriderError("--k is the draft length of --draft with --server; give --draft as well, or leave --k out")
