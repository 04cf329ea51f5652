"""The verb `serve`, as a terminal sees it."""

from __future__ import annotations

from pathlib import Path

import typer

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.serve.settings import Settings


def serve(llm: LLM, settings: Settings, *, target: str | None) -> None:
    """Say where, and answer until a signal comes.

    Raises:
        OutriderError: what the server is made of is not installed.
    """
    try:
        import uvicorn

        from outrider.serve.app import make_app
        from outrider.serve.driver import Driver
        from outrider.serve.journal import log_as
    except ImportError as error:
        raise OutriderError(f'the server needs {error.name}; run pip install "outrider[serve]"') from error
    log_as(settings.log_format)
    name = settings.name or (Path(target).expanduser().resolve().name if target else "mini")
    driver = Driver(llm, queue=settings.queue, rows=settings.rows)
    typer.echo(f"{name} at http://{settings.host}:{settings.port}/v1, {settings.rows} rows at once", err=True)
    uvicorn.run(
        make_app(driver, settings, name=name),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        log_config=None,  # its lines are to look like ours
        timeout_graceful_shutdown=settings.drain,
    )
