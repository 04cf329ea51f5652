"""Situations of tool calls in which other engines were reported to fail."""

import json

import httpx
import pytest

from tests.helpers.scripted import base_llm, script_of, scripted_llm
from tests.helpers.serving import serving

CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [("weather", '{"city": "Oslo"}'), ("now", "{}")]
CALLS_TEXT = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
TOKENIZERS = ("Qwen2.5-0.5B", "Qwen2.5 with special markers")  # <tool_call> is one token


@pytest.fixture(scope="module", params=TOKENIZERS)
def base(request, tmp_path_factory):
    return base_llm(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=["accepted", "rejected"])
def server(base, request):
    """The URL of a server whose model says a sentence and calls two functions, and whether drafts are accepted."""
    script = script_of(base, "Let me see. " + CALLS_TEXT)
    assert script.count(base.parts.tokenizer.convert_tokens_to_ids("<tool_call>")) == 2
    with serving(llm=scripted_llm(base, script, k=8, accepts=request.param == "accepted")) as (url, _):
        yield url


@pytest.fixture(scope="module")
def calling_server(base):
    """The URL of a server whose model only calls the functions."""
    with serving(llm=scripted_llm(base, script_of(base, CALLS_TEXT), k=8)) as (url, _):
        yield url


def ask(url, **fields):
    """Return the message and the finish reason, after a check that the stream has the same."""
    body = {"messages": [{"role": "user", "content": "Weather?"}], "tools": TOOLS, "temperature": 0, **fields}
    response = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    message, reason = choice["message"], choice["finish_reason"]
    content, calls, reasons = "", {}, []
    with httpx.stream("POST", url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            (choice,) = json.loads(line[6:])["choices"]
            content += choice["delta"].get("content") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"name": part["function"].get("name"), "arguments": ""})
                call["arguments"] += part["function"]["arguments"]
    assert content == (message["content"] or "")
    assert [(call["name"], call["arguments"]) for call in calls.values()] == functions(message)
    assert reasons == [reason]
    return message, reason


def functions(message):
    calls = message.get("tool_calls", ())
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize("k", [0, 8])
def test_calls_that_cross_deltas(server, k):
    """D1: several tokens of a delta cross the border of a tool call (rtp-llm PR #682, vllm PR #56113)."""
    message, reason = ask(server, k=k)
    assert message["content"] == "Let me see. "
    assert functions(message) == CALLS
    assert reason == "tool_calls"


@pytest.mark.parametrize("k", [0, 8])
def test_forced_calls_use_the_marker_token(calling_server, k):
    """D1, forced: the marker of a call is one token, marked special or not (rtp-llm PR #682, vllm PR #56113)."""
    message, reason = ask(calling_server, tool_choice="required", k=k, return_token_ids=True)
    assert (message["content"], functions(message), reason) == (None, CALLS, "tool_calls")
    named = {"type": "function", "function": {"name": "weather"}}
    message, reason = ask(calling_server, tool_choice=named, k=k)
    assert (message["content"], functions(message), reason) == (None, CALLS[:1], "tool_calls")


def test_one_call_ends_the_answer(server):
    """D1 without parallel calls: the text behind the first call is not generated (vllm PR #56113)."""
    message, reason = ask(server, parallel_tool_calls=False)
    assert (message["content"], functions(message), reason) == ("Let me see. ", CALLS[:1], "tool_calls")
