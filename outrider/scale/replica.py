"""A replica: one engine with the routes of `outrider serve`, without a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from outrider.core.config import EngineConfig
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.scale.bridge import HTTPRequest, ResponseStart, respond
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.monitoring.metrics import exposition
from outrider.serve.monitoring.request_log import configure_logging
from outrider.serve.settings import Settings


class Replica:
    """The class that Ray Serve runs in each replica."""

    def __init__(self, config: EngineConfig, settings: Settings, name: str) -> None:
        """Load the models and start the engine."""
        configure_logging(settings.log_format)
        self._async_llm = AsyncLLM(
            LLM(config=config), max_queued_requests=settings.max_queued_requests, max_num_seqs=settings.max_num_seqs
        )
        self._app = make_app(self._async_llm, settings, name=name)
        self._async_llm.start()

    async def respond(self, request: HTTPRequest) -> AsyncIterator[ResponseStart | bytes]:
        """Yield the response to a request: its start, then the parts of its body."""
        async for part in respond(self._app, request):
            yield part

    async def metrics(self) -> tuple[str, str]:
        """Return the name of the replica, and its metrics in the Prometheus text format."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, exposition(self._async_llm).decode()

    async def state(self) -> tuple[str, tuple[str, ...]]:
        """Return why the replica has failed, or "", and why it is degraded."""
        return self._async_llm.failure, self._async_llm.degraded

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if failure := self._async_llm.failure:
            raise OutriderError(failure)

    def __del__(self) -> None:
        """Stop the engine. Ray Serve waits for the requests of a replica before it ends."""
        if async_llm := getattr(self, "_async_llm", None):
            async_llm.stop()
