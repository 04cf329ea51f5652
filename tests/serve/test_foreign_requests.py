"""Requests as clients of other servers send them: null fields, fields without effect, and copied conversations."""

import logging

import httpx
import openai
import pytest

from outrider.serve.openai.base import unused_fields
from outrider.serve.openai.schema import ChatRequest, CompletionRequest
from tests.helpers.serving import serving, wait_until

USER = {"role": "user", "content": "What is 1 + 1?"}
HEADER = "x-outrider-unused-fields"
MARKERS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
IGNORED = {
    "service_tier": "auto",
    "store": True,
    "prompt_cache_key": "a",
    "safety_identifier": "b",
    "verbosity": "medium",
    "modalities": ["text"],
    "best_of": 1,
    "repeat_penalty": 1.0,
    "mirostat": 0,
    "prediction": {"type": "content", "content": "x"},
}
NOT_HONORED = {  # other values of these fields would change the output
    "verbosity": "low",
    "modalities": ["text", "audio"],
    "best_of": 2,
    "repeat_penalty": 1.1,
    "mirostat": 2,
    "typical_p": 0.9,
    "use_beam_search": True,
    "skip_special_tokens": False,
    "functions": [{"name": "now"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "top_k": -2,
    "seed": -2,
    "max_tokens": -2,
}


def chat(server, **body):
    body = {"messages": [USER], "max_tokens": 2, "temperature": 0, "return_token_ids": True, **body}
    return httpx.post(server[0] + "/v1/chat/completions", json=body, timeout=60)


def prompt_of(server, response):
    assert response.status_code == 200, response.text
    return server[1].codec.tokenizer.decode(response.json()["choices"][0]["prompt_token_ids"])


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_null_is_absent_in_every_optional_field(body):
    required = {"messages": [USER]} if body is ChatRequest else {"prompt": "x"}
    optional = [name for name, field in body.model_fields.items() if name not in required and not field.is_required()]
    parsed = body.model_validate(required | dict.fromkeys([*optional, "field_of_tomorrow"]))
    assert parsed == body.model_validate(required)
    assert not unused_fields(parsed)


def test_null_is_absent_on_the_wire(server):
    fields = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "stream", "top_k", "stop_token_ids")
    assert chat(server, **dict.fromkeys(fields), tool_choice=None, tools=None).status_code == 200
    whole = httpx.post(server[0] + "/v1/completions", json={"prompt": "x", "max_tokens": None, "ignore_eos": True})
    assert whole.json()["usage"]["completion_tokens"] == 16  # the default
    for required in ("messages", "role"):
        body = {"messages": None} if required == "messages" else {"messages": [USER | {"role": None}]}
        assert chat(server, **body).json()["error"]["param"].endswith(required)


def test_fields_without_effect_are_listed(server, caplog):
    plain = chat(server)
    assert HEADER not in plain.headers
    with caplog.at_level(logging.INFO, logger="outrider.serve.requests"):
        response = chat(server, **IGNORED)
        wait_until(lambda: caplog.records)  # the line is logged after the answer is sent
    assert response.json()["choices"] == plain.json()["choices"]
    assert set(response.headers[HEADER].split(", ")) == set(IGNORED)
    assert set(caplog.records[-1].fields["unused_fields"].split(",")) == set(IGNORED)
    message = USER | {"annotations": [], "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
    listed = chat(server, messages=[message], stream=True, stream_options={"include_obfuscation": False}).headers[
        HEADER
    ]
    assert listed == "stream_options.include_obfuscation, messages.annotations, messages.content.cache_control"


@pytest.mark.parametrize("field", NOT_HONORED)
def test_a_field_that_would_change_the_output_is_an_error(server, field):
    error = chat(server, **{field: NOT_HONORED[field]}).json()["error"]
    assert error["param"] == field
    assert error["message"]


def test_minus_one_is_the_default(server):
    response = chat(server, top_k=-1, seed=-1, temperature=1)
    assert response.status_code == 200
    assert HEADER not in response.headers
    body = {"prompt": "x", "max_tokens": -1, "ignore_eos": True}
    usage = httpx.post(server[0] + "/v1/completions", json=body, timeout=60).json()["usage"]
    assert usage["total_tokens"] == 256  # the whole context
    assert chat(server, max_tokens=0).json()["error"]["message"].startswith("max_tokens is 0")


def test_strict_refuses_fields_without_effect():
    with serving({"k": 0}, strict=True) as strict:
        for field, value in IGNORED.items():
            error = chat(strict, **{field: value}).json()["error"]
            assert error["param"] == field
            assert "--strict" in error["message"]
        assert chat(strict, temperature=None).status_code == 200


COPIED = {  # messages as other servers return them
    "OpenAI": {"content": "Two.", "refusal": None, "annotations": [], "audio": None, "function_call": None},
    "DeepSeek": {"content": "Two.", "reasoning_content": "one and one"},
    "vLLM": {"content": "Two.", "reasoning": "one and one", "tool_calls": [], "refusal": None},
    "OpenRouter": {"content": "Two.", "reasoning": None, "reasoning_details": [{"type": "x"}]},
    "LiteLLM": {"content": "Two.", "provider_specific_fields": {"a": 1}, "thinking_blocks": None},
    "a refusal": {"content": None, "refusal": "Two."},
    "parts": {"content": [{"type": "text", "text": "Tw"}, {"type": "text", "text": "o."}]},
    "a field of tomorrow that is null": {"content": "Two.", "hologram": None},
}


@pytest.mark.parametrize("origin", COPIED)
def test_an_answer_of_another_server_is_taken_as_it_is(server, monkeypatch, origin):
    monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", MARKERS)
    messages = [USER, {"role": "assistant", **COPIED[origin]}, USER]
    text = f"<user>{USER['content']}<assistant>Two.<user>{USER['content']}<answer>"
    assert prompt_of(server, chat(server, messages=messages)) == text


def test_reasoning_reaches_the_templates_that_write_it(server, monkeypatch):
    template = MARKERS.replace("{{ m.content }}", "{{ m.reasoning_content or '' }}|{{ m.content }}")
    monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", template)
    for field in ("reasoning_content", "reasoning"):
        messages = [USER, {"role": "assistant", "content": "Two.", field: "one and one"}, USER]
        assert "<assistant>one and one|Two." in prompt_of(server, chat(server, messages=messages))


def test_the_last_message_is_continued(server, monkeypatch):
    monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", MARKERS)
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    beginning = f"<user>{USER['content']}<assistant>The answer is"
    for fields in ({"add_generation_prompt": False}, {}):
        assert prompt_of(server, chat(server, messages=messages, continue_final_message=True, **fields)) == beginning
    assert prompt_of(server, chat(server, messages=messages, add_generation_prompt=False)) == beginning
    assert prompt_of(server, chat(server, messages=messages)) == beginning + "<answer>"
    closed = MARKERS.replace("{{ m.content }}", "{{ m.content | trim }}<end>")
    monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", closed)
    response = chat(server, messages=messages, continue_final_message=True)
    assert prompt_of(server, response) == beginning.replace("?<", "?<end><")
    both = chat(server, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.json()["error"]["param"] == "add_generation_prompt"
    assert chat(server, continue_final_message=True).json()["error"]["param"] == "continue_final_message"


def test_developer_messages_are_system_messages_unless_the_template_knows_them(server, monkeypatch):
    tokenizer = server[1].codec.tokenizer
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    monkeypatch.setattr(tokenizer, "chat_template", MARKERS)
    assert prompt_of(server, chat(server, messages=messages)).startswith("<system>Be brief.")
    monkeypatch.setattr(tokenizer, "chat_template", MARKERS + "{# developer #}")
    assert prompt_of(server, chat(server, messages=messages)).startswith("<developer>Be brief.")


def test_a_name_is_written_or_an_error(server, monkeypatch):
    tokenizer = server[1].codec.tokenizer
    messages = [USER | {"name": "Ann"}]
    monkeypatch.setattr(tokenizer, "chat_template", MARKERS)
    error = chat(server, messages=messages).json()["error"]
    assert error["param"] == "messages.0"
    assert "drops its name" in error["message"]
    monkeypatch.setattr(tokenizer, "chat_template", MARKERS.replace("{{ m.content", "{{ m.name }}: {{ m.content"))
    assert "Ann: " in prompt_of(server, chat(server, messages=messages))


def test_a_result_needs_its_call(server):
    result = {"role": "tool", "tool_call_id": "c2", "content": "x"}
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}, "index": 0}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    error = chat(server, messages=[USER, calls, result]).json()["error"]
    assert error["param"] == "messages.2.tool_call_id"
    assert "'c2'" in error["message"]
    assert chat(server, messages=[USER, calls, result | {"tool_call_id": "c1", "name": "now"}, USER]).status_code == 200


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("image_url", "images are not supported by this model; send text only"),
        ("input_audio", "audio is not supported by this model; send text only"),
        ("file", "files are not supported by this model; send text only"),
    ],
)
def test_parts_that_are_no_text(client, kind, message):
    content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        client.chat.completions.create(model="nano", messages=[{"role": "user", "content": content}])
    assert raised.value.param == "messages.0.content.1"


def test_routes_that_are_not_supported(client):
    with pytest.raises(openai.NotFoundError, match="/v1/files is not supported; send each"):
        client.files.list()
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings is not supported; send the request"):
        client.embeddings.create(model="nano", input="x")
