"""A replica: one engine with the routes of `outrider serve`, without a port of its own."""

import os
from collections.abc import AsyncIterator, Mapping

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.scale.ray.autoscaling import METRIC, TokenRate
from outrider.scale.ray.bridge import HTTPRequest, ResponsePart, ResponseStart, respond
from outrider.serve.app import make_app
from outrider.serve.async_llm import AsyncLLM
from outrider.serve.monitoring.metrics import exposition
from outrider.serve.monitoring.request_log import configure_logging
from outrider.serve.monitoring.tracing import make_tracer
from outrider.serve.settings import Settings


class Replica:
    """The class that Ray Serve runs in each replica."""

    def __init__(self, settings: Settings, name: str, telemetry: Mapping[str, str]) -> None:
        """Load the models and start the engine.

        Args:
            settings: the options of `outrider serve`, with what to load.
            name: model name in the API.
            telemetry: the OTEL_* variables of the command, which configure the traces of `--otel`.
        """
        os.environ.update(telemetry)
        configure_logging(settings.log_format)
        self._async_llm = AsyncLLM(
            LLM(config=settings.engine),
            max_queued_requests=settings.max_queued_requests,
            max_num_seqs=settings.engine.max_num_seqs,
        )
        self._tracer = make_tracer() if settings.otel else None
        self._app = make_app(self._async_llm, settings, name=name, tracer=self._tracer)
        self._async_llm.start()
        self._rate = TokenRate(self._async_llm.stats.output_tokens)

    async def respond(self, request: HTTPRequest) -> AsyncIterator[ResponseStart | ResponsePart]:
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

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `LoadPolicy` reads. Ray Serve calls this regularly."""
        return {METRIC: self._rate.read(self._async_llm.stats.output_tokens)}

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if failure := self._async_llm.failure:
            raise OutriderError(failure)

    def __del__(self) -> None:
        """Stop the engine. Ray Serve waits for the requests of a replica before it ends."""
        if async_llm := getattr(self, "_async_llm", None):
            async_llm.stop()
        if tracer := getattr(self, "_tracer", None):
            tracer.close()
