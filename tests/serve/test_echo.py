"""Completions that repeat their prompt, fill in the middle, or are the best of several."""

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.models.loader.embedded import embedded
from outrider.serve.openai.fill_in import fill_in_tokens
from tests.helpers.serving import BODY, PROMPT, post_concurrently

LONG = "def add(a, b):\n    return a + b\n" * 6


def complete(server, **fields):
    return httpx.post(server[0] + "/v1/completions", json=BODY | {"max_tokens": 4} | fields, timeout=60)


def test_echo_has_the_log_probabilities_of_the_prompt(server):
    model = AutoModelForCausalLM.from_pretrained(embedded("nano"), dtype=torch.float32)
    tokens = server[1].codec.encode(LONG)
    logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    (choice,) = complete(server, prompt=list(tokens), echo=True, logprobs=2).json()["choices"]
    entries = choice["logprobs"]
    assert entries["token_logprobs"][0] is None
    assert entries["token_logprobs"][1 : len(tokens)] == pytest.approx(expected, abs=1e-3)
    best = [max(top.values()) for top in entries["top_logprobs"][1 : len(tokens)]]
    assert best == pytest.approx(logits.max(-1).values.tolist(), abs=1e-3)
    own = [top[token] for top, token in zip(entries["top_logprobs"][1:], entries["tokens"][1:], strict=True)]
    assert own == entries["token_logprobs"][1:]
    assert {len(values) for values in entries.values()} == {len(tokens) + 4}
    plain = complete(server, prompt=LONG).json()["choices"][0]["text"]
    assert choice["text"] == LONG + plain
    only = complete(server, prompt=[PROMPT, LONG], echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert [each["text"] for each in only] == [PROMPT, LONG]
    assert len(only[1]["logprobs"]["tokens"]) == len(tokens)


def test_echo_does_not_change_other_requests(server):
    url = server[0] + "/v1/completions"
    plain = complete(server, max_tokens=40).json()["choices"][0]["text"]
    bodies = [BODY, BODY | {"prompt": LONG, "echo": True, "logprobs": 0, "max_tokens": 1}, BODY]
    first, _, last = post_concurrently(url, bodies)
    assert first.json()["choices"][0]["text"] == last.json()["choices"][0]["text"] == plain


def test_best_of_returns_the_likeliest_completions(server):
    fields = {"temperature": 1, "seed": 3, "logprobs": 0, "max_tokens": 8}

    def means(**more):
        choices = complete(server, **fields, **more).json()["choices"]
        return [sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["tokens"]) for each in choices]

    assert means(best_of=4, n=2) == sorted(means(n=4), reverse=True)[:2]
    usage = complete(server, **fields | {"logprobs": None}, best_of=4).json()["usage"]
    assert usage["completion_tokens"] == 32


class FillIn:
    """A tokenizer of single characters with tokens for the middle."""

    bos_token_id = None

    def get_vocab(self):
        return {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}

    def encode(self, text, **_):
        return list(map(ord, text))


def test_a_suffix_comes_after_the_tokens_of_the_model(server):
    assert fill_in_tokens(FillIn(), "a", "b") == (1, ord("a"), 2, ord("b"), 3)
    error = complete(server, suffix="b").json()["error"]
    assert (error["param"], error["message"]) == (
        "suffix",
        "suffix: this model has no tokens to fill in the middle; leave suffix out",
    )


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("echo", {"echo": True, "stream": True}),
        ("echo", {"echo": True, "suffix": "x"}),
        ("max_tokens", {"max_tokens": 0}),
        ("best_of", {"best_of": 1, "n": 2}),
        ("best_of", {"best_of": 2, "stream": True}),
        ("suffix", {"suffix": "x", "prompt": [1, 2]}),
    ],
)
def test_fields_that_do_not_fit(server, param, fields):
    assert complete(server, **fields).json()["error"]["param"] == param
