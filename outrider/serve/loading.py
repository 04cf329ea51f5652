"""What the server answers until its models are loaded: its pages, its progress, and 503 to every other request."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from threading import Thread
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.runtime.bar import StageBar
from outrider.serve.monitoring.request_log import RequestLog
from outrider.serve.openai.responses import error_response
from outrider.serve.pages import PAGE_PATHS, page_file

# A connection ends with its response, so that the next request of a client reaches the server that
# has the models.
_HEADERS = {"Retry-After": "2", "Connection": "close"}


class LoadingServer:
    """Serves on the sockets of the server from another thread, from `with` to `stop`."""

    def __init__(self, sockets: Sequence[socket.socket], display: StageBar, **options: Any) -> None:
        """Serve on copies of sockets that listen.

        Args:
            sockets: the sockets. Connections that come after `stop` wait in them.
            display: what shows the stages of the load.
            options: of `uvicorn.Config`, such as the certificate.
        """
        self._display = display
        self._server = uvicorn.Server(uvicorn.Config(RequestLog(self._answer), lifespan="off", **options))
        copies = [each.dup() for each in sockets]
        self._thread = Thread(target=self._server.run, kwargs={"sockets": copies}, name="loading", daemon=True)

    def __enter__(self) -> LoadingServer:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Accept no more connections. It takes up to 0.2 seconds, and `__exit__` waits for it."""
        self._server.should_exit = True

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PAGE_PATHS:  # the page shows how far the load is
            await page_file(scope["path"], _HEADERS)(scope, receive, send)
            return
        document = self.state()
        if scope["path"] != "/health":
            message = f"the server is {document['stage']}; send the request again later"
            document = error_response(message, kind="server_error")
        await JSONResponse(document, 503, _HEADERS)(scope, receive, send)

    def state(self) -> dict[str, Any]:
        """Return what /health reports: the stage, and its bytes if they are counted."""
        stages = tuple(self._display.stages)
        counted = stages[-1] if stages and stages[-1].counts_bytes else None
        return {
            "status": "loading",
            "stage": stages[-1].title if stages else "starting",
            "done_bytes": counted and int(counted.done),
            "total_bytes": counted and int(counted.total or 0),
        }
