"""Conversations in the words of a model's chat template, and templates that do not take them."""

from __future__ import annotations

from copy import deepcopy

import pytest

from outrider.audit.prompts import encode
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.loader.embedded import embedded
from outrider.measure.prompts import Prompt, chat_text, chat_tokens
from outrider.tools import index
from outrider.train.data.prompts import encoded

TURNS = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
TALK = Prompt(id="one", category="", prompt=None, messages=TURNS)
PLACES = {
    "llm": lambda llm, tokenizer: llm.encode_chat(TURNS),
    "audit": lambda llm, tokenizer: encode(tokenizer, TURNS),
    "train": lambda llm, tokenizer: encoded(tokenizer, TALK),
    "index": lambda llm, tokenizer: index._text_of(
        '{"messages": [{"role": "a", "content": "b"}]}', "x:1", None, tokenizer
    ),
    "bench": lambda llm, tokenizer: chat_text(tokenizer, TURNS, asks=True),
}


@pytest.fixture(scope="module")
def llm():
    return LLM(target=embedded("nano"), proposer="none", dtype="float32", max_model_len=64, k=0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0]['content'] + messages }}", "concatenate"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{% for", "change them"),
    ],
)
def test_a_template_that_refuses_is_a_mistake_with_its_words(llm, monkeypatch, place, template, said):
    monkeypatch.setattr(llm.parts.tokenizer, "chat_template", template)
    with pytest.raises(OutriderError, match=said):
        PLACES[place](llm, llm.parts.tokenizer)


def test_a_template_asks_for_an_answer_or_not(llm):
    tokenizer = deepcopy(llm.parts.tokenizer)
    asks, whole = (chat_text(tokenizer, TURNS, asks=asks) for asks in (True, False))
    assert asks.startswith(whole)
    assert asks != whole
    assert chat_tokens(tokenizer, TURNS) == llm.encode_chat(TURNS)
    assert tokenizer.decode(list(chat_tokens(tokenizer, TURNS, asks=False))) == whole
