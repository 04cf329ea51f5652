"""The requests of the soak test: chats, reasoning, tools, stop strings and completions, in each API."""

import random
import shutil
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
    }
    limit = rng.randint(max_tokens // 8, max_tokens)
    return PlannedRequest(kind, path, _body(path, kind, text, params, limit))


def stopped(planned: PlannedRequest, stop: str) -> PlannedRequest:
    """Return a request that ends with a stop string."""
    field = {"stop_sequences": [stop]} if planned.path == "messages" else {"stop": stop}
    return planned._replace(body=planned.body | field)


def _body(path: str, kind: str, text: str, params: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the body of a request in the API of its path."""
    thinks = kind not in ("plain", "stop", "forced")
    choice = "auto" if kind == "auto" else "required"
    single = kind == "forced"
    messages = [{"role": "user", "content": text}]
    function = {"name": _NAME, "parameters": _SCHEMA}
    if path == "messages":
        body = {"messages": messages, "max_tokens": limit, "thinking": {"type": "enabled" if thinks else "disabled"}}
        tool = {"name": _NAME, "input_schema": _SCHEMA}
        any_of = {"type": "auto" if choice == "auto" else "any", "disable_parallel_tool_use": single}
        tools = {"tools": [tool], "tool_choice": any_of}
    elif path == "responses":
        body = {"input": text, "max_output_tokens": limit, "reasoning": {} if thinks else {"effort": "none"}}
        tools = {"tools": [{"type": "function"} | function], "tool_choice": choice, "parallel_tool_calls": not single}
    elif path == "completions":
        body, tools = {"prompt": text, "max_tokens": limit, "return_token_ids": True}, {}
    else:
        body = {"messages": messages, "max_tokens": limit, "enable_thinking": thinks, "return_token_ids": True}
        tool = {"type": "function", "function": function}
        tools = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": not single}
    return body | params | (tools if kind.startswith(("auto", "forced")) else {})
