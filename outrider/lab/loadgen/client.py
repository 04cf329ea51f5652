"""Sends requests to a server and records when the chunks of each response arrive."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from aiohttp import ClientError

from outrider.core.prompts import Prompt
from outrider.lab.client.connection import Connection
from outrider.lab.client.server import connect as connect_server
from outrider.lab.client.server import find_model
from outrider.lab.loadgen.response import MAX_ERROR_LENGTH, RequestResult, ResponseRecorder
from outrider.lab.loadgen.settings import Settings
from outrider.lab.loadgen.workload import PlannedRequest, plan_requests


class Client:
    """A client that streams the responses of one server."""

    def __init__(self, http: Connection, url: str) -> None:
        self._http = http
        self._url = url
        self._start = perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the load test."""
        return perf_counter() - self._start

    async def send(self, planned: PlannedRequest, number: int) -> RequestResult:
        """Send a request and return its result.

        Read the response to its end, or cancel it after `planned.max_chunks` chunks. Errors are part of the result.
        """
        result = RequestResult(number=number, start=self.seconds)
        recorder = ResponseRecorder()
        url = f"{self._url}/{planned.path}"
        try:
            async with self._http.request("POST", url, planned.body, on_retry=result.count_retry) as response:
                if not response.ok:
                    message = await response.text(errors="replace")
                    result.error = f"{response.status}: {message[:MAX_ERROR_LENGTH]}"
                    return result
                async for chunk in response.content.iter_any():
                    recorder.add(self.seconds, chunk)
                    if planned.max_chunks is not None and recorder.num_events >= planned.max_chunks:
                        result.canceled = True
                        break
            recorder.parse(result)
        except (ClientError, TimeoutError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        if result.completed and not result.times:
            # A completion without text is valid if it has a finish reason. Its latencies need a time.
            result.times.append(self.seconds)
            result.error = "" if result.finish else "the response is empty"
        return result


@asynccontextmanager
async def connect(settings: Settings) -> AsyncIterator[tuple[Client, str]]:
    """Connect to a server. Yield the client and the model name.

    Raises:
        OutriderError: the server cannot be reached, or it lists no model.
    """
    async with connect_server(settings.base_url, api_key=settings.api_key, timeout=settings.timeout) as server:
        model = settings.model or await find_model(server, None)
        yield Client(server.http, server.url), model


async def run_load(settings: Settings, prompts: Sequence[Prompt]) -> tuple[list[RequestResult], float]:
    """Send all requests, which cycle through the prompts.

    Returns:
        The result of each request, and the seconds of the whole load test.

    Raises:
        OutriderError: the server cannot be reached, or it lists no model.
    """
    async with connect(settings) as (client, model):
        results, _ = await run_requests(settings, client, plan_requests(settings, prompts, model))
        return results, client.seconds  # on the clock of the results


async def run_requests(
    settings: Settings, client: Client, requests: Sequence[PlannedRequest]
) -> tuple[list[RequestResult], float]:
    """Send planned requests with one client. Returns their results, and the seconds that it took."""
    began = client.seconds
    if settings.request_rate is None:
        results = await _closed_loop(client, requests, settings.max_concurrency or 1)
    else:
        results = await _open_loop(client, requests, settings.request_rate, random.Random(settings.seed))
    return results, client.seconds - began


async def _closed_loop(client: Client, requests: Sequence[PlannedRequest], concurrency: int) -> list[RequestResult]:
    """Keep `concurrency` requests running, and return their results. When one ends, send the next one."""
    remaining = iter(enumerate(requests))
    results = list[RequestResult]()

    async def send_sequentially() -> None:
        for number, planned in remaining:  # all workers share this iterator
            results.append(await client.send(planned, number))

    await asyncio.gather(*(send_sequentially() for _ in range(concurrency)))
    return results


async def _open_loop(
    client: Client, requests: Sequence[PlannedRequest], rate: float, rng: random.Random
) -> list[RequestResult]:
    """Send requests at random times, `rate` per second, and return their results. They do not wait for earlier ones."""
    tasks = []
    send_time = client.seconds
    for number, planned in enumerate(requests):
        send_time += rng.expovariate(rate)
        await asyncio.sleep(max(send_time - client.seconds, 0))
        tasks.append(asyncio.create_task(client.send(planned, number)))
    return await asyncio.gather(*tasks)
