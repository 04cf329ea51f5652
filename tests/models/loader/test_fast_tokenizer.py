"""The tokenizer without transformers equals that of transformers."""

import json

import pytest

from outrider.core.tokenizer import FastTokenizer
from outrider.models.loader.tokenizer import read_tokenizer
from tests.helpers.published_tokenizers import PUBLISHED, VARIANTS, save_tokenizer

TEXTS = ("Hello  world", " a", "Cafe\u0301 😊", "12345 \n\n\t x</s>", "<|im_start|>user<tool_call>{}</tool_call>", "")
MESSAGES = [
    {"role": "system", "content": "be brief", "name": None},
    {"role": "user", "content": "hi <b>"},
    {"role": "assistant", "content": "yes", "reasoning": "because"},
    {"role": "user", "content": "go"},
]
# Chat templates use these features.
TEMPLATE = """{%- for m in messages %}
    {%- if loop.index > 9 %}{% break %}{% endif %}
    {%- set ns = namespace(text=m.content) %}
    {{- bos_token }}{{ m.role }}{{ m.content | tojson }}{{ m.reasoning_content }}{{ m.name is defined }}
    {{- ns.text | trim }}
    {%- generation %}{{ m.content }}{% endgeneration %}
{%- endfor %}{{ tools | tojson(indent=2) }}{{ dict(a=1) }}{{ extra }}{% if add_generation_prompt %}!{% endif %}"""


@pytest.fixture(params=[*PUBLISHED, *VARIANTS])
def folder(request, tmp_path):
    save_tokenizer(request.param, tmp_path)
    return tmp_path


def test_fast_tokenizer_equals_that_of_transformers(folder):
    fast, full = read_tokenizer(folder), read_tokenizer(folder).full
    assert isinstance(fast, FastTokenizer)
    assert type(fast.full) is type(full)
    for text in TEXTS:
        assert fast.encode(text) == full.encode(text)
        ids = fast.encode(text, add_special_tokens=False)
        assert ids == full.encode(text, add_special_tokens=False) == fast(text, add_special_tokens=False)["input_ids"]
        for skip in (False, True):
            assert fast.decode(ids, skip_special_tokens=skip) == full.decode(ids, skip_special_tokens=skip)
    assert fast(list(TEXTS))["input_ids"] == full(list(TEXTS))["input_ids"]
    assert fast.get_vocab() == full.get_vocab()
    assert len(fast) == len(full)
    assert set(fast.all_special_ids) >= set(full.all_special_ids)
    added = [
        {id: (token.content, token.special, token.normalized) for id, token in each.added_tokens_decoder.items()}
        for each in (fast, full)
    ]
    assert added[0] == added[1]
    for name in ("bos_token", "eos_token", "pad_token", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(fast, name) == getattr(full, name)
    assert fast.convert_tokens_to_ids(["a", "b"]) == full.convert_tokens_to_ids(["a", "b"])
    assert fast.convert_ids_to_tokens(ids) == full.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_conversations_are_rendered_as_by_transformers(folder, template):
    fast, full = read_tokenizer(folder), read_tokenizer(folder).full
    if template is not None:
        fast.chat_template = full.chat_template = template
    for prompted in (True, False):
        options = {"tokenize": False, "add_generation_prompt": prompted, "tools": [{"a": "<é>"}], "extra": 3}
        assert fast.apply_chat_template(MESSAGES[1:2], **options) == full.apply_chat_template(MESSAGES[1:2], **options)
        if template is not None:
            assert fast.apply_chat_template(MESSAGES, **options) == full.apply_chat_template(MESSAGES, **options)
    assert fast.apply_chat_template(MESSAGES[1:2], return_dict=False) == full.apply_chat_template(
        MESSAGES[1:2], return_dict=False
    )


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token": "new"},
        {"extra_special_tokens": ["new"]},
        {"chat_template": [{"name": "default", "template": "x"}]},
        {"split_special_tokens": True},
        {"added_tokens_decoder": {"9": {"content": "new", "special": True}}},
    ],
)
def test_settings_beyond_tokenizer_json_are_read_by_transformers(tmp_path, change):
    save_tokenizer("Qwen3-0.6B", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert not isinstance(read_tokenizer(tmp_path), FastTokenizer)


@pytest.mark.parametrize(
    "text", ["{{ (1).__class__.__mro__ }}", "{% set n = namespace() %}{% set n._x = 1 %}", "{{ x.y.z }}"]
)
def test_templates_run_in_a_sandbox(tmp_path, text):
    save_tokenizer("Qwen3-0.6B", tmp_path)
    tokenizer = read_tokenizer(tmp_path)
    tokenizer.chat_template = text
    with pytest.raises(Exception, match=r"unsafe|cannot set|undefined"):
        tokenizer.apply_chat_template(MESSAGES[1:2], tokenize=False)
