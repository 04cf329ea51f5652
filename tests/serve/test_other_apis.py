"""Anthropic's Messages API and OpenAI's Responses API: the answers of a chat in other forms."""

import json

import httpx
import openai
import pytest

from outrider.serve.anthropic.writer import MessageWriter
from outrider.serve.openai.call_formats import HERMES
from outrider.serve.openai.tool_calls import ToolCallParser
from tests.helpers.scripted import base_llm, scripted_llm
from tests.helpers.serving import serving

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function }}{% endfor %}{% endfor %}<answer>"
    '{# tools <tool_call> "name" "arguments" <think> </think> #}'
)
TEXT = '<think>\nSo\n</think>\n\nI look.<tool_call>\n{"name": "now", "arguments": {"in": "Oslo"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"in": {"type": "string"}}, "required": ["in"]}
RESULT = "12:00"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """The URL of a server whose model reasons, writes text, and calls a function."""
    base = base_llm(tmp_path_factory.mktemp("base"), "Qwen2.5-0.5B")
    base.parts.tokenizer.chat_template = TEMPLATE
    script = [*base.parts.tokenizer.encode(TEXT, add_special_tokens=False), *base.parts.end_ids]
    with serving(llm=scripted_llm(base, script, k=3)) as (url, _):
        yield url


def message(url, path="", **fields):
    tools = [{"name": "now", "input_schema": SCHEMA}]
    body = {"max_tokens": 200, "temperature": 0, "messages": [{"role": "user", "content": "When?"}], "tools": tools}
    return httpx.post(f"{url}/v1/messages{path}", json=body | fields, timeout=60)


def events_of(response):
    """Return the events of a stream. Each has its type as its name."""
    events = []
    for text in response.text.strip().split("\n\n"):
        name, data = text.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message_has_blocks(url):
    response = message(url).json()
    thinking, text, call = response["content"]
    assert thinking == {"type": "thinking", "thinking": "So", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "now", {"in": "Oslo"})
    assert (response["stop_reason"], response["stop_sequence"]) == ("tool_use", None)
    assert response["usage"]["output_tokens"] > response["usage"]["speculation"]["target_passes"]


def test_the_events_of_a_message_are_its_blocks(url):
    whole = message(url).json()
    events = events_of(message(url, stream=True))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    blocks = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"] | {"input": ""}
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = {"input_json_delta": "input"}.get(delta["type"], delta["type"].removesuffix("_delta"))
            blocks[event["index"]][field] += delta.get("partial_json", delta.get(field))
    assert [blocks[i].get("thinking") or blocks[i].get("text") for i in range(2)] == ["So", "I look."]
    assert json.loads(blocks[2]["input"]) == {"in": "Oslo"}
    assert [event["type"] for event in events].count("content_block_stop") == 3
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert events[-1] == {"type": "message_stop"}


def test_stop_sequences_and_limits(url):
    response = message(url, stop_sequences=["look"], tools=None).json()
    assert (response["stop_reason"], response["stop_sequence"]) == ("stop_sequence", "look")
    assert response["content"][-1] == {"type": "text", "text": "I "}
    events = events_of(message(url, max_tokens=3, stream=True))
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_a_conversation_of_messages(url):
    answer = message(url).json()["content"]
    result = {"type": "tool_result", "tool_use_id": answer[2]["id"], "content": RESULT}
    turns = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    response = message(url, messages=turns, system=system)
    assert response.status_code == 200, response.text
    counted = message(url, "/count_tokens", messages=turns, system=system, max_tokens=None, temperature=None)
    usage = response.json()["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


INVALID = {
    "max_tokens": {"max_tokens": None},
    "messages.0.content.0": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "messages.0": {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
    "stop_sequences": {"stop_sequences": ["x"] * 17},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    "output_config": {"output_config": {"effort": "high"}},
    "top_n": {"top_n": 1},
}


@pytest.mark.parametrize("field", INVALID)
def test_an_error_of_a_message_names_the_field(url, field):
    response = message(url, **INVALID[field])
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(field)


def test_keys_and_names_of_messages():
    with serving(api_key=["secret"]) as (url, _):
        error = message(url).json()["error"]
        assert error["type"] == "authentication_error"
        assert "x-api-key" in error["message"]
        other = httpx.post(
            url + "/v1/messages",
            headers={"x-api-key": "secret"},
            json={"model": "other", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
        )
        assert (other.status_code, other.json()["error"]["type"]) == (404, "not_found_error")


TOOLS = [{"type": "function", "name": "now", "parameters": SCHEMA}]


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as openai_client:
        yield openai_client


def test_a_response_has_items_and_its_events_have_them(client):
    body = {"model": "nano", "input": "When?", "temperature": 0, "tools": TOOLS}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        types = [event.type for event in stream]
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        reasoning, text, call = response.output
        assert reasoning.content[0].text == "So"
        assert text.content[0].text == response.output_text == "I look."
        assert (call.name, json.loads(call.arguments)) == ("now", {"in": "Oslo"})
        assert response.status == "completed"
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed"
    assert types.count("response.output_item.added") == types.count("response.output_item.done") == 3
    result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": RESULT}
    turns = [{"role": "user", "content": "When?"}, *whole.output, result]
    assert client.responses.create(**body | {"input": turns, "instructions": "Be brief."}).output


def test_a_response_has_a_schema_and_a_limit(client):
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}
    response = client.responses.create(model="nano", input="x", text={"format": schema})
    assert response.output_text in ("true", "false")
    cut = client.responses.create(model="nano", input="x", temperature=0, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("store", {"store": True}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("input.0", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input.1", {"input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "x"}]}),
        ("max_output_tokens", {"max_output_tokens": 10**6}),
        ("tools.0.type", {"tools": [{"type": "web_search"}]}),
        ("reasoning", {"reasoning": {"effort": "high"}}),
    ],
)
def test_an_error_of_a_response_names_the_field(client, param, fields):
    fields = {"input": "x", **fields}
    if param == "input.1":
        fields["input"][1]["output"] = "y"
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="nano", **fields)
    assert raised.value.param == param


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_are_in_the_order_of_the_text_however_it_is_divided(size):
    call = '<tool_call>\n{"name": "now", "arguments": {"in": "Oslo"}}\n</tool_call>'
    text = f"I look.{call}Done.{call}"
    parser = ToolCallParser(HERMES)
    writer = MessageWriter(1)
    for begin in range(0, len(text), size):
        for delta in parser.add_text(text[begin : begin + size], last=begin + size >= len(text)):
            writer.chunk({"id": "1", "model": "m", "choices": [{"delta": delta, "finish_reason": None}]})
    arguments = '{"in": "Oslo"}'
    assert [block.text for block in writer.blocks] == ["I look.", arguments, "Done.", arguments]
