"""The requests of the soak test: chats, reasoning, tools, stop strings and completions, in each API."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.core.prompts import Prompt

# As in the templates of Qwen3 and DeepSeek R1, the prompt opens the reasoning, or closes it.
_THINKING = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# Small models repeat what the prompt repeats, so their answers have these parts.
_THOUGHT = "So it is.\n</think>\n\nYes, it is.\n<think>\n"
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_CALLED = f"I look.\n</think>\n\nWell.\n{_CALL}\n<think>\n"
_SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
_NAME = "weather"
_KINDS = ("plain", "stop", "thought", "unfinished thought", "auto", "forced", "forced after a thought")
_PATHS = ("chat/completions", "responses", "messages", "completions")


class PlannedRequest(NamedTuple):
    """A request of one kind."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def stops(self) -> bool:
        """Whether it is to get a stop string from its own text."""
        return self.kind == "stop" and self.path != "responses"


def reasoning_model(folder: Path, to: Path) -> Path:
    """Copy a model to another folder, with a chat template whose prompts open the reasoning."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    template = to / "chat_template.jinja"
    template.write_text(template.read_text() + _THINKING)
    return to


def plan(prompts: list[Prompt], *, count: int, max_tokens: int, seed: int) -> list[PlannedRequest]:
    """Return `count` requests, which cycle through kinds and APIs."""
    rng = random.Random(seed)
    return [_plan(rng, i, prompts[i % len(prompts)], max_tokens) for i in range(count)]


def _plan(rng: random.Random, number: int, prompt: Prompt, max_tokens: int) -> PlannedRequest:
    kind = _KINDS[number % len(_KINDS)]
    path = _PATHS[number // len(_KINDS) % len(_PATHS)]
    if path == "completions" and kind not in _KINDS[:2]:
        path = "chat/completions"
    text = prompt.prompt or prompt.messages[-1]["content"]
    if kind in ("thought", "forced after a thought"):
        text = f"{text}\n<think>\n" + 6 * _THOUGHT
    if kind == "auto":
        text = f"{text}\n<think>\n" + 6 * _CALLED
    params = {
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": rng.randrange(2**31),
        "user": f"user {rng.randrange(4)}",
    }
    body = _BODIES[path](text, kind, params, rng.randint(max_tokens // 8, max_tokens))
    return PlannedRequest(kind, path, body)


def stopped(planned: PlannedRequest, stop: str) -> PlannedRequest:
    """Return a request that ends with a stop string."""
    field = {"stop_sequences": [stop]} if planned.path == "messages" else {"stop": stop}
    return planned._replace(body=planned.body | field)


def _thinks(kind: str) -> bool:
    return kind not in ("plain", "stop", "forced")


def _tools(kind: str, function: dict[str, Any], choice: Any) -> dict[str, Any]:
    """Return the fields for a function that may be called (auto), or must be."""
    return {"tools": [function], "tool_choice": choice} if kind.startswith(("auto", "forced")) else {}


def _choice(kind: str) -> str:
    return "auto" if kind == "auto" else "required"


def _completion(text: str, _: str, params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": limit, "return_token_ids": True, **params}


def _chat(text: str, kind: str, params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    body = _completion(text, kind, params, limit) | {"enable_thinking": _thinks(kind)}
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    function = {"type": "function", "function": {"name": _NAME, "parameters": _SCHEMA}}
    return body | _tools(kind, function, _choice(kind)) | {"parallel_tool_calls": kind != "forced"}


def _response(text: str, kind: str, params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    body = {"input": text, "max_output_tokens": limit, **params, "parallel_tool_calls": kind != "forced"}
    body |= {} if _thinks(kind) else {"reasoning": {"effort": "none"}}
    return body | _tools(kind, {"type": "function", "name": _NAME, "parameters": _SCHEMA}, _choice(kind))


def _message(text: str, kind: str, params: Mapping[str, Any], limit: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": limit, **params}
    body["metadata"] = {"user_id": body.pop("user")}
    body["thinking"] = {"type": "enabled" if _thinks(kind) else "disabled"}
    choice = {"type": "auto" if kind == "auto" else "any", "disable_parallel_tool_use": kind == "forced"}
    return body | _tools(kind, {"name": _NAME, "input_schema": _SCHEMA}, choice)


_BODIES = {"chat/completions": _chat, "responses": _response, "messages": _message, "completions": _completion}
