"""The command `outrider serve`."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from errno import EACCES, EADDRINUSE
from signal import SIGTERM, signal
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import model_folder
from outrider.propose.registry import draft_models
from outrider.serve.settings import Settings

if TYPE_CHECKING:
    import uvicorn

_BACKLOG = 2048  # pending connections


def serve(load: Callable[[], LLM], settings: Settings, *, target: str | None) -> None:
    """Bind the port, load the models, and serve until a signal arrives.

    Raises:
        OutriderError: a package is missing, or the server cannot listen on the port.
    """
    try:
        import uvicorn

        from outrider.serve.app import make_app
        from outrider.serve.async_llm import AsyncLLM
        from outrider.serve.monitoring.request_log import log_as
    except ImportError as error:
        raise OutriderError(f'the server needs {error.name}; run pip install "outrider[serve]"') from error
    log_as(settings.log_format)
    name = settings.served_model_name or model_folder(target).resolve().name
    with ExitStack() as held:
        taken = [held.enter_context(closing(each)) for each in bind(settings.host, settings.port)]
        llm = load()
        typer.echo(_memory(llm), err=True)
        driver = AsyncLLM(llm, max_queued_requests=settings.max_queued_requests, max_num_seqs=settings.max_num_seqs)
        gc.collect()
        gc.freeze()  # keep the garbage collector from scanning the loaded models
        config = uvicorn.Config(
            make_app(driver, settings, name=name),
            log_level="warning",
            log_config=None,  # use the same log format
            timeout_graceful_shutdown=settings.shutdown_timeout,
        )
        server = uvicorn.Server(config)
        listen(taken, settings.host)
        typer.echo(f"{name} at {_url(settings.host, taken[0])}, {settings.max_num_seqs} sequences at once", err=True)
        with _ends_well(server):
            server.run(sockets=taken)
    if not server.started:
        raise typer.Exit(1)


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind a socket to each address of a host name, at one port. Port 0: a free port.

    The sockets do not listen yet, so connections are refused while the models are loaded.

    Raises:
        OutriderError: the host is not an address of this machine, or the port is in use.
    """
    found: list[socket.socket] = []
    try:
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((place[0], place[4]) for place in places):
            free = found[0].getsockname()[1] if found else port
            found.append(_bound((address[0], free, *address[2:]), family))
    except (OSError, UnicodeError) as error:
        if found and not _taken(error):  # for example IPv6 on a machine without it
            return found
        for each in found:
            each.close()
        raise OutriderError(_unheard(host, port, error)) from None
    return found


def listen(taken: Sequence[socket.socket], host: str) -> None:
    """Start to listen.

    Raises:
        OutriderError: another process listens on the port.
    """
    for each in taken:
        try:
            each.listen(_BACKLOG)
        except OSError as error:
            raise OutriderError(_unheard(host, each.getsockname()[1], error)) from None


def _bound(address: tuple[Any, ...], family: int) -> socket.socket:
    """Make a socket with the options of `socket.create_server`."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def _taken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == EADDRINUSE


def _unheard(host: str, port: int, error: Exception) -> str:
    where = f"port {port} of {host or 'all addresses'}"
    if _taken(error):
        return f"{where} is in use; give another --port (0 takes a free one), or end what listens there"
    if isinstance(error, OSError) and error.errno == EACCES:
        return f"{where} is not for every user; give a --port of at least 1024 (0 takes a free one)"
    reason = error.strerror if isinstance(error, OSError) else "it is no name"
    return f"--host {host!r} is no address of this machine ({reason}); use 127.0.0.1, or 0.0.0.0 for all that it has"


def _url(host: str, listening: socket.socket) -> str:
    port = listening.getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host or '0.0.0.0'}:{port}/v1"


@contextmanager
def _ends_well(server: uvicorn.Server) -> Iterator[None]:
    """End the process with status 0 after SIGTERM. uvicorn raises the signal again after its shutdown."""

    def take(number: int, _: FrameType | None) -> None:
        if not server.should_exit:  # before uvicorn installs its handlers
            raise SystemExit(128 + number)

    before = signal(SIGTERM, take)
    try:
        yield
    except KeyboardInterrupt:  # the same for Ctrl-C
        if not server.should_exit:
            raise
    finally:
        signal(SIGTERM, before)


def _memory(llm: LLM) -> str:
    """Return the memory of the KV caches, and the part of the draft models, as text."""
    use, target = llm.engine.cache_usage(), llm.parts.target
    drafts = sum(model.cache.bytes() for model in draft_models(llm.parts.proposer))
    whole = f"KV cache: {(target.cache.bytes() + drafts) / 1e9:.2f} GB, of which {drafts / 1e9:.2f} for drafts"
    if not use.block_tokens:
        return f"{whole}, so far; {llm.parts.context} tokens per sequence"
    return f"{whole}; {use.blocks * use.block_tokens} tokens, at most {llm.parts.context} per sequence"
