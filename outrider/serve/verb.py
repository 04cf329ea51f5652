"""The verb `serve`, as a terminal sees it."""

from __future__ import annotations

import gc

import typer

from outrider.embedded import model_folder
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.proposers import draft_models
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
    name = settings.name or model_folder(target).resolve().name
    typer.echo(_memory(llm), err=True)
    driver = Driver(llm, queue=settings.queue, rows=settings.rows)
    gc.collect()
    gc.freeze()  # what has been loaded stays, and need not be looked through while others wait
    typer.echo(f"{name} at http://{settings.host}:{settings.port}/v1, {settings.rows} rows at once", err=True)
    uvicorn.run(
        make_app(driver, settings, name=name),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        log_config=None,  # its lines are to look like ours
        timeout_graceful_shutdown=settings.drain,
    )


def _memory(llm: LLM) -> str:
    """What the caches take, and which part of it is the drafts'."""
    use, target = llm.engine.cache_use(), llm.house.target
    drafts = sum(model.cache.bytes() for model in draft_models(llm.house.proposer))
    whole = f"{(target.cache.bytes() + drafts) / 1e9:.2f} GB of caches, {drafts / 1e9:.2f} of them the draft's"
    if not use.block_tokens:
        return f"{whole}, so far: each row has room for {llm.house.context} tokens"
    return f"{whole}: room for {use.blocks * use.block_tokens} tokens, {llm.house.context} of one row at most"
