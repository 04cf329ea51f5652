"""Situations of constraints in which other engines were reported to fail."""

import json

import jsonschema
import pytest

from outrider import Constraint, SamplingParams
from outrider.core.types import FinishReason
from tests.helpers.scripted import base_llm, script_of, scripted_llm

NUM_REQUESTS = 30
SCHEMA = {
    "type": "object",
    "properties": {
        "größe": {"type": "integer", "minimum": 0, "maximum": 99, "description": "Größe in cm: 大きさ"},
        "note": {"type": "string", "maxLength": 8, "description": "naïve ✓ note"},
        "emoji": {"enum": ["😊", "<tool_call>", "é"]},
    },
    "required": ["größe", "note", "emoji"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_llm(tmp_path_factory.mktemp("model"), "Qwen2.5-0.5B")


def answers(llm, **fields):
    """Return the completions of many requests with the schema, run together."""
    constraint = Constraint.json_schema(SCHEMA)
    params = [SamplingParams(seed=i, constraint=constraint, max_tokens=120, **fields) for i in range(NUM_REQUESTS)]
    return llm.generate([f"Answer {i}" for i in range(NUM_REQUESTS)], params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_outside_of_the_grammar(base, temperature):
    """D17: many requests whose drafts the grammar forbids, with special tokens (vllm#27969, #46118, #44006)."""
    special = [base.parts.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<tool_call>")]
    llm = scripted_llm(base, special * 60, k=6)
    plain = scripted_llm(base, special * 60, k=0)
    completions = answers(llm, temperature=temperature)
    assert [each.text for each in completions] == [each.text for each in answers(plain, temperature=temperature)]
    for completion in completions:
        assert completion.finish_reason is FinishReason.STOP, completion.error
        jsonschema.validate(json.loads(completion.text), SCHEMA)


def test_schema_that_ends_within_a_block(base):
    """D17: tokens of the draft behind the closing brace are dropped (vllm#46118)."""
    text = '{"größe": 7, "note": "a", "emoji": "<tool_call>"}'
    behind = " and more text that no JSON has"
    llm = scripted_llm(base, script_of(base, text + behind), k=8)
    params = SamplingParams(constraint=Constraint.json_schema(SCHEMA), max_tokens=120)
    (completion,) = llm.generate("x", params)
    assert completion.text == text
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == tuple(base.parts.tokenizer.encode(text))
    assert completion.stats.tau > 2


def test_tokens_of_several_characters_in_free_text(base):
    """D17, free text: added tokens that are text are allowed in it, and in every draft (vllm#44006)."""
    text = "a<tool_call>b</tool_call>"
    for constraint in (Constraint.regex(r"(.|\n)*"), Constraint.choice([text, "no"]), Constraint.regex("a<to.*")):
        (completion,) = scripted_llm(base, script_of(base, text), k=4).generate(
            "x", SamplingParams(constraint=constraint, max_tokens=20)
        )
        assert completion.text == text
        assert len(completion.token_ids) in (4, 5)  # with or without an end token
