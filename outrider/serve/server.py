"""uvicorn's server, which ends open requests with an answer when it stops."""

import asyncio
import socket
from collections.abc import Callable

import uvicorn

_ANSWER_SECONDS = 2  # for the answers of requests that are ended


class Server(uvicorn.Server):
    """Serves until a signal arrives. Then open requests may finish for a time, and the others are ended."""

    def __init__(self, config: uvicorn.Config, end_requests: Callable[[], None], *, timeout: int) -> None:
        """Prepare to serve.

        Args:
            config: the application and the options of uvicorn. Its `timeout_graceful_shutdown` is set here.
            end_requests: makes the application answer all open requests at once. It runs in the event loop.
            timeout: seconds that open requests have to finish.
        """
        config.timeout_graceful_shutdown = timeout + _ANSWER_SECONDS
        super().__init__(config)
        self._end_requests = end_requests
        self._timeout = timeout

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop. A second Ctrl-C ends open requests at once."""
        end = asyncio.get_running_loop().call_later(self._timeout, self._end_requests)
        await super().shutdown(sockets)
        end.cancel()
        if self.force_exit:  # uvicorn has left out the rest
            self._end_requests()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks, timeout=_ANSWER_SECONDS)
            await self.lifespan.shutdown()
