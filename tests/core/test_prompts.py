"""Tests of chat templates: conversations as text, and templates that reject them."""

from copy import deepcopy

import pytest

from outrider.core.prompts import Prompt, chat_text, chat_tokens
from outrider.errors import OutriderError
from outrider.lab.audit.prompts import encode
from outrider.llm import LLM
from outrider.models.loader.embedded import embedded
from outrider.tools import index
from outrider.train.data.prompts import encode_prompt

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
CONVERSATION = Prompt(id="one", category="", prompt=None, messages=MESSAGES)
CALLERS = {
    "llm": lambda llm, tokenizer: llm.encode_chat(MESSAGES),
    "audit": lambda llm, tokenizer: encode(tokenizer, MESSAGES),
    "train": lambda llm, tokenizer: encode_prompt(tokenizer, CONVERSATION),
    "index": lambda llm, tokenizer: index.text_of(
        '{"messages": [{"role": "a", "content": "b"}]}', "x:1", None, tokenizer
    ),
    "bench": lambda llm, tokenizer: chat_text(tokenizer, MESSAGES, add_generation_prompt=True),
}


@pytest.fixture(scope="module")
def llm():
    return LLM(target=embedded("nano"), proposer="none", dtype="float32", max_model_len=64, k=0)


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'] + messages }}", "concatenate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{% for", "chat template is invalid"),
    ],
)
def test_error_of_a_chat_template_is_in_the_message(llm, monkeypatch, caller, template, message):
    monkeypatch.setattr(llm.parts.tokenizer, "chat_template", template)
    with pytest.raises(OutriderError, match=message):
        CALLERS[caller](llm, llm.parts.tokenizer)


def test_generation_prompt_is_optional(llm):
    tokenizer = deepcopy(llm.parts.tokenizer)
    with_prompt = chat_text(tokenizer, MESSAGES, add_generation_prompt=True)
    without_prompt = chat_text(tokenizer, MESSAGES, add_generation_prompt=False)
    assert with_prompt.startswith(without_prompt)
    assert with_prompt != without_prompt
    assert chat_tokens(tokenizer, MESSAGES) == llm.encode_chat(MESSAGES)
    assert tokenizer.decode(list(chat_tokens(tokenizer, MESSAGES, add_generation_prompt=False))) == without_prompt
