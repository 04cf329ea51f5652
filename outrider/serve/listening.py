"""Where the server listens: its sockets, its certificate and its base URL."""

import socket
import ssl
from collections.abc import Sequence
from errno import EACCES, EADDRINUSE
from typing import Any

from outrider.errors import OutriderError
from outrider.serve.settings import Settings

_BACKLOG = 2048  # pending connections


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host name, all bound to one port. Port 0: a free port.

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
    """Start to listen on sockets that are bound. Raises OutriderError if another process listens on the port."""
    for each in sockets:
        try:
            each.listen(_BACKLOG)
        except OSError as error:
            raise OutriderError(_listen_error(host, each.getsockname()[1], error)) from None


def _bind_socket(address: tuple[Any, ...], family: int) -> socket.socket:
    """Return a socket bound to an address, with the options of `socket.create_server`."""
    # asyncio sets TCP_NODELAY only on connections of sockets with this protocol number. Without
    # TCP_NODELAY, the first chunk of a stream waits up to 40 ms for the acknowledgement of the
    # headers.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
            f"--tls-cert {certificate} and --tls-key {key} cannot be used ({error}); give a PEM"
            " certificate and its key without a passphrase"
        ) from None


def base_url(settings: Settings, port: int) -> str:
    """Return the base URL of the API."""
    host = settings.host
    scheme = "https" if settings.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host or '0.0.0.0'}:{port}/v1"
