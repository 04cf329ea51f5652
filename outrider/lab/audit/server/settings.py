"""The options of `outrider audit --server`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from outrider.errors import OutriderError
from outrider.lab.client.options import SERVER_PANEL, ApiKey, ModelName, Timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server to audit, and how."""

    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Audit this running server of OpenAI's API: is its output that of --target? See"
            " docs/how-to/audit-a-server.md.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    model: ModelName = None
    api_key: ApiKey = ""
    draft: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="The draft model that the server uses. With it, the report can tell more causes apart.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Use chat completions. Default: only if there are no completions."),
    ] = False
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.", rich_help_panel=SERVER_PANEL)] = 8
    tokens: Annotated[
        int, typer.Option(min=2, help="Greedy output tokens per prompt to replay.", rich_help_panel=SERVER_PANEL)
    ] = 64
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Type of the numbers that the server computes with. It sets what counts as rounding. Default: as the"
            " checkpoint is stored.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = "auto"
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Standard deviation of the server's logits from the model's that counts as rounding. Default:"
            " measured between float32 and --dtype.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    tests: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Sampling tests to run: first, sampled, cooler, top-k, top-p, penalties. Default: all.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled requests.", rich_help_panel=SERVER_PANEL)] = 0
    timeout: Timeout = 300.0


NEEDS_SERVER = (
    "tests",
    "model",
    "api_key",
    "draft",
    "chat",
    "concurrency",
    "tokens",
    "dtype",
    "tolerance",
    "seed",
    "timeout",
)
# Options of `outrider audit` that mean nothing for a server.
NOT_FOR_SERVER = ("proposer", "verifier", "tp", "draft_placement", "draft_window", "draft_quantize")


def check_given(server: str | None, given: set[str]) -> None:
    """Refuse options that would have no effect.

    Raises:
        OutriderError: an option needs --server or --draft, or does not go with --server.
    """
    # The key may come from the environment, for other commands.
    useless = NOT_FOR_SERVER if server else [name for name in NEEDS_SERVER if name != "api_key"]
    for name in useless:
        if name in given:
            option = f"--{name.replace('_', '-')}"
            fix = "does not go with --server; leave it out" if server else "needs --server; give it, or leave it out"
            raise OutriderError(f"{option} {fix}")
    if server and "k" in given and "draft" not in given:
        raise OutriderError("--k is the draft length of --draft with --server; give --draft as well, or leave --k out")
