"""The command `outrider serve`."""

from __future__ import annotations

import gc
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from errno import EACCES, EADDRINUSE
from pathlib import Path
from signal import SIGTERM, signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import model_folder
from outrider.loader.gguf import is_gguf
from outrider.parallel.ranks import Ranks
from outrider.propose.leaves import draft_models
from outrider.report.console import count_text
from outrider.serve.api_keys import read_keys
from outrider.serve.ranks import Leader
from outrider.serve.settings import Settings

if TYPE_CHECKING:
    import uvicorn

    from outrider.serve.videos.service import VideoService

_MAX_QUEUED_VIDEOS = 16
_MAX_KEPT_VIDEOS = 64
_BACKLOG = 2048  # pending connections


def serve(load: Callable[[], LLM], settings: Settings, *, target: str | None, ranks: Ranks | None = None) -> None:
    """Bind the port, load the models, and serve until a signal arrives.

    Args:
        load: loads the models. It is called after the port is bound.
        settings: the options of `outrider serve`.
        target: folder of the target, whose name is the model name in the API if the settings have none.
        ranks: the ranks of tensor parallelism, of which this is the first; the others call `serve.ranks.follow`.

    Raises:
        OutriderError: a package is missing, or the server cannot listen on the port.
    """
    try:
        import uvicorn

        from outrider.serve.app import make_app
        from outrider.serve.async_llm import AsyncLLM
        from outrider.serve.monitoring.request_log import configure_logging
        from outrider.serve.monitoring.tracing import make_tracer
    except ImportError as error:
        raise OutriderError(f'the server needs {error.name}; run pip install "outrider[serve]"') from error
    _check_files(settings)
    tracer = make_tracer() if settings.otel else None
    configure_logging(settings.log_format)
    name = settings.served_model_name or model_name(model_folder(target).resolve())
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(each)) for each in bind(settings.host, settings.port)]
        videos = load_videos(settings)  # first, because these models are small, and a mistake is reported early
        llm = load()
        typer.echo(_cache_summary(llm), err=True)
        async_llm = AsyncLLM(llm, max_queued_requests=settings.max_queued_requests, max_num_seqs=settings.max_num_seqs)
        leader = None
        if ranks is not None:
            leader = llm.engine.followers = Leader(ranks)
            ranks.on_failure = async_llm.abandon
        gc.collect()
        gc.freeze()  # keep the garbage collector from scanning the loaded models
        config = uvicorn.Config(
            make_app(async_llm, settings, name=name, videos=videos, tracer=tracer),
            log_level="warning",
            log_config=None,  # keep the logging that is configured above
            timeout_graceful_shutdown=settings.shutdown_timeout,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
        )
        server = uvicorn.Server(config)
        listen(sockets, settings.host)
        if videos is not None:
            typer.echo(f"{videos.served.name} makes videos, which are not exact", err=True)
        typer.echo(
            f"{name} at {base_url(settings, sockets[0].getsockname()[1])},"
            f" {count_text(settings.max_num_seqs, 'sequence')} at once",
            err=True,
        )
        with _clean_exit(server):
            server.run(sockets=sockets)
        if leader is not None:
            leader.stop()
    if not server.started:
        raise typer.Exit(1)


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


def model_name(model: Path) -> str:
    """Return the name of a model's folder, or that of its GGUF file without the suffix."""
    return model.stem if is_gguf(model) else model.name


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host name, all bound to one port. Port 0: a free port.

    The sockets do not listen yet, so connections are refused while the models are loaded.

    Raises:
        OutriderError: the host is not an address of this machine, or the port is in use.
    """
    sockets: list[socket.socket] = []
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
            # All sockets use the port of the first one, which the system has chosen if `port` is 0.
            common_port = sockets[0].getsockname()[1] if sockets else port
            sockets.append(_bind_socket((address[0], common_port, *address[2:]), family))
    except (OSError, UnicodeError) as error:
        if sockets and not _is_in_use(error):  # for example an IPv6 address on a machine without IPv6
            return sockets
        for each in sockets:
            each.close()
        raise OutriderError(_listen_error(host, port, error)) from None
    return sockets


def listen(sockets: Sequence[socket.socket], host: str) -> None:
    """Start to listen on sockets that are bound.

    Raises:
        OutriderError: another process listens on the port.
    """
    for each in sockets:
        try:
            each.listen(_BACKLOG)
        except OSError as error:
            raise OutriderError(_listen_error(host, each.getsockname()[1], error)) from None


def _bind_socket(address: tuple[Any, ...], family: int) -> socket.socket:
    """Return a socket bound to an address, with the options of `socket.create_server`."""
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _is_in_use(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == EADDRINUSE


def _listen_error(host: str, port: int, error: Exception) -> str:
    """Return the message for an address on which the server cannot listen."""
    address = f"port {port} of {host or 'all addresses'}"
    if _is_in_use(error):
        return f"{address} is in use; give another --port (0: a free port), or stop the process that listens there"
    if isinstance(error, OSError) and error.errno == EACCES:
        return f"{address} needs more permissions; give a --port of at least 1024 (0: a free port)"
    reason = error.strerror if isinstance(error, OSError) else "it is not a valid host name"
    return f"--host {host!r} is not an address of this machine ({reason}); use 127.0.0.1, or 0.0.0.0 for all addresses"


def check_tls(certificate: str | None, key: str | None) -> None:
    """Raise OutriderError if the certificate or its key cannot be used."""
    if certificate is None or key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise OutriderError(
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({error}); give a PEM certificate and its"
            " key without a passphrase"
        ) from None


def base_url(settings: Settings, port: int) -> str:
    """Return the base URL of the API."""
    host = settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host or '0.0.0.0'}:{port}/v1"


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
