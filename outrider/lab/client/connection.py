"""Sends HTTP requests over kept connections. If an idle connection was closed, its next request is sent again."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from aiohttp import (
    ClientOSError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ServerDisconnectedError,
    TCPConnector,
    TraceConfig,
    TraceConnectionReuseconnParams,
)

# A server may close an idle connection while the client sends the next request on it.
_CLOSED = (ConnectionError, ClientOSError, ServerDisconnectedError)


class Connection:
    """The kept connections to one server."""

    def __init__(self, session: ClientSession) -> None:
        self.retries = 0  # times that a request was sent again
        self._session = session

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        body: Mapping[str, Any] | None = None,
        *,
        on_retry: Callable[[], None] = lambda: None,
    ) -> AsyncIterator[ClientResponse]:
        """Send a request and yield its response once the headers have arrived.

        The request is sent again if the server has closed a reused connection before it answered anything. On a new
        connection, or after the headers, a loss is an error: the server may have failed at this request. Every retry
        uses up a kept connection, so retries end.

        Args:
            method: the HTTP method.
            url: the whole URL.
            body: the JSON document to send; None: no body.
            on_retry: called before the request is sent again.

        Raises:
            aiohttp.ClientError: the server cannot be reached, or the connection was lost.
            TimeoutError: the response took longer than the timeout of the session.
        """
        while True:
            attempt = SimpleNamespace(reused=False)
            try:
                response = await self._session.request(method, url, json=body, trace_request_ctx=attempt)
            except _CLOSED:
                if not attempt.reused:
                    raise
                self.retries += 1
                on_retry()
                continue
            async with response:
                yield response
            return


@asynccontextmanager
async def open_connection(headers: Mapping[str, str], timeout: float) -> AsyncIterator[Connection]:
    """Yield a client that opens as many connections as it needs.

    Args:
        headers: of every request.
        timeout: seconds until a request fails.
    """
    trace = TraceConfig()
    trace.on_connection_reuseconn.append(_mark_reused)
    async with ClientSession(
        headers=headers,
        timeout=ClientTimeout(total=timeout),
        connector=TCPConnector(limit=0),
        trace_configs=[trace],
        trust_env=True,
    ) as session:
        yield Connection(session)


async def _mark_reused(
    session: ClientSession, context: SimpleNamespace, params: TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx.reused = True
