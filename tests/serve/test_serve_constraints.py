"""Tests of structured output and function calls, with the official OpenAI client."""

import json
from typing import NamedTuple

import httpx
import jsonschema
import numpy as np
import pytest

from outrider.core.grammar import Grammars, Matcher
from outrider.serve.openai.call_formats import HERMES, format_of
from outrider.serve.openai.conversation import conversation
from outrider.serve.openai.schema import ChatRequest
from outrider.serve.openai.tool_calls import ToolCallParser
from outrider.serve.openai.tools import Tools
from tests.helpers.scripted import base_llm
from tests.helpers.serving import OPTIONS, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER_SCHEMA}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
END_BIAS = {"3": 4.0}  # makes end-of-text likelier, so that calls are short
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
# The arguments of a request whose answer calls functions.
CALL = {
    "model": "nano",
    "messages": MESSAGES,
    "tools": TOOLS,
    "tool_choice": "required",
    "logit_bias": END_BIAS,
    "seed": 4,
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "max_model_len", 512)
        with serving() as (url, async_llm):
            yield url, async_llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_schema_with_and_without_speculation(client, temperature):
    response_format = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    body = {"model": "nano", "messages": MESSAGES, "response_format": response_format}
    body |= {"temperature": temperature, "seed": 1}
    speculative = client.chat.completions.create(**body)
    plain = client.chat.completions.create(**body, extra_body={"k": 0})
    text = speculative.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    assert speculative.choices[0].finish_reason == "stop"
    assert text == plain.choices[0].message.content
    assert speculative.usage.speculation["target_passes"] < plain.usage.speculation["target_passes"]
    chunks = client.chat.completions.create(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_complete_constraint_ends_text_before_min_tokens(client):
    body = {"structured_outputs": {"regex": "[0-9]{3}"}, "min_tokens": 20}
    reply = client.completions.create(model="nano", prompt="1", max_tokens=30, temperature=0, extra_body=body)
    assert reply.choices[0].text.isdigit()
    assert (len(reply.choices[0].text), reply.choices[0].finish_reason) == (3, "stop")


def test_json_object_and_text_formats(client):
    reply = client.chat.completions.create(
        model="nano", messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=30
    )
    text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    unconstrained = client.chat.completions.create(
        model="nano", messages=MESSAGES, response_format={"type": "text"}, temperature=0, max_tokens=5
    )
    assert not unconstrained.choices[0].message.content.startswith("{")


CONSTRAINTS = {  # value of the field, check of the output
    "regex": (r"[0-9]{3}", lambda text: len(text) == 3 and text.isdigit()),
    "choice": (["yes", "no"], lambda text: text in ("yes", "no")),
    "grammar": ('root ::= "<" ("a" | "b")+ ">"', lambda text: set(text) <= set("<>ab")),
    "json": (SCHEMA, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("chat", [False, True])
def test_structured_outputs(client, name, chat):
    value, is_valid = CONSTRAINTS[name]
    body = {"structured_outputs": {name: value}}
    if chat:
        reply = client.chat.completions.create(
            model="nano", messages=MESSAGES, temperature=0.7, seed=1, max_tokens=60, extra_body=body
        )
        choice, text = reply.choices[0], reply.choices[0].message.content
    else:
        reply = client.completions.create(
            model="nano", prompt="x", temperature=0.7, seed=1, max_tokens=60, extra_body=body
        )
        choice, text = reply.choices[0], reply.choices[0].text
    assert is_valid(text) or choice.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", "named", "single"])
def test_arguments_match_schema_of_function(client, choice):
    tool_choice = {"type": "function", "function": {"name": "weather"}} if choice == "named" else "required"
    body = {"model": "nano", "messages": MESSAGES, "tools": TOOLS, "tool_choice": tool_choice}
    body |= {"temperature": 0.9, "seed": 4, "parallel_tool_calls": choice != "single", "logit_bias": END_BIAS}
    reply = client.chat.completions.create(**body, max_tokens=150)
    calls = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    assert len(calls) == 1 or choice == "required"
    for call in calls:
        jsonschema.validate(
            json.loads(call.function.arguments), WEATHER_SCHEMA if call.function.name == "weather" else {}
        )
        assert call.id
        assert call.type == "function"
    streamed_calls = {}
    finish_reason = None
    roles = []
    for chunk in client.chat.completions.create(**body, max_tokens=150, stream=True):
        delta = chunk.choices[0].delta
        finish_reason = chunk.choices[0].finish_reason or finish_reason
        roles += [delta.role] if delta.role else []
        for call_delta in delta.tool_calls or ():
            call = streamed_calls.setdefault(call_delta.index, {"arguments": ""})
            call |= {"id": call_delta.id, "name": call_delta.function.name} if call_delta.id else {}
            call["arguments"] += call_delta.function.arguments or ""
    assert [(call["name"], call["arguments"]) for call in streamed_calls.values()] == [
        (call.function.name, call.function.arguments) for call in calls
    ]
    assert finish_reason == "tool_calls"
    assert roles == ["assistant"]


def test_stream_helper_of_openai_client(client):
    with client.chat.completions.stream(**CALL) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert json.loads(message.tool_calls[0].function.arguments) is not None


def test_incomplete_call_has_finish_reason_length(client):
    body = {"model": "nano", "messages": MESSAGES, "tools": TOOLS[:1], "tool_choice": "required", "temperature": 0}
    reply = client.chat.completions.create(**body, max_tokens=14)
    assert reply.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(**body, max_tokens=14, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_text_response_with_tools(client):
    body = {"model": "nano", "messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    auto = client.chat.completions.create(**body, tools=TOOLS)
    assert auto.choices[0].message.content
    assert auto.choices[0].message.tool_calls is None
    assert auto.choices[0].finish_reason in ("stop", "length")
    none = client.chat.completions.create(**body, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == client.chat.completions.create(**body).choices[0].message.content


def test_conversation_continues_after_calls(client):
    first = client.chat.completions.create(**CALL)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    reply = client.chat.completions.create(
        model="nano", messages=[*MESSAGES, message, *results], tools=TOOLS, temperature=0, max_tokens=8
    )
    assert reply.choices[0].finish_reason


INVALID_REQUESTS = {
    "two constraints": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "unknown constraint": {"structured_outputs": {"guess": "a"}},
    "huge regex": {"structured_outputs": {"regex": "a{1000000}"}},
    "long regex": {"structured_outputs": {"regex": "ab|" * 100_000}},
    "endless grammar": {"structured_outputs": {"grammar": 'start: "a" start'}},
    "invalid tool name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "call in a user message": {
        "messages": [{"role": "user", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": ""}}]}]
    },
    "tool message without tool_call_id": {"messages": [{"role": "tool", "content": "x"}]},
    "message without content": {"messages": [{"role": "user"}]},
    "arguments are not JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "["}}]}]
    },
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_request_is_status_400(server, case):
    body = {"messages": MESSAGES, **INVALID_REQUESTS[case]}
    response = httpx.post(server[0] + "/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_an_invalid_schema_of_a_tool_names_the_tool_and_the_fault(server):
    invalid = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "not": {}}}}
    body = {"messages": MESSAGES, "tools": [*TOOLS, invalid]}
    response = httpx.post(server[0] + "/v1/chat/completions", json=body, timeout=60)
    assert response.json()["error"] == {
        "message": "tools: the parameters of function 'other': the json_schema constraint cannot be"
        ' used: it has "not", which is not supported here; leave this out',
        "type": "invalid_request_error",
        "param": "tools",
        "code": None,
    }


ONE_CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "note": "}"}}\n</tool_call>'
TWO_CALLS = ONE_CALL + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_text_that_starts_like_a_call_is_content():
    parser = ToolCallParser(HERMES)
    assert parser.add_text("a <tool", last=False) == [{"content": "a "}]
    assert parser.add_text("_box> <", last=False) == [{"content": "<tool_box> "}]
    assert parser.add_text("", last=True) == [{"content": "<"}]
    assert not parser.calls


class GrammarMatch(NamedTuple):
    """How far the grammar of the tools accepts a text."""

    num_accepted: int  # tokens
    num_tokens: int
    matcher: Matcher


def match_tools_grammar(fields, text, codec):
    """Match a text against the grammar of a request with `TOOLS` and these fields."""
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": TOOLS, **fields})
    matcher = codec.prepare(Tools.of(body).constraint()).start(codec.end_ids)
    tokens = codec.tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(tokens):
        bits = matcher.allowed()
        if not bits[token >> 3] >> (token & 7) & 1:
            return GrammarMatch(i, len(tokens), matcher)
        matcher.advance(token)
    return GrammarMatch(len(tokens), len(tokens), matcher)


def test_grammar_accepts_text_and_calls_that_match_their_schemas(server):
    codec = server[1].codec
    match = match_tools_grammar({}, "Just text, with { and < in it.", codec)
    assert match.num_accepted == match.num_tokens
    assert not match.matcher.done
    match = match_tools_grammar({"parallel_tool_calls": False}, ONE_CALL, codec)
    assert match.num_accepted == match.num_tokens
    assert match.matcher.done
    match = match_tools_grammar({}, TWO_CALLS, codec)
    assert match.num_accepted == match.num_tokens
    assert not match.matcher.done
    text = f"{ONE_CALL} More: {ONE_CALL} and text."
    match = match_tools_grammar({}, text, codec)
    assert match.num_accepted == match.num_tokens
    single = {"parallel_tool_calls": False}
    invalid = ((ONE_CALL.replace("Oslo", "Bonn"), {}), (TWO_CALLS.replace("now", "other"), {}), (text, single))
    for text, fields in invalid:
        match = match_tools_grammar(fields, text, codec)
        assert match.num_accepted < match.num_tokens


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5 with special markers", "Gemma-3-270m", "Mistral-7B"])
def test_tools_leave_the_text_to_the_model(name, tmp_path):
    """Until a call begins, every token is allowed that plain decoding could emit."""
    parts = base_llm(tmp_path, name).parts
    grammars = Grammars(parts.tokenizer, vocab=parts.vocab, end_ids=sorted(parts.end_ids))
    body = ChatRequest.model_validate({"messages": MESSAGES, "tools": TOOLS})
    matcher = grammars.compile(Tools.of(body).constraint()).start(parts.end_ids)
    continuation = parts.vocab - 1  # an id of the padding, or an ordinary token
    for token in (*parts.tokenizer.encode("Hi", add_special_tokens=False), continuation, 200):
        bits = np.unpackbits(matcher.allowed(), bitorder="little")
        assert bits[: parts.vocab].all()
        matcher.advance(token)


def test_conversation_for_templates_with_and_without_tools():
    body = ChatRequest.model_validate(
        {
            "messages": [
                *MESSAGES,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "warm"}]},
            ],
            "tools": TOOLS,
        }
    )
    tools = Tools.of(body)
    template = """{% if tools %}..{% endif %}<tool_call>\\n{"name": "..", "arguments": ..}"""
    assert format_of(template) is HERMES
    assert not format_of("{{ message.content }}")
    messages = [turn.fields for turn in conversation(body.messages, tools, template=template)]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    messages = [turn.fields for turn in conversation(body.messages, tools, template="{{ message.content }}")]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert '"name": "weather"' in messages[0]["content"]
    assert messages[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert messages[3]["content"].count("<tool_response>") == 2
