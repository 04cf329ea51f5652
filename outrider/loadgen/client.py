"""One request after another, and when each piece of its answer came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from outrider.errors import OutriderError
from outrider.loadgen.response import TOLD, RequestResult, ResponseRecorder
from outrider.loadgen.settings import Settings
from outrider.loadgen.workload import PlannedRequest, plan_requests
from outrider.measure.prompts import Prompt


class Client:
    """Asks a server in streams."""

    def __init__(self, http: ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self._zero = perf_counter()

    @property
    def seconds(self) -> float:
        """Since the load began."""
        return perf_counter() - self._zero

    async def ask(self, want: PlannedRequest, number: int) -> RequestResult:
        """One answer to the end, or as long as the client stays; what goes wrong is noted."""
        asked, tape = RequestResult(number=number, start=self.seconds), ResponseRecorder()
        try:
            async with self._http.post(f"{self._url}/{want.path}", json=want.body) as answer:
                if not answer.ok:
                    asked.error = f"{answer.status}: {(await answer.text(errors='replace'))[:TOLD]}"
                    return asked
                async for chunk in answer.content.iter_any():
                    tape.add(self.seconds, chunk)
                    if want.max_chunks is not None and tape.pieces >= want.max_chunks:
                        asked.cancelled = True
                        break
            tape.play(asked)
        except (ClientError, TimeoutError, ValueError) as error:
            asked.error = f"{type(error).__name__}: {error}"
        if asked.done and not asked.times:
            asked.times.append(self.seconds)  # it may have ended before it began
            asked.error = "" if asked.finish else "the answer was empty"
        return asked


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[tuple[Client, str]]:
    """A client of a server, and the model to ask for.

    Raises:
        OutriderError: there is no such server.
    """
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    limit, everybody = ClientTimeout(total=settings.timeout), TCPConnector(limit=0)
    async with ClientSession(headers=headers, timeout=limit, connector=everybody, trust_env=True) as http:
        url = settings.base_url.rstrip("/")
        model = settings.model or await _named(http, url)
        yield Client(http, url), model


async def put_load(settings: Settings, prompts: Sequence[Prompt]) -> tuple[list[RequestResult], float]:
    """All requests, in turns over the prompts.

    Returns:
        What became of each, and the seconds that it took.

    Raises:
        OutriderError: there is no such server.
    """
    async with connected(settings) as (client, model):
        wants = plan_requests(settings, prompts, model)
        if settings.request_rate is None:
            asked = await _closed(client, wants, settings.max_concurrency or 1)
        else:
            asked = await _open(client, wants, settings.request_rate, random.Random(settings.seed))
        return asked, client.seconds


async def _closed(client: Client, wants: Sequence[PlannedRequest], concurrency: int) -> list[RequestResult]:
    """As many at a time, each followed at once by the next."""
    left, done = iter(enumerate(wants)), list[RequestResult]()

    async def one_by_one() -> None:
        for number, want in left:
            done.append(await client.ask(want, number))

    await asyncio.gather(*(one_by_one() for _ in range(concurrency)))
    return done


async def _open(
    client: Client, wants: Sequence[PlannedRequest], rate: float, chance: random.Random
) -> list[RequestResult]:
    """They come as they come, whether or not the server is done with those before."""
    tasks, at = [], 0.0
    for number, want in enumerate(wants):
        at += chance.expovariate(rate)
        await asyncio.sleep(max(at - client.seconds, 0))
        tasks.append(asyncio.create_task(client.ask(want, number)))
    return await asyncio.gather(*tasks)


async def _named(http: ClientSession, url: str) -> str:
    try:
        async with http.get(f"{url}/models", raise_for_status=True) as answer:
            return str((await answer.json(content_type=None))["data"][0]["id"])
    except (ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError) as error:
        raise OutriderError(f"{url} names no model ({error}); check --base-url, or give --model") from error
