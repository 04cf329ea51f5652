"""Function calls in the formats that models are trained on."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serve.openai.call_formats import HERMES, format_of
from outrider.serve.openai.schema import ChatRequest
from outrider.serve.openai.tool_calls import ToolCallParser
from outrider.serve.openai.tools import Tools
from tests.helpers.serving import serving

CALLS = [("weather", '{"city": "O}]\\"\\n</tool_call>", "days": [1, {"a": 2}]}'), ("now", "{}")]
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"
ARGUMENTS = '{"city": "O}]<\\"\\n<b>", "days": [1, {"a": 2}], "ok": true}'
VALUES = json.loads(ARGUMENTS)
LIST = 'weather(city="O}]<\\"\\n<b>", days=[1, {"a": 2}], ok=True), now()'
CITY = {"city": {"type": "string"}, "days": {}, "ok": {"type": "boolean"}}
FUNCTIONS = {"weather": {"type": "object", "properties": CITY}, "now": None}
PARAMS = {  # formats whose arguments are written one by one: see `CASES`
    "Qwen3-Coder": (
        "tools <tool_call> <function= <parameter=",
        "Ok ",
        "Ok "
        + XML.format(
            "weather",
            f"<parameter=city>\n{VALUES['city']}\n</parameter>\n"
            '<parameter=days>\n[1, {"a": 2}]\n</parameter>\n<parameter=ok>\ntrue\n</parameter>\n',
        )
        + "\n"
        + XML.format("now", ""),
    ),
    "pythonic": ("tools [func_name1(params_name1=", "", f"[{LIST}]"),
    "LFM2": ("tools <|tool_list_start|>", "Ok ", f"Ok <|tool_call_start|>[{LIST}]<|tool_call_end|>"),
}
CASES = {  # a part of a chat template with this format, the content, and the text of the first call and of both
    "Hermes": (
        'tools <tool_call> "name" "arguments"',
        "Let me see.",
        'Let me see.<tool_call>\n{"name": "weather", "arguments": A0}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": A1}\n</tool_call>',
    ),
    "Llama 3": ('tools ipython {"name": x, "parameters": y}', "", '{"name": "weather", "parameters": A0}'),
    "Mistral": ("tools [TOOL_CALLS] [ARGS]", "Ok ", "Ok [TOOL_CALLS]weather[ARGS]A0[TOOL_CALLS]now[ARGS]A1"),
    "Mistral list": (
        "tools [TOOL_CALLS] [",
        "Ok ",
        'Ok [TOOL_CALLS] [{"name": "weather", "arguments": A0}, {"name": "now", "arguments": A1}]',
    ),
    "DeepSeek": (
        f"tools <｜tool▁calls▁begin｜>{SEP}",
        "Ok",
        f"Ok<｜tool▁calls▁begin｜>{BEGIN}weather{SEP}A0{END}{BEGIN}now{SEP}A1{END}<｜tool▁calls▁end｜>",
    ),
    "DeepSeek R1": (
        f"tools <｜tool▁calls▁begin｜>{SEP} ```json",
        "Ok",
        f"Ok<｜tool▁calls▁begin｜>{BEGIN}function{SEP}weather\n```json\nA0\n```{END}"
        f"\n{BEGIN}function{SEP}now\n```json\nA1\n```{END}<｜tool▁calls▁end｜>",
    ),
    "GPT-OSS": (
        "tools <|channel|>commentary to=functions.",
        "Ok",
        "Ok<|channel|>commentary to=functions.weather <|constrain|>json<|message|>A0",
    ),
}


def parse(format, parts):
    """Return the content and the calls of a stream, which are those that the parser has."""
    parser = ToolCallParser(format, FUNCTIONS)
    content = ""
    calls = {}
    for i, part in enumerate(parts, 1):
        for delta in parser.add_text(part, last=i == len(parts)):
            content += delta.get("content", "")
            for each in delta.get("tool_calls", ()):
                call = calls.setdefault(each["index"], {"arguments": ""})
                call["name"] = each["function"].get("name", call.get("name"))
                call["arguments"] += each["function"]["arguments"]
    streamed = [(call["name"], call["arguments"]) for call in calls.values()]
    assert streamed == [(call.name, call.arguments) for call in parser.calls]
    return content, streamed


@pytest.mark.parametrize("name", [*CASES, *PARAMS])
def test_calls_of_each_format_are_parsed_from_every_split(name):
    template, content, text = (CASES | PARAMS)[name]
    calls = [("weather", ARGUMENTS), ("now", "{}")] if name in PARAMS else CALLS
    text = text.replace("A0", CALLS[0][1]).replace("A1", CALLS[1][1])
    expected = (content, calls[: 1 + ("now" in text)])
    format = format_of(template)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.sets(st.integers(1, len(text) - 1)))
    def check(cuts):
        ends = [0, *sorted(cuts), len(text)]
        assert parse(format, [text[start:end] for start, end in pairwise(ends)]) == expected

    check()
    assert parse(format, list(text)) == expected
    assert all(parse(format, [text[:i], text[i:]]) == expected for i in range(len(text)))


@pytest.mark.parametrize("name", [*CASES, *PARAMS])
def test_required_call_that_is_cut_has_no_content(name):
    """A marker that the end of the output has cut is no text of the answer."""
    template, content, text = (CASES | PARAMS)[name]
    format = format_of(template)
    for end in range(1, len(text.removeprefix(content))):
        parser = ToolCallParser(format, FUNCTIONS, required=True)
        assert not any("content" in delta for delta in parser.add_text(text.removeprefix(content)[:end], last=True))


@pytest.fixture(scope="module")
def codec():
    with serving() as (_, async_llm):
        yield async_llm.codec


def takes(codec, constraint, text):
    """Return whether a constraint takes a text and lets it end."""
    matcher = codec.prepare(constraint).start(codec.end_ids)
    for token in codec.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.allowed()[token >> 3] >> (token & 7) & 1:
            return False
        matcher.advance(token)
    return True


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", CASES)
def test_the_grammar_takes_the_calls_of_each_format_and_no_others(codec, name, choice):
    template, content, text = CASES[name]
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    functions = [{"name": "weather", "parameters": city}, {"name": "now"}]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    constraint = Tools.of(ChatRequest.model_validate(body)).constraint(format_of(template))

    text = text.removeprefix(content if choice == "required" else "").replace("A1", "{}")
    assert takes(codec, constraint, text.replace("A0", '{"city": "Oslo"}'))
    assert not takes(codec, constraint, text.replace("A0", '{"city": "Bonn"}'))
    assert takes(codec, constraint, "Just {text.") == (choice == "auto")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", PARAMS)
def test_the_grammar_takes_arguments_that_are_written_one_by_one(codec, name, choice):
    template, content, text = PARAMS[name]
    schema = {"type": "object", "properties": CITY | {"days": {"type": "array"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    tools.append({"type": "function", "function": {"name": "now"}})
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": choice}
    constraint = Tools.of(ChatRequest.model_validate(body)).constraint(format_of(template))
    text = text.removeprefix(content if choice == "required" else "")
    assert takes(codec, constraint, text)
    for fault in (("ok", "no"), ("true", "1"), ("True", "1"), ("[1, {", "{1, {")):
        assert fault[0] not in text or not takes(codec, constraint, text.replace(*fault))


def test_a_template_without_a_known_format_has_none():
    assert format_of("{{ message.content }}") is None
    assert format_of('tools <tool_call> "name" "arguments"') is HERMES


def test_a_text_that_does_not_begin_like_a_call_is_content():
    llama = format_of(CASES["Llama 3"][0])
    assert parse(llama, ['{"na', 'me": 1}']) == ('{"name": 1}', [])
    assert parse(llama, ['{"na']) == ('{"na', [])
