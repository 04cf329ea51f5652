"""The server's forms and functions, asked by the official client."""

from __future__ import annotations

import json

import httpx
import jsonschema
import openai
import pytest

from outrider.core.grammar import Grammars
from outrider.serve.openai.schema import ChatRequest
from outrider.serve.openai.tool_calls import ToolCallParser
from outrider.serve.openai.tools import Tools, conversation, knows_calls
from tests.serve.test_serve import OPTIONS, serving

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "note": {"type": "string", "maxLength": 20}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SHORT = {"3": 4.0}  # the end is likelier
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPTIONS, "max_model_len", 512)
        with serving() as (url, driver):
            yield url, driver


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server[0] + "/v1", api_key="any", max_retries=0) as found:
        yield found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_and_guesses_change_nothing(client, temperature):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    asked = {"model": "nano", "messages": ASK, "response_format": form, "temperature": temperature, "seed": 1}
    free, plain = (client.chat.completions.create(**asked, extra_body=body) for body in ({}, {"k": 0}))
    text = free.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)
    assert free.choices[0].finish_reason == "stop"
    assert text == plain.choices[0].message.content
    assert free.usage.speculation["target_passes"] < plain.usage.speculation["target_passes"]
    parts = client.chat.completions.create(**asked, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text


def test_a_form_that_is_complete_ends_before_min_tokens(client):
    body = {"structured_outputs": {"regex": "[0-9]{3}"}, "min_tokens": 20}
    reply = client.completions.create(model="nano", prompt="1", max_tokens=30, temperature=0, extra_body=body)
    assert reply.choices[0].text.isdigit()
    assert (len(reply.choices[0].text), reply.choices[0].finish_reason) == (3, "stop")


def test_any_object(client):
    reply = client.chat.completions.create(
        model="nano", messages=ASK, response_format={"type": "json_object"}, temperature=0, max_tokens=30
    )
    text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert text.startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)
    free = client.chat.completions.create(
        model="nano", messages=ASK, response_format={"type": "text"}, temperature=0, max_tokens=5
    )
    assert not free.choices[0].message.content.startswith("{")


EXTENSIONS = {
    "regex": (r"[0-9]{3}", lambda text: len(text) == 3 and text.isdigit()),
    "choice": (["yes", "no"], lambda text: text in ("yes", "no")),
    "grammar": ('root ::= "<" ("a" | "b")+ ">"', lambda text: set(text) <= set("<>ab")),
    "json": (SCHEMA, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
}


@pytest.mark.parametrize("name", EXTENSIONS)
@pytest.mark.parametrize("chat", [False, True])
def test_other_forms_by_the_names_that_vllm_gave_them(client, name, chat):
    form, good = EXTENSIONS[name]
    body = {"structured_outputs": {name: form}}
    if chat:
        reply = client.chat.completions.create(
            model="nano", messages=ASK, temperature=0.7, seed=1, max_tokens=60, extra_body=body
        )
        choice, text = reply.choices[0], reply.choices[0].message.content
    else:
        reply = client.completions.create(
            model="nano", prompt="x", temperature=0.7, seed=1, max_tokens=60, extra_body=body
        )
        choice, text = reply.choices[0], reply.choices[0].text
    assert good(text) or choice.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", "named", "one"])
def test_a_call_has_the_functions_schema(client, choice):
    wanted = {"type": "function", "function": {"name": "weather"}} if choice == "named" else "required"
    asked = {"model": "nano", "messages": ASK, "tools": TOOLS, "tool_choice": wanted, "temperature": 0.9, "seed": 4}
    asked |= {"parallel_tool_calls": choice != "one", "logit_bias": SHORT}
    reply = client.chat.completions.create(**asked, max_tokens=150)
    calls = reply.choices[0].message.tool_calls
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.choices[0].message.content is None
    assert len(calls) == 1 or choice == "required"
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), PLACE if call.function.name == "weather" else {})
        assert call.id
        assert call.type == "function"
    streamed, reason, roles = {}, None, []
    for part in client.chat.completions.create(**asked, max_tokens=150, stream=True):
        delta = part.choices[0].delta
        reason = part.choices[0].finish_reason or reason
        roles += [delta.role] if delta.role else []
        for piece in delta.tool_calls or ():
            known = streamed.setdefault(piece.index, {"arguments": ""})
            known |= {"id": piece.id, "name": piece.function.name} if piece.id else {}
            known["arguments"] += piece.function.arguments or ""
    assert [(each["name"], each["arguments"]) for each in streamed.values()] == [
        (call.function.name, call.function.arguments) for call in calls
    ]
    assert reason == "tool_calls"
    assert roles == ["assistant"]


def test_the_clients_own_stream_of_calls(client):
    with client.chat.completions.stream(
        model="nano", messages=ASK, tools=TOOLS, tool_choice="required", logit_bias=SHORT, seed=4, max_tokens=150
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert json.loads(message.tool_calls[0].function.arguments) is not None


def test_a_call_that_is_cut_says_so(client):
    asked = {"model": "nano", "messages": ASK, "tools": TOOLS[:1], "tool_choice": "required", "temperature": 0}
    reply = client.chat.completions.create(**asked, max_tokens=14)
    assert reply.choices[0].finish_reason == "length"
    parts = list(client.chat.completions.create(**asked, max_tokens=14, stream=True))
    assert parts[-1].choices[0].finish_reason == "length"


def test_text_or_calls(client):
    asked = {"model": "nano", "messages": ASK, "temperature": 0, "max_tokens": 20}
    free = client.chat.completions.create(**asked, tools=TOOLS)
    assert free.choices[0].message.content
    assert free.choices[0].message.tool_calls is None
    assert free.choices[0].finish_reason in ("stop", "length")
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == client.chat.completions.create(**asked).choices[0].message.content


def test_a_conversation_with_calls_goes_on(client):
    first = client.chat.completions.create(
        model="nano", messages=ASK, tools=TOOLS, tool_choice="required", logit_bias=SHORT, seed=4, max_tokens=150
    )
    message = first.choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
    reply = client.chat.completions.create(
        model="nano", messages=[*ASK, message, *answers], tools=TOOLS, temperature=0, max_tokens=8
    )
    assert reply.choices[0].finish_reason


WRONG = {
    "two forms": {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    "two ways": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "no way": {"structured_outputs": {}},
    "unknown way": {"structured_outputs": {"guess": "a"}},
    "bad regex": {"structured_outputs": {"regex": "(a"}},
    "huge regex": {"structured_outputs": {"regex": "a{1000000}"}},
    "long regex": {"structured_outputs": {"regex": "ab|" * 100_000}},
    "endless grammar": {"structured_outputs": {"grammar": 'start: "a" start'}},
    "bad schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
    "unknown type": {"response_format": {"type": "yaml"}},
    "form beside tools": {"tools": TOOLS, "response_format": {"type": "json_object"}},
    "no such tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
    "no tools": {"tool_choice": "required"},
    "twins": {"tools": [TOOLS[0], TOOLS[0]]},
    "odd name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "bad parameters": {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]},
    "a user's call": {
        "messages": [{"role": "user", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": ""}}]}]
    },
    "no call's answer": {"messages": [{"role": "tool", "content": "x"}]},
    "no content": {"messages": [{"role": "user"}]},
    "arguments that are none": {
        "messages": [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "["}}]}]
    },
    "a forbidden token": {"response_format": {"type": "json_object"}, "logit_bias": {"5": -100}},
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_named(server, case):
    answer = httpx.post(server[0] + "/v1/chat/completions", json={"messages": ASK, **WRONG[case]}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


SAID = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "note": "}"}}\n</tool_call>'
TWICE = SAID + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_calls_are_read_in_pieces_of_any_size(size):
    calls, said, told = ToolCallParser(), "", {}
    pieces = [TWICE[i : i + size] for i in range(0, len(TWICE), size)]
    for i, piece in enumerate(pieces, 1):
        delta = calls.read(piece, last=i == len(pieces))
        said += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            known = told.setdefault(part["index"], part["function"] | {"arguments": ""})
            known["arguments"] += part["function"]["arguments"]
    assert said == "Let me see."
    assert told == {
        0: {"name": "weather", "arguments": '{"city": "Oslo", "note": "}"}'},
        1: {"name": "now", "arguments": "{}"},
    }
    assert [call.arguments for call in calls.made] == [each["arguments"] for each in told.values()]


def test_what_only_looks_like_a_call_is_text():
    calls = ToolCallParser()
    assert calls.read("a <tool", last=False) == {"content": "a "}
    assert calls.read("_box> <", last=False) == {"content": "<tool_box> "}
    assert calls.read("", last=True) == {"content": "<"}
    assert not calls.made


def allowed(client_tools, text, alone):
    """How many tokens of a text the grammar of tools takes, of how many."""
    parts = alone.parts
    grammars = Grammars(parts.tokenizer, vocab=parts.vocab, end_ids=sorted(parts.end_ids))
    asked = ChatRequest.model_validate({"messages": ASK, "tools": TOOLS, **client_tools})
    tools = Tools.of(asked)
    matcher = grammars.compile(tools.constraint()).start(parts.end_ids)
    tokens = parts.tokenizer.encode(text, add_special_tokens=False)
    for i, token in enumerate(tokens):
        bits = matcher.allowed()
        if not bits[token >> 3] >> (token & 7) & 1:
            return i, len(tokens), matcher
        matcher.advance(token)
    return len(tokens), len(tokens), matcher


def test_a_text_may_turn_into_calls_and_these_keep_to_their_schemas(server):
    alone = server[1].front
    taken, of, matcher = allowed({}, "Just text, with { and < in it.", alone)
    assert taken == of
    assert not matcher.done
    taken, of, matcher = allowed({"parallel_tool_calls": False}, SAID, alone)
    assert taken == of
    assert matcher.done
    taken, of, matcher = allowed({}, TWICE, alone)
    assert taken == of
    assert not matcher.done
    for wrong in (SAID.replace("Oslo", "Bonn"), SAID.replace("weather", "other"), SAID + " and more"):
        taken, of, _ = allowed({}, wrong, alone)
        assert taken < of


def test_templates_that_know_calls_are_given_them():
    asked = ChatRequest.model_validate(
        {
            "messages": [
                *ASK,
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
    tools = Tools.of(asked)
    knowing = """{% if tools %}..{% endif %}<tool_call>\\n{"name": "..", "arguments": ..}"""
    assert knows_calls(knowing)
    assert not knows_calls("{{ message.content }}")
    turns = conversation(asked.messages, tools, known=True)
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert turns[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    turns = conversation(asked.messages, tools, known=False)
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert '"name": "weather"' in turns[0]["content"]
    assert turns[2]["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert turns[3]["content"].count("<tool_response>") == 2
