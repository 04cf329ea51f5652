"""Plans the requests of a load test from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.prompts import Prompt
from outrider.lab.loadgen.settings import Settings

_MIN_LENGTH_DIVISOR = 8  # with --mixed, a request has at least --max-tokens / 8 tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A request that the load generator will send."""

    path: str
    body: dict[str, Any]
    max_chunks: int | None = None  # the client cancels the request after this many chunks; None: never


def plan_requests(settings: Settings, prompts: Sequence[Prompt], model: str) -> list[PlannedRequest]:
    """Return all requests, which cycle through the prompts.

    A request depends only on the seed and its number, not on the other requests.
    """
    return [_plan_request(settings, prompts[i % len(prompts)], model, i) for i in range(settings.num_requests)]


def _plan_request(settings: Settings, prompt: Prompt, model: str, number: int) -> PlannedRequest:
    rng = random.Random(f"{settings.seed}/{number}")
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.messages:
        body["messages"] = list(prompt.messages)
    else:
        body["prompt"] = prompt.prompt
    if settings.k is not None:
        body["k"] = settings.k
    if settings.user:
        body["user"] = settings.user
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.mixed:
        body |= _random_params(settings, rng)
    cancels = rng.random() < settings.cancel
    return PlannedRequest(
        path="chat/completions" if prompt.messages else "completions",
        body=body,
        max_chunks=rng.randint(1, max(body["max_tokens"] // 2, 1)) if cancels else None,
    )


def _random_params(settings: Settings, rng: random.Random) -> dict[str, Any]:
    """Return random values of parameters that every server with OpenAI's API supports."""
    min_tokens = -(-settings.max_tokens // _MIN_LENGTH_DIVISOR)  # rounded up
    return {
        "max_tokens": rng.randint(min_tokens, settings.max_tokens),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.5)),
        "seed": rng.randrange(2**31),
    }
