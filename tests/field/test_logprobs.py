"""Situations of log-probabilities in which other engines were reported to fail."""

import json

import httpx
import pytest

from tests.helpers.scripted import base_llm, script_of, scripted_llm
from tests.helpers.serving import serving

TEXT = "The answer is 42, and it is a word."


@pytest.fixture(scope="module", params=["Qwen2.5-0.5B", "Mistral-7B"])
def server(request, tmp_path_factory):
    """The URL of a server that answers with `TEXT`, the tokens of the answer, and the text of each."""
    base = base_llm(tmp_path_factory.mktemp("model"), request.param)
    script = script_of(base, " " + TEXT)
    if base.decode(script[:1]) == "":  # the space that sentencepiece puts in front
        script = script[1:]
    with serving(llm=scripted_llm(base, script, k=8)) as (address, async_llm):
        yield address, script, [async_llm.single_tokens.text(token) for token in script]


def whole(url, path, body):
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice, response.json()["usage"]


def streamed(url, path, body):
    """Return the joined text, token ids and log-probabilities of a stream."""
    text, ids, entries = "", [], []
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                ids += choice.get("token_ids", [])
                entries += entries_of(choice)
    return text, ids, entries


def entries_of(choice):
    """Return the log-probabilities of a choice as a list, one item for each token."""
    logprobs = choice["logprobs"]
    if "content" in logprobs:
        return logprobs["content"]
    fields = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], logprobs["text_offset"])
    return list(zip(*fields, strict=True))


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2})
COMPLETION = ("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 100})


@pytest.mark.parametrize(("path", "fields"), [CHAT, COMPLETION], ids=["chat", "completion"])
@pytest.mark.parametrize("stop", ["swer", "2, a", " word", "t is"])
def test_ids_and_log_probabilities_behind_a_stop_string(server, path, fields, stop):
    """D3: a stop string ends inside a token and inside a block of accepted drafts (vllm PR #47616)."""
    url, script, _ = server
    body = {**fields, "stop": stop, "return_token_ids": True, "temperature": 0}
    choice, usage = whole(url, path, body)
    plain, _ = whole(url, path, body | {"k": 0})
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text.lstrip() == TEXT[: TEXT.index(stop)]
    assert choice["finish_reason"] == "stop"
    entries = entries_of(choice)
    ids = choice["token_ids"]
    assert len(ids) == len(entries) == usage["completion_tokens"] < len(script)
    assert ids == script[: len(ids)] == plain["token_ids"]
    assert [entry[0] if path == COMPLETION[0] else entry["token"] for entry in entries] == server[2][: len(ids)]
    assert entries == entries_of(plain)
    assert streamed(url, path, body) == (text, ids, entries)


@pytest.mark.parametrize("return_token_ids", [False, True])
def test_a_token_that_ends_the_text_has_no_entry(server, return_token_ids):
    """D3 at the end token: it is no item of log-probabilities, except beside token ids (vllm PR #47616)."""
    url, script, texts = server
    for path, fields in (CHAT, COMPLETION):
        body = {**fields, "return_token_ids": return_token_ids, "temperature": 0}
        choice, usage = whole(url, path, body)
        entries = entries_of(choice)
        assert usage["completion_tokens"] == len(script)
        assert len(entries) == len(script) - (not return_token_ids)
        assert streamed(url, path, body)[2] == entries
        if path == COMPLETION[0]:
            missing = len("".join(texts[:-1])) - len(choice["text"])  # a space at the front of a text of sentencepiece
            offsets = [max(len("".join(texts[:i])) - missing, 0) for i in range(len(entries))]
            assert choice["logprobs"]["text_offset"] == offsets
            assert choice["logprobs"]["tokens"] == texts[: len(entries)]
