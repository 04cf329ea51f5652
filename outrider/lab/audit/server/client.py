"""Asks a server for completions, and finds out how it returns them: as token ids or as text."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.lab.audit.prompts import Prompt
from outrider.lab.audit.server.model import Tokens
from outrider.lab.client.server import Refused, Server

_NOT_FOUND = (404, 405, 501)
_INVALID = (400, 422)
_MAX_SEED = 2**31  # some servers take 32-bit seeds
# Names of the repetition penalty: in vLLM, SGLang and Outrider, and in llama.cpp.
_REPETITION = ("repetition_penalty", "repeat_penalty")
# Some servers filter unless they are told not to: llama.cpp has its own defaults, vLLM those of the model's
# generation_config.json. Servers that refuse these fields are asked without them.
_NEUTRAL = {"top_k": 0, "min_p": 0.0}
_ID_FIELDS: Sequence[Mapping[str, bool]] = (  # that make servers return token ids
    {"return_token_ids": True},  # vLLM and Outrider
    {"return_tokens": True, "verbose": True},  # llama.cpp: they are part of what a verbose response has in addition
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A completion of a server."""

    text: str
    tokens: Tokens | None  # None: the server returns text only
    ended: bool  # whether it ended by itself, before max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """How a server is asked, and what it returns."""

    chat: bool  # chat completions in place of completions
    prompt_ids: bool  # the prompt is sent as token ids
    id_fields: Mapping[str, bool]  # fields of a request that make the server return token ids; {}: it returns text
    neutral: bool  # it takes top_k and min_p

    @property
    def token_ids(self) -> bool:
        """Whether the server returns token ids."""
        return bool(self.id_fields)


class Completions:
    """Completions of one model of a server."""

    def __init__(self, server: Server, model: str, abilities: Abilities, *, concurrency: int) -> None:
        self.abilities = abilities
        self.on_done: Callable[[], None] = lambda: None  # called after every completion
        self._server = server
        self._model = model
        self._slots = asyncio.Semaphore(concurrency)

    async def ask(
        self, prompt: Prompt, tokens: Tokens, params: SamplingParams, *, max_tokens: int, seed: int | None = None
    ) -> Answer:
        """Return one completion.

        Args:
            tokens: its tokens, for servers that are sent token ids.
            params: temperature, top_k, top_p, penalties.
            max_tokens: most output tokens.
        """
        asked = replace(params, max_tokens=max_tokens, seed=seed)
        body = request_body(self._model, prompt, tokens, asked, self.abilities)
        async with self._slots:
            document = await self._server.post(_path(self.abilities.chat), body)
        self.on_done()
        return parse_answer(document, self.abilities)

    async def refusal(self, prompt: Prompt, tokens: Tokens, params: SamplingParams) -> str | None:
        """Return why the server refuses requests with these parameters, or None if it takes them."""
        try:
            await self.ask(prompt, tokens, params, max_tokens=1, seed=0)
        except Refused as error:
            if error.status not in _INVALID:
                raise
            return error.message
        return None

    async def sample(
        self, prompt: Prompt, tokens: Tokens, params: SamplingParams, *, max_tokens: int, samples: int, seed: int
    ) -> list[Answer]:
        """Return independent completions, each with a seed of its own."""
        rng = random.Random(seed)
        seeds = [rng.randrange(_MAX_SEED) for _ in range(samples)]
        answers = (self.ask(prompt, tokens, params, max_tokens=max_tokens, seed=each) for each in seeds)
        return list(await asyncio.gather(*answers))


async def open_completions(
    server: Server, model: str, prompt: Prompt, tokens: Tokens, *, chat: bool, concurrency: int
) -> Completions:
    """Return what asks a server for completions. Short requests find out which ways it supports.

    Args:
        prompt: the prompt of these requests.
        tokens: its tokens, as the target's tokenizer and chat template give them.
        chat: use chat completions only.
        concurrency: requests at a time.

    Raises:
        OutriderError: no way gives a completion, or the server reads other tokens than the target.
    """
    problems: list[str] = []
    of_text: Abilities | None = None  # the best way that works, without token ids
    for abilities in _ways(prompt, chat=chat):
        if of_text is not None and not (abilities.id_fields and _same_request(abilities, of_text)):
            break
        body = request_body(model, prompt, tokens, SamplingParams(max_tokens=2, seed=0), abilities)
        try:
            document = await server.post(_path(abilities.chat), body)
        except Refused as error:
            problems.append(str(error))
            if error.status in (401, 403):
                raise OutriderError(f"{error}; give the key of the server with --api-key") from None
            continue
        if count := _other_prompt(document, tokens):
            problems.append(
                f"{server.url} reads {count} tokens for a prompt that has {len(tokens)} with the tokenizer of --target"
            )
            continue
        if parse_answer(document, abilities, strict=False).tokens is not None:
            return Completions(server, model, abilities, concurrency=concurrency)
        of_text = replace(abilities, id_fields={})
    if of_text is None:
        raise OutriderError(f"{problems[-1]}; check --model, --target and --chat")
    return Completions(server, model, of_text, concurrency=concurrency)


def request_body(
    model: str, prompt: Prompt, tokens: Tokens, params: SamplingParams, abilities: Abilities
) -> dict[str, Any]:
    """Return the body of a request. Only what differs from the neutral value is sent, besides the common fields."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if params.seed is not None:
        body["seed"] = params.seed
    body |= abilities.id_fields
    if abilities.neutral:
        body |= _NEUTRAL
    if params.top_k:
        body["top_k"] = params.top_k
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(params, name):
            body[name] = value
    if params.repetition_penalty != 1:
        body |= dict.fromkeys(_REPETITION, params.repetition_penalty)
    if not abilities.chat:
        body["prompt"] = list(tokens) if abilities.prompt_ids else prompt
    elif isinstance(prompt, str):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["messages"] = list(map(dict, prompt))
    return body


def parse_answer(document: dict[str, Any], abilities: Abilities, *, strict: bool = True) -> Answer:
    """Return the completion of a response.

    Raises:
        OutriderError: the response has no choice, or no token ids although the server returned them before.
    """
    try:
        choice = document["choices"][0]
        text = (choice["message"]["content"] if abilities.chat else choice["text"]) or ""
    except (KeyError, IndexError, TypeError):
        raise OutriderError(f"the server answered without a completion: {str(document)[:200]}; check the URL") from None
    tokens = _token_ids(document, choice, text) if abilities.token_ids else None
    if abilities.token_ids and strict and tokens is None:
        raise OutriderError("the server returned token ids for one request and none for another; audit it again")
    return Answer(text=text, tokens=tokens, ended=choice.get("finish_reason") == "stop")


def _ways(prompt: Prompt, *, chat: bool) -> Sequence[Abilities]:
    """Return the ways to ask, best first. A server may refuse fields that it does not know."""
    text = isinstance(prompt, str) and not chat
    ways = []
    for is_chat, prompt_ids in ((False, False), (False, True)) if text else ((True, False),):
        for neutral in (True, False):
            for id_fields in (*_ID_FIELDS, {}):
                ways.append(Abilities(chat=is_chat, prompt_ids=prompt_ids, id_fields=id_fields, neutral=neutral))
    return ways


def _same_request(abilities: Abilities, other: Abilities) -> bool:
    """Return whether two ways differ at most in the fields that make the server return token ids."""
    return replace(abilities, id_fields={}) == replace(other, id_fields={})


def _token_ids(document: Mapping[str, Any], choice: Mapping[str, Any], text: str) -> Tokens | None:
    """Return the ids of the output tokens, or None if the response has none."""
    ids = choice.get("token_ids")
    if ids is None:
        ids = (document.get("__verbose") or {}).get("tokens")
    # llama.cpp has an empty list where it was not asked for the ids.
    return tuple(ids) if isinstance(ids, list) and (ids or not text) else None


def _other_prompt(document: dict[str, Any], tokens: Tokens) -> int | None:
    """Return the number of prompt tokens if the server has read other tokens than these, and says so."""
    choices = document.get("choices") or [{}]
    ids = choices[0].get("prompt_token_ids") or document.get("prompt_token_ids")
    if isinstance(ids, list):
        return None if tuple(ids) == tokens else len(ids)
    count = (document.get("usage") or {}).get("prompt_tokens")
    return count if isinstance(count, int) and count > 0 and count != len(tokens) else None


def _path(chat: bool) -> str:
    return "chat/completions" if chat else "completions"


async def has_completions(server: Server, model: str) -> bool:
    """Return whether a server completes plain prompts, and not only chats."""
    try:
        await server.post("completions", {"model": model, "prompt": "a", "max_tokens": 1})
    except Refused as error:
        return error.status not in _NOT_FOUND
    return True
