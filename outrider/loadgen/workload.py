"""What each request asks, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.loadgen.settings import Settings
from outrider.measure.prompts import Prompt

_SHORTEST = 8  # of --max-tokens, what the shortest mixed answer gets at least


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request, and whether whoever asks it will have the patience."""

    path: str
    body: dict[str, Any]
    max_chunks: int | None = None  # after so many of its answer the client hangs up; None: it stays


def plan_requests(settings: Settings, prompts: Sequence[Prompt], model: str) -> list[PlannedRequest]:
    """All requests, in turns over the prompts; each is a function of the seed and its number alone."""
    return [_one(settings, prompts[i % len(prompts)], model, i) for i in range(settings.num_requests)]


def _one(settings: Settings, prompt: Prompt, model: str, number: int) -> PlannedRequest:
    chance = random.Random(f"{settings.seed}/{number}")
    body = {
        "model": model,
        "max_tokens": settings.max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"messages": list(prompt.messages)} if prompt.messages else {"prompt": prompt.prompt}),
        **({} if settings.k is None else {"k": settings.k}),
        **({"user": settings.user} if settings.user else {}),
        **({"ignore_eos": True} if settings.ignore_eos else {}),
        **(_mixed(settings, chance) if settings.mixed else {}),
    }
    quits = chance.random() < settings.cancel
    return PlannedRequest(
        path="chat/completions" if prompt.messages else "completions",
        body=body,
        max_chunks=chance.randint(1, max(body["max_tokens"] // 2, 1)) if quits else None,
    )


def _mixed(settings: Settings, chance: random.Random) -> dict[str, Any]:
    """Parameters that every server of OpenAI's interface knows."""
    return {
        "max_tokens": chance.randint(-(-settings.max_tokens // _SHORTEST), settings.max_tokens),
        "temperature": chance.choice((0.0, 0.0, 0.7, 1.0)),
        "top_p": chance.choice((1.0, 0.9)),
        "frequency_penalty": chance.choice((0.0, 0.0, 0.5)),
        "seed": chance.randrange(2**31),
    }
