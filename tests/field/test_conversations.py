"""Conversations as agents send them, to chat templates that take less than they do (situation D18).

Reported for llama.cpp (issue 27367), Command Code (issue 820) and Jan (issue 6254): a system message after the first
turn ended in status 500, and parts of messages were lost. The right answer is a prompt with every part, or an error 400
that names the message.
"""

import httpx
import pytest

from tests.helpers.serving import serving

ROLES = "{{ '<' + m.role + '>' + m.content }}"
# Takes a system message at the beginning; then user and assistant alternate.
STRICT = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system message must be first') }}{% endif %}"
    "{% if m.role != 'system' and (m.role == 'user') != ((loop.index0 - start) % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + ROLES + "{% endfor %}"
)
# Takes no system message.
NO_SYSTEM = STRICT.replace("and not loop.first", "")
# Writes what it knows and drops the rest.
LENIENT = (
    "{% for m in messages if m.role in ('user', 'assistant') or m.role == 'system' and loop.first %}"
    + ROLES
    + "{% endfor %}"
)
ANY = "{% for m in messages %}" + ROLES + "{% endfor %}"
TEMPLATES = {"strict": STRICT, "no system": NO_SYSTEM, "lenient": LENIENT, "any role": ANY}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATIONS = {  # situation: messages, the texts of all parts
    "system message after the first turn": (
        [
            {"role": "user", "content": "alpha"},
            {"role": "assistant", "content": "beta"},
            {"role": "system", "content": "gamma"},
            {"role": "user", "content": "delta"},
        ],
        ["alpha", "beta", "gamma", "delta"],
    ),
    "two system messages at the beginning": (
        [
            {"role": "system", "content": "alpha"},
            {"role": "system", "content": "beta"},
            {"role": "user", "content": "gamma"},
        ],
        ["alpha", "beta", "gamma"],
    ),
    "developer message at the beginning": (
        [{"role": "developer", "content": "alpha"}, {"role": "user", "content": "beta"}],
        ["alpha", "beta"],
    ),
    "developer message after the first turn": (
        [
            {"role": "user", "content": "alpha"},
            {"role": "assistant", "content": "beta"},
            {"role": "developer", "content": "gamma"},
            {"role": "user", "content": "delta"},
        ],
        ["alpha", "beta", "gamma", "delta"],
    ),
    "assistant content as parts": (
        [
            {"role": "user", "content": [{"type": "text", "text": "alpha "}, {"type": "text", "text": "beta"}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "gamma "}, {"type": "refusal", "refusal": "delta"}],
            },
            {"role": "user", "content": "epsilon"},
        ],
        ["alpha beta", "gamma delta", "epsilon"],
    ),
    "content null with tool_calls, then a result and a user message": (
        [
            {"role": "user", "content": "alpha"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            {"role": "user", "content": "beta"},
        ],
        ["alpha", '"name": "weather"', '"city": "Oslo"', "sunny", "beta"],
    ),
    "two user turns in a row": (
        [
            {"role": "user", "content": "alpha"},
            {"role": "user", "content": "beta"},
            {"role": "assistant", "content": "gamma"},
            {"role": "assistant", "content": "delta"},
            {"role": "user", "content": "epsilon"},
        ],
        ["alpha", "beta", "gamma", "delta", "epsilon"],
    ),
}


@pytest.fixture(scope="module")
def server():
    with serving({"k": 0}) as (url, async_llm):
        yield url + "/v1/chat/completions", async_llm.codec.tokenizer


def post(server, monkeypatch, template, messages):
    """Send a conversation to a model with this chat template."""
    url, tokenizer = server
    monkeypatch.setattr(tokenizer, "chat_template", template)
    return httpx.post(url, json={"messages": messages, "max_tokens": 1, "return_token_ids": True}, timeout=60)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("situation", CONVERSATIONS)
def test_the_prompt_contains_every_part_in_order(server, monkeypatch, situation, template):
    messages, texts = CONVERSATIONS[situation]
    response = post(server, monkeypatch, TEMPLATES[template], messages)
    assert response.status_code == 200, response.text
    prompt = server[1].decode(response.json()["choices"][0]["prompt_token_ids"])
    places = [prompt.find(text) for text in texts]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("template", "index"),
    [
        ("{{ messages[-1].content }}", 0),  # drops all but the last message
        ("{% for m in messages[:2] %}" + ROLES + "{% endfor %}", 2),  # drops what follows the second one
        ("{% for m in messages if m.role != 'assistant' %}" + ROLES + "{% endfor %}", 1),
        (ANY.replace("{{", "{% if loop.index0 == 1 %}{{ raise_exception('no') }}{% endif %}{{"), 1),
        (ANY.replace("{{", "{% if loop.index0 == 2 %}{{ m.nothing.more }}{% endif %}{{"), 2),
        (ANY.replace("{{", "{% if loop.index0 == 2 %}{{ 1 // 0 }}{% endif %}{{"), 2),
    ],
)
def test_a_message_that_the_template_cannot_take_is_named(server, monkeypatch, template, index):
    messages, _ = CONVERSATIONS["assistant content as parts"]
    response = post(server, monkeypatch, template, messages)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == f"messages.{index}"
    assert error["message"].startswith(f"messages.{index}: the model's chat template ")
