"""The errors of requests that the server rejects."""

import json

import httpx
import openai
import pytest

INVALID_COMPLETIONS = {
    "unknown field": ({"prompt": "x", "temprature": 1}, "temprature"),
    "out of range": ({"prompt": "x", "top_p": 0}, "top_p"),
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list of prompts": ({"prompt": []}, "prompt"),
    "one of two prompts is empty": ({"prompt": ["a", ""]}, "prompt"),
    "prompt with unknown token": ({"prompt": [99999999]}, "prompt"),
    "too many prompts": ({"prompt": ["x"] * 30}, "prompt"),
    "lone surrogate in one of two prompts": ({"prompt": ["x", "\ud800"]}, "prompt.1"),
    "lone surrogate in stop": ({"prompt": "x", "stop": ["\udfff"]}, "stop.0"),
    "lone surrogate in logit_bias key": ({"prompt": "x", "logit_bias": {"\ud800": 1}}, "logit_bias"),
    "logit_bias key is not a number": ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    "logit_bias too large": ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    "logit_bias of unknown token": ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias"),
    "logit_bias key has too many digits": ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    "too many stop strings": ({"prompt": "x", "stop": ["a"] * 100}, "stop"),
    "empty stop string": ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    "stop_token_ids with unknown token": ({"prompt": "x", "stop_token_ids": [99999999]}, "stop_token_ids"),
    "min_tokens above max_tokens": ({"prompt": "x", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    "min_tokens above remaining context": ({"prompt": "x " * 20, "max_tokens": 256, "min_tokens": 250}, "min_tokens"),
    "unknown proposer": ({"prompt": "x", "proposer": "oracle"}, "proposer"),
    "unknown verifier": ({"prompt": "x", "verifier": "oracle"}, "verifier"),
    "stream_options without stream": ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    "empty structured_outputs": ({"prompt": "x", "structured_outputs": {}}, "structured_outputs"),
    "invalid regex": ({"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    "empty choice": ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs"),
    "constraint and forbidden token": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "logit_bias": {"5": -100}},
        "logit_bias",
    ),
    "constraint with min_tokens and stop token": (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 1, "stop_token_ids": [5]},
        "min_tokens",
    ),
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"type": "function", "function": {"name": "now"}}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "[]"}}
INVALID_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "message too long": ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    "lone surrogate in message": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content"),
    "call arguments are not an object": (
        {"messages": [*CHAT["messages"], {"role": "assistant", "tool_calls": [CALL]}]},
        "messages",
    ),
    "top_logprobs without logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    "max_tokens too large": (CHAT | {"max_tokens": 10**6}, "max_tokens"),
    "max_completion_tokens too large": (CHAT | {"max_completion_tokens": 10**6}, "max_completion_tokens"),
    "max_tokens and max_completion_tokens differ": (
        CHAT | {"max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
    ),
    "response_format and structured_outputs": (
        CHAT | {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
    ),
    "invalid schema in response_format": (
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "b"}}}},
        "response_format",
    ),
    "invalid structured_outputs": (CHAT | {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    "required call without tools": (CHAT | {"tool_choice": "required"}, "tool_choice"),
    "tool_choice not in tools": (
        CHAT | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
    ),
    "two tools with one name": (CHAT | {"tools": [TOOL, TOOL]}, "tools"),
    "invalid schema in tool": (
        CHAT | {"tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "b"}}}]},
        "tools",
    ),
    "tools and response_format": (
        CHAT | {"tools": [TOOL], "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "tools and structured_outputs": (
        CHAT | {"tools": [TOOL], "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    "n too large": (CHAT | {"n": 30}, "n"),
}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        pytest.param(path, *case, id=f"{path}: {name}")
        for path, cases in (("completions", INVALID_COMPLETIONS), ("chat/completions", INVALID_CHATS))
        for name, case in cases.items()
    ],
)
def test_error_names_invalid_field(server, path, body, field):
    content = json.dumps(body)  # httpx cannot encode lone surrogates
    response = httpx.post(f"{server[0]}/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"]
    assert error["type"] == "invalid_request_error"


TOKENS = "use a string, a list of strings, token ids, or a list of lists of token ids"
TYPES = "use an object of a type that this server supports: text, json_object or json_schema"
HELPFUL = [  # body, field, message
    ({"prompt": [-1]}, "prompt", "token id -1 is not in the vocabulary of 12288; use ids from 0 to 12287"),
    ({"prompt": [1, "a"]}, "prompt", f"prompt: {TOKENS}"),
    ({"prompt": "x", "stop": [5]}, "stop", "stop: use a string, or a list of strings"),
    ({"prompt": "x", "k": "4"}, "k", "k: use a whole number, not a string"),
    ({"prompt": "x", "k": True}, "k", "k: use a whole number, not a boolean"),
    ({"prompt": "x", "seed": 2**63}, "seed", "seed: use a number below 9223372036854775808"),
    (
        CHAT | {"max_completion_tokens": 0},
        "max_completion_tokens",
        "max_completion_tokens is 0; use at least 1, or -1 for the rest of the context",
    ),
    (
        CHAT | {"max_tokens": 10**30},
        "max_tokens",
        f"max_tokens is {10**30}; use a whole number below 2**63",
    ),
    (CHAT | {"logit_bias": {"5": -101}}, "logit_bias", "logit_bias.5: use a number from -100 (never) to 100"),
    (
        {"messages": [{"role": "user"}]},
        "messages.0",
        "messages.0: the message has no content; give content or tool_calls",
    ),
    (
        CHAT | {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "response_format.json_schema: this field is missing; add it",
    ),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format", f"response_format: {TYPES}"),
]


@pytest.mark.parametrize(("body", "field", "message"), HELPFUL)
def test_message_says_what_to_send(server, body, field, message):
    path = "chat/completions" if "messages" in body else "completions"
    error = httpx.post(f"{server[0]}/v1/{path}", json=body).json()["error"]
    assert (error["param"], error["message"]) == (field, message)


def test_exception_of_chat_template_is_status_400(server, monkeypatch):
    url, async_llm = server
    template = "{{ raise_exception('System role not supported') }}"
    monkeypatch.setattr(async_llm.codec.tokenizer, "chat_template", template)
    body = {"messages": [{"role": "system", "content": "Be brief."}]}
    response = httpx.post(url + "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "System role not supported" in response.json()["error"]["message"]


def test_unknown_model_is_status_404(client):
    with pytest.raises(openai.NotFoundError, match="use 'nano'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])
    assert raised.value.param == "model"
    assert [model.id for model in client.models.list()] == ["nano"]
    assert client.models.retrieve("nano").id == "nano"


def test_unknown_route_and_wrong_method_name_the_list_of_routes(server):
    unknown = httpx.post(server[0] + "/v1/nothing", json={"input": "x"})
    assert (unknown.status_code, unknown.json()["error"]["message"]) == (
        404,
        "there is no such route; /docs lists all routes",
    )
    wrong = httpx.get(server[0] + "/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert "does not take this method; /docs lists" in wrong.json()["error"]["message"]


def test_detokenize_returns_the_text_of_tokens_or_names_an_unknown_one(server):
    tokens = httpx.post(server[0] + "/tokenize", json={"prompt": "def add(a, b):"}).json()["tokens"]
    response = httpx.post(server[0] + "/detokenize", json={"tokens": tokens})
    assert response.json() == {"prompt": "def add(a, b):"}
    unknown = httpx.post(server[0] + "/detokenize", json={"tokens": [99999999]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "tokens")
    assert "is not in the vocabulary" in unknown.json()["error"]["message"]
