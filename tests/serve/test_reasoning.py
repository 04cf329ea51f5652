"""Reasoning: split from answers, streamed and not, with tools and constraints, and turned on and off."""

import json
from itertools import pairwise

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.serve.openai.call_formats import HERMES
from outrider.serve.openai.output import OutputForm, OutputParser
from outrider.serve.openai.reasoning import reasoning_of
from outrider.serve.openai.template_options import template_variables
from tests.helpers.scripted import base_llm, scripted_llm
from tests.helpers.serving import serving

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    '{# tools <tool_call> "name" "arguments" #}'
    "<answer>{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = (  # as in DeepSeek R1 and QwQ
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{# </think> #}"
    "{% if add_generation_prompt %}<answer><think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now"}}]
HARMONY = "<|channel|>analysis<|message|>"
CASES = {  # template, end of the prompt, text, reasoning, content
    "open marker": ("</think>", "<a>", "<think>\nSo <b> \n\n</think>\n\nYes. </think>", "So <b>", "Yes. </think>"),
    "inside": ("</think>", "<think>\n", "\nSo\n </think>\n\nYes.", "So", "Yes."),
    "unfinished": ("</think>", "<think>\n", " So </thi", "So </thi", ""),
    "no reasoning": ("</think>", "<a>", " <thin> air", "", " <thin> air"),
    "Mistral": ("[/THINK]", "", "[THINK]So[/THINK]Yes.", "So", "Yes."),
    "GPT-OSS": (
        HARMONY,
        "<|start|>assistant",
        f"{HARMONY}So<|start|>assistant<|channel|>commentary<|message|>Well.<|start|>assistant{HARMONY} then"
        "<|start|>assistant<|channel|>final<|message|>Yes.",
        "Sothen",
        "Well.Yes.",
    ),
}


def parse(form, parts):
    parser = OutputParser(form)
    parsed = {"reasoning_content": "", "content": "", "arguments": ""}
    for i, part in enumerate(parts, 1):
        for delta in parser.add_text(part, last=i == len(parts)):
            for call in delta.pop("tool_calls", ()):
                parsed["arguments"] += call["function"]["arguments"]
            for name, text in delta.items():
                parsed[name] += text
    return *parsed.values(), parser


@pytest.mark.parametrize("calls", [None, HERMES])
@pytest.mark.parametrize("name", CASES)
def test_reasoning_is_split_from_the_answer_in_every_division(name, calls):
    template, end, text, reasoning, content = CASES[name]
    form = OutputForm(calls=calls, reasoning=reasoning_of(template, end))
    if calls and content:
        text += CALL
    expected = (reasoning, content, "{}" if calls and content else "")

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(st.sets(st.integers(1, len(text) - 1)))
    def check(cuts):
        ends = [0, *sorted(cuts), len(text)]
        assert parse(form, [text[start:stop] for start, stop in pairwise(ends)])[:3] == expected

    check()
    assert parse(form, list(text))[:3] == expected
    *_, parser = parse(form, [text])
    thought = sum(stop - start for start, stop in parser._reasoning.spans)
    assert parser.reasoning_tokens(list(text), "".join) == thought
    assert bool(thought) == bool(reasoning)


def test_a_prompt_that_closes_the_reasoning_has_none():
    assert reasoning_of(TEMPLATE, "<think>\n\n</think>\n\n") is None
    assert reasoning_of("{{ messages }}", "") is None


def test_the_variables_of_a_template_are_found():
    template = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ messages }}{{ thinking }}"
    assert template_variables(template) == {"thinking"}
    assert template_variables("{% generation %}{{ messages }}{% endgeneration %}") == frozenset()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_llm(tmp_path_factory.mktemp("base"), "Qwen2.5-0.5B")


def answer(base, text, template=TEMPLATE, **body):
    """Return the whole response and the joined stream of a model that answers with this text."""
    tokenizer = base.parts.tokenizer
    script = [*tokenizer.encode(text, add_special_tokens=False), *base.parts.end_ids]
    tokenizer.chat_template = template
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 400, **body}
    with serving(llm=scripted_llm(base, script, k=3)) as (url, _):
        url += "/v1/chat/completions"
        whole = httpx.post(url, json=body, timeout=60).json()
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        lines = httpx.post(url, json=body | stream, timeout=60).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    joined = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            for name, part in choice["delta"].items():
                joined[name] = (joined.get(name) or "") + part if isinstance(part, str) else part or joined.get(name)
    return whole, joined, chunks[-1].get("usage") if chunks else None


def test_reasoning_content_and_calls(base):
    text = f"<think>\nLet me {CALL} see.\n</think>\n\nI look.{CALL}"
    whole, joined, usage = answer(base, text, tools=TOOLS)
    message = whole["choices"][0]["message"]
    for each in (message, joined):
        assert each["reasoning_content"] == f"Let me {CALL} see."
        assert each["content"] == "I look."
        assert [call["function"] for call in each["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    thought = base.parts.tokenizer.encode(text.split("\n\nI")[0], add_special_tokens=False)
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - len(thought)) <= 1
    assert whole["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


@pytest.mark.parametrize(
    ("text", "begin", "reasoning", "content"),
    [
        ("So it is.\n</think>\n\nYes.", None, "So it is.", "Yes."),
        (" it is.\n</think>\n\nYes.", "<think>\nSo", " it is.", "Yes."),
        (" sir.", "<think>\nSo it is.\n</think>\n\nYes,", None, " sir."),
    ],
)
def test_a_prompt_may_open_the_reasoning(base, text, begin, reasoning, content):
    messages = [{"role": "user", "content": "What does <think> mean?"}]
    fields = {"messages": messages}
    if begin:
        fields = {"messages": [*messages, {"role": "assistant", "content": begin}], "continue_final_message": True}
    whole, joined, _ = answer(base, text, OPENED, **fields)
    for message in (whole["choices"][0]["message"], joined):
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_reasoning_that_the_limit_cuts(base):
    whole, joined, usage = answer(base, "So it is, and so on.", OPENED, max_tokens=4)
    for message in (whole["choices"][0]["message"], joined):
        assert "So it is, and so on.".startswith(message["reasoning_content"])
        assert message["content"] is None
    assert whole["choices"][0]["finish_reason"] == "length"
    assert usage["completion_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 4


def test_cached_tokens_are_those_of_the_prefix_cache(client):
    prompt = "def add(a, b):\n    return a + b\n" * 8
    usages = [client.completions.create(model="nano", prompt=prompt, max_tokens=2).usage for _ in range(2)]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert usages[0].prompt_tokens / 2 < usages[1].prompt_tokens_details.cached_tokens < usages[1].prompt_tokens


def test_a_forced_call_and_a_schema_come_after_the_reasoning(base):
    whole, _, _ = answer(base, f"<think>So</think>{CALL}", tools=TOOLS, tool_choice="required")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("So", None, 1)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    for text, reasoning in (("<think>{a}</think>\n\ntrue", "{a}"), ("Well", None)):
        whole, joined, _ = answer(base, text, response_format=schema)
        message = whole["choices"][0]["message"]
        assert message.get("reasoning_content") == joined.get("reasoning_content") == reasoning
        assert message["content"] in ("true", "false")


@pytest.mark.parametrize("off", [{"enable_thinking": False}, {"reasoning_effort": "none"}])
def test_reasoning_is_turned_off(base, off):
    for fields in (off, {"chat_template_kwargs": {"enable_thinking": False}}):
        whole, _, _ = answer(base, "<think>So</think>Yes.", **fields)
        assert whole["choices"][0]["message"]["content"] == "<think>So</think>Yes."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_an_error(base, fields, param):
    whole, _, _ = answer(base, "Yes.", **fields)
    assert whole["error"]["param"] == param
