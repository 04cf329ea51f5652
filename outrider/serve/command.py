"""The command `outrider serve`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from signal import SIGTERM, signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from outrider.core.packages import needed_by
from outrider.drafting.propose.leaves import draft_models
from outrider.engine.warm import record_passes
from outrider.llm import LLM
from outrider.models.loader.embedded import model_name
from outrider.runtime.bar import StageBar
from outrider.runtime.progress import shown_on
from outrider.runtime.ranks import Ranks
from outrider.runtime.report.console import count_text
from outrider.serve.api_keys import read_keys
from outrider.serve.listening import base_url, bind, check_tls, listen
from outrider.serve.ranks import Leader
from outrider.serve.settings import Settings

if TYPE_CHECKING:
    import uvicorn

    from outrider.serve.async_llm import AsyncLLM
    from outrider.serve.videos.service import VideoService

_MAX_QUEUED_VIDEOS = 16
_MAX_KEPT_VIDEOS = 64
_log = logging.getLogger("outrider.serve")


def serve(load: Callable[[], LLM], settings: Settings, *, ranks: Ranks | None = None) -> None:
    """Listen on the port, load the models, and serve until a signal arrives. Until they are loaded, the status is 503.

    Args:
        load: loads the models. It is called when the port listens.
        settings: the options of `outrider serve`.
        ranks: the ranks of tensor parallelism. This process is the first; the others call `serve.ranks.follow`.

    Raises:
        OutriderError: a package is missing, or the server cannot listen on the port.
    """
    with needed_by("the server", "serve"):
        import uvicorn

        from outrider.serve.app import make_app
        from outrider.serve.async_llm import AsyncLLM
        from outrider.serve.loading import LoadingServer
        from outrider.serve.monitoring.request_log import configure_logging
        from outrider.serve.monitoring.tracing import make_tracer
        from outrider.serve.server import Server
    _check_files(settings)
    tracer = make_tracer() if settings.otel else None
    configure_logging(settings.log_format)
    name = settings.served_model_name or model_name(settings.engine.target)
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(each)) for each in bind(settings.host, settings.port)]
        listen(sockets, settings.host)
        display = StageBar(Console(stderr=True), _log.info)
        with shown_on(display), LoadingServer(sockets, display, **_http_options(settings)) as loading:
            videos = load_videos(settings)  # first, because these models are small, and a mistake is reported early
            llm = load()
            seconds = record_passes(llm.parts)
            loading.stop()  # ends while the rest is made
            num_seqs = settings.engine.max_num_seqs
            async_llm = AsyncLLM(llm, max_queued_requests=settings.max_queued_requests, max_num_seqs=num_seqs)
            leader = None if ranks is None else _lead(ranks, llm, async_llm)
            gc.collect()
            gc.freeze()  # keep the garbage collector from scanning the loaded models
            app = make_app(async_llm, settings, name=name, videos=videos, tracer=tracer)
            options = _http_options(settings)
            config = uvicorn.Config(app, **options)
            server = Server(config, app.state.end_requests, timeout=settings.shutdown_timeout)
        typer.echo(_cache_summary(llm), err=True)
        if seconds:
            typer.echo(f"compiled the layers and recorded passes as CUDA graphs in {seconds:.1f} s", err=True)
        if videos is not None:
            typer.echo(f"{videos.served.name} makes videos, which are not exact", err=True)
        url = base_url(settings, sockets[0].getsockname()[1])
        typer.echo(f"{name} at {url}, {count_text(num_seqs, 'sequence')} at once", err=True)
        with _clean_exit(server):
            server.run(sockets=sockets)
        if leader is not None:
            leader.stop()
    if not server.started:
        raise typer.Exit(1)


def _lead(ranks: Ranks, llm: LLM, async_llm: AsyncLLM) -> Leader:
    """Return what lets the other ranks repeat what the engine does. If one of them fails, all requests end."""
    leader = llm.engine.followers = Leader(ranks)
    ranks.on_failure = async_llm.abandon
    return leader


def _http_options(settings: Settings) -> dict[str, Any]:
    """Return the options of every HTTP server."""
    return {
        "log_level": "warning",
        "log_config": None,  # keep the logging of `configure_logging`
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }


def _check_files(settings: Settings) -> None:
    """Check the files and folders of the settings, so that a mistake is reported before the models are loaded.

    Raises:
        OutriderError: one of them cannot be used.
    """
    from outrider.serve.weight_routes import weight_root

    check_tls(settings.tls_cert, settings.tls_key)
    if settings.api_keys:
        read_keys(settings.api_keys)
    if settings.weight_updates is not None:
        weight_root(settings.weight_updates)


def load_videos(settings: Settings) -> VideoService | None:
    """Return what makes the videos of `--media`, or None without this option.

    Raises:
        OutriderError: a package is missing, or the models cannot be loaded.
    """
    if settings.media is None:
        return None
    from outrider.serve.videos.models import check_video_packages, load_served_models
    from outrider.serve.videos.service import VideoService

    check_video_packages()
    return VideoService(
        load_served_models(settings.media),
        max_queued=_MAX_QUEUED_VIDEOS if settings.max_queued_videos is None else settings.max_queued_videos,
        max_kept=settings.max_kept_videos or _MAX_KEPT_VIDEOS,
    )


@contextmanager
def _clean_exit(server: uvicorn.Server) -> Iterator[None]:
    """End the process with status 0 after SIGTERM. uvicorn raises the signal again after its shutdown."""

    def handle_sigterm(number: int, _: FrameType | None) -> None:
        if not server.should_exit:  # the signal has arrived before uvicorn installs its handlers
            raise SystemExit(128 + number)

    previous_handler = signal(SIGTERM, handle_sigterm)
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C is handled in the same way
        if not server.should_exit:
            raise
    finally:
        signal(SIGTERM, previous_handler)


def _cache_summary(llm: LLM) -> str:
    """Return the memory of the KV caches, and the share of the draft models, as text."""
    usage = llm.engine.cache_usage()
    context = llm.parts.context
    draft_bytes = sum(model.cache.bytes() for model in draft_models(llm.parts.proposer))
    total_bytes = llm.parts.target.cache.bytes() + draft_bytes
    memory = f"KV cache: {total_bytes / 1e9:.2f} GB, of which {draft_bytes / 1e9:.2f} for drafts"
    if not usage.block_tokens:
        return f"{memory}, so far; {context} tokens per sequence"
    return f"{memory}; {usage.blocks * usage.block_tokens} tokens, at most {context} per sequence"
