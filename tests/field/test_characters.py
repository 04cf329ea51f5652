"""Situations of characters of several tokens in which other engines were reported to fail."""

import json

import httpx
import pytest

from tests.helpers.scripted import base_llm, script_of, scripted_llm
from tests.helpers.serving import serving

TEXT = "a😊b"  # six tokens: the emoji has four bytes
OFFSETS = [0, 1, 1, 1, 1, 2]


@pytest.fixture(scope="module", params=["Qwen2.5-0.5B", "Gemma-3-270m"])
def url(request, tmp_path_factory):
    """The completions of a server that answers with `TEXT`, with a byte-level tokenizer and one with byte fallback."""
    base = base_llm(tmp_path_factory.mktemp("model"), request.param)
    script = script_of(base, TEXT)
    assert len(script) == 7
    with serving(llm=scripted_llm(base, script, k=8)) as (address, _):
        yield address + "/v1"


def whole(url, path="/completions", **fields):
    prompt = {"prompt": "x"} if path == "/completions" else {"messages": [{"role": "user", "content": "x"}]}
    response = httpx.post(url + path, json={**prompt, "temperature": 0, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(url, **fields):
    """Return the choices of all chunks."""
    body = {"prompt": "x", "temperature": 0, "stream": True, "stream_options": {"include_tokens": True}, **fields}
    with httpx.stream("POST", url + "/completions", json=body, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    return [json.loads(line)["choices"][0] for line in lines[:-1]]


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_character_cut_by_the_limit(url, max_tokens):
    """D5: max_tokens cuts a character; the text of the response and of the stream differ (kekzl/imp#1310)."""
    text = whole(url, max_tokens=max_tokens)["text"]
    assert "".join(choice["text"] for choice in streamed(url, max_tokens=max_tokens)) == text
    begun = TEXT.encode()[:max_tokens].decode(errors="ignore")
    assert text.startswith(begun)
    assert set(text[len(begun) :]) <= {"\ufffd"}  # the bytes of an incomplete character
    assert ("\ufffd" in text) == (max_tokens in (2, 3, 4))


@pytest.mark.parametrize("k", range(5))
def test_character_over_the_border_of_a_round(url, k):
    """D6: a character is split between two rounds (antonellof/ferrox PR #125)."""
    chunks = streamed(url, max_tokens=20, k=k, logprobs=1)
    assert "".join(chunk["text"] for chunk in chunks) == TEXT
    assert all("\ufffd" not in chunk["text"] for chunk in chunks)
    assert [offset for chunk in chunks for offset in chunk["logprobs"]["text_offset"]] == OFFSETS
    constrained = streamed(url, max_tokens=20, k=k, structured_outputs={"regex": TEXT})
    assert "".join(chunk["text"] for chunk in constrained) == TEXT


def test_log_probabilities_rebuild_the_text(url):
    """D6: what the tokens of a split character are in log-probabilities (antonellof/ferrox PR #125)."""
    entries = whole(url, "/chat/completions", max_tokens=20, logprobs=True)["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == TEXT
    assert [entry["token"] for entry in entries] == ["a", "\\xf0", "\\x9f", "\\x98", "\\x8a", "b"]
    logprobs = whole(url, max_tokens=20, logprobs=20)["logprobs"]
    assert logprobs["text_offset"] == OFFSETS
    assert logprobs["tokens"] == [entry["token"] for entry in entries]
    assert all(len(top) == 20 for top in logprobs["top_logprobs"])  # also alternatives that look the same
