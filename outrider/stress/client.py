"""One request after another, and when each piece of its answer came."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import httpx

from outrider.errors import OutriderError
from outrider.prompts import Prompt
from outrider.stress.settings import Settings

_TOLD = 300  # characters of an answer that is no answer


@dataclass(slots=True, kw_only=True)
class Asked:
    """What became of one request; seconds since the load began."""

    began: float
    times: list[float] = field(default_factory=list)  # when pieces of text came
    tokens: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Seconds to the first piece."""
        return self.times[0] - self.began

    @property
    def whole(self) -> float:
        return self.times[-1] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds a token behind the first piece, in the mean."""
        return (self.times[-1] - self.times[0]) / max(self.tokens - 1, 1)


class Client:
    """Asks a server in streams."""

    def __init__(self, http: httpx.AsyncClient, settings: Settings, model: str) -> None:
        self._http, self._settings, self._model = http, settings, model
        self._zero = perf_counter()

    @property
    def seconds(self) -> float:
        """Since the load began."""
        return perf_counter() - self._zero

    async def ask(self, prompt: Prompt) -> Asked:
        """One answer to the end; what goes wrong is noted."""
        asked, path = Asked(began=self.seconds), "chat/completions" if prompt.messages else "completions"
        try:
            async with self._http.stream("POST", path, json=self._body(prompt)) as answer:
                if answer.status_code != httpx.codes.OK:
                    asked.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:_TOLD]}"
                    return asked
                async for event in _events(answer):
                    self._note(asked, event)
        except httpx.HTTPError as error:
            asked.error = f"{type(error).__name__}: {error}"
        if not asked.error and not asked.times:
            asked.error = "the answer was empty"
        return asked

    def _note(self, asked: Asked, event: dict[str, Any]) -> None:
        if "error" in event:
            asked.error = str(event["error"])[:_TOLD]
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
            asked.times.append(self.seconds)
        if event.get("usage"):
            asked.tokens = event["usage"]["completion_tokens"]

    def _body(self, prompt: Prompt) -> dict[str, Any]:
        settings = self._settings
        return {
            "model": self._model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.prompt}),
            **({} if settings.k is None else {"k": settings.k}),
            **({"ignore_eos": True} if settings.ignore_eos else {}),
        }


async def put_load(settings: Settings, prompts: Sequence[Prompt]) -> tuple[list[Asked], float]:
    """All requests, in turns over the prompts.

    Returns:
        What became of each, and the seconds that it took.

    Raises:
        OutriderError: there is no such server.
    """
    headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=settings.url, headers=headers, timeout=settings.timeout, limits=limits
    ) as http:
        client = Client(http, settings, settings.model or await _named(http, settings.url))
        wanted = [prompts[i % len(prompts)] for i in range(settings.requests)]
        if settings.rate is None:
            asked = await _closed(client, wanted, settings.concurrency or 1)
        else:
            asked = await _open(client, wanted, settings.rate, random.Random(settings.seed))
        return asked, client.seconds


async def _closed(client: Client, prompts: Sequence[Prompt], concurrency: int) -> list[Asked]:
    """As many at a time, each followed at once by the next."""
    left, done = iter(prompts), list[Asked]()

    async def one_by_one() -> None:
        for prompt in left:
            done.append(await client.ask(prompt))

    await asyncio.gather(*(one_by_one() for _ in range(concurrency)))
    return done


async def _open(client: Client, prompts: Sequence[Prompt], rate: float, chance: random.Random) -> list[Asked]:
    """They come as they come, whether or not the server is done with those before."""
    tasks, at = [], 0.0
    for prompt in prompts:
        at += chance.expovariate(rate)
        await asyncio.sleep(max(at - client.seconds, 0))
        tasks.append(asyncio.create_task(client.ask(prompt)))
    return await asyncio.gather(*tasks)


async def _named(http: httpx.AsyncClient, url: str) -> str:
    try:
        answer = await http.get("models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise OutriderError(f"{url} names no model ({error}); check --url, or give --model") from error


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[len("data: ") :])
