"""Completions and chat with the official OpenAI client, and what else the server answers."""

import json
import re

import httpx
import pytest

from outrider.core.params import SamplingParams
from tests.helpers.browser import browse, needs_browser
from tests.helpers.serving import PROMPT, serving, wait_until_idle


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completion_equals_output_of_llm(client, reference_llm, temperature):
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=24, temperature=temperature, seed=5)
    params = SamplingParams(temperature=temperature, max_tokens=24, seed=5)
    (expected,) = reference_llm.generate([PROMPT], params)
    assert reply.choices[0].text == expected.text
    assert reply.choices[0].finish_reason == str(expected.finish_reason)
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert reply.usage.prompt_tokens == len(expected.prompt_token_ids)
    speculation = reply.usage.speculation
    assert speculation["target_passes"] == expected.stats.passes
    assert speculation["exact"]


def test_chat_uses_chat_template(client, reference_llm):
    messages = [{"role": "user", "content": "Count to three."}]
    reply = client.chat.completions.create(model="nano", messages=messages, max_completion_tokens=12, temperature=0)
    (expected,) = reference_llm.generate([reference_llm.encode_chat(messages)], SamplingParams(max_tokens=12))
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].message.role == "assistant"


@pytest.mark.parametrize("chat", [False, True])
def test_stream_chunks_concatenate_to_full_response(client, chat):
    body = {"model": "nano", "max_tokens": 40, "temperature": 0.8, "seed": 3, "extra_body": {"ignore_eos": True}}
    if chat:
        create = client.chat.completions.create
        text_of = lambda choice: choice.delta.content  # noqa: E731
        body["messages"] = [{"role": "user", "content": "Hi"}]
        full_text = create(**body).choices[0].message.content
    else:
        create = client.completions.create
        text_of = lambda choice: choice.text  # noqa: E731
        body["prompt"] = PROMPT
        full_text = create(**body).choices[0].text
    chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(text_of(choice) for choice in choices) == full_text
    assert chunks[-1].usage.completion_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in create(**body, stream=True, stream_options=options)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-2] == counts[-1] == chunks[-1].usage.completion_tokens
    assert choices[-1].finish_reason in ("stop", "length")
    assert len(chunks) > 2


def test_text_ends_before_stop_string(client, reference_llm):
    full_text = reference_llm.generate([PROMPT], SamplingParams(max_tokens=60))[0].text
    stop = full_text[20:23]
    reply = client.completions.create(model="nano", prompt=PROMPT, max_tokens=60, temperature=0, stop=stop)
    assert reply.choices[0].text == full_text[: full_text.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_k_of_request_limits_draft_tokens(client, reference_llm):
    body = {"model": "nano", "prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 30, "temperature": 0}
    default = client.completions.create(**body)
    plain = client.completions.create(**body, extra_body={"k": 0})
    one = client.completions.create(**body, extra_body={"k": 1})
    assert default.choices[0].text == plain.choices[0].text == one.choices[0].text
    draft_tokens = [reply.usage.speculation["draft_tokens"] for reply in (default, one, plain)]
    assert draft_tokens[0] > draft_tokens[1] > draft_tokens[2] == 0
    assert draft_tokens[1] <= one.usage.speculation["target_passes"]


def test_include_tokens_reports_source_of_each_token(client):
    chunks = client.completions.create(
        model="nano",
        prompt="a = 1\nb = 1\nc = 1\n",
        max_tokens=30,
        temperature=0,
        stream=True,
        extra_body={"stream_options": {"include_tokens": True}},
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert all("".join(choice.speculation["tokens"]) == choice.text for choice in choices)
    from_draft = [flag for choice in choices for flag in choice.speculation["from_draft"]]
    assert len(from_draft) == 30
    assert any(from_draft)
    assert not all(from_draft)


def test_include_drafts_reports_whole_drafts(server):
    body = {"prompt": "a = 1\nb = 1\nc = 1\n", "max_tokens": 40, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_drafts": True}
    with httpx.stream("POST", server[0] + "/v1/completions", json=body) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line and line != "data: [DONE]"]
    rounds = [event["choices"][0]["speculation"] for event in events]
    assert any(not all(each["drafts"]["accepted"]) for each in rounds)
    for each in rounds:
        drafts = each["drafts"]
        num_accepted = sum(each["from_draft"])
        assert each["from_draft"] == [True] * num_accepted + [False] * (len(each["tokens"]) - num_accepted)
        path = [node for node, accepted in enumerate(drafts["accepted"]) if accepted]
        assert [drafts["tokens"][node] for node in path][:num_accepted] == each["tokens"][:num_accepted]
        assert [drafts["parents"][node] for node in path] == [-1, *path][: len(path)]
        assert set(drafts["source"]) <= {"ngram"}


def test_several_prompts_and_completions(client, reference_llm):
    reply = client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, logprobs=2
    )
    params = SamplingParams(temperature=1, seed=1, n=2, max_tokens=8, logprobs=2)
    expected = reference_llm.generate([PROMPT, "import os"], params)
    assert [choice.text for choice in reply.choices] == [completion.text for completion in expected]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    for choice, completion in zip(reply.choices, expected, strict=True):
        logprobs = [entry.logprob for entry in completion.logprobs]
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
        tops = [
            [*entry.top, (entry.token, entry.logprob)] for entry in completion.logprobs
        ]  # 2 tokens, and the own one
        assert [sorted(top.values()) for top in choice.logprobs.top_logprobs] == [
            pytest.approx(sorted(dict(top).values()), abs=1e-4) for top in tops
        ]
    assert {len(top) for choice in reply.choices for top in choice.logprobs.top_logprobs} == {2, 3}
    streamed = {}
    for chunk in client.completions.create(
        model="nano", prompt=[PROMPT, "import os"], n=2, max_tokens=8, temperature=1, seed=1, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == [completion.text for completion in expected]


def test_text_offset_continues_across_stream_chunks(client):
    body = {"model": "nano", "prompt": [PROMPT, "import os"], "max_tokens": 24, "temperature": 0, "logprobs": 0}
    expected = client.completions.create(**body, extra_body={"ignore_eos": True}).choices
    tokens = {0: [], 1: []}
    offsets = {0: [], 1: []}
    num_chunks = 0
    extra_body = {"ignore_eos": True, "stream_options": {"include_tokens": True}}  # one chunk per round
    for chunk in client.completions.create(**body, stream=True, extra_body=extra_body):
        (choice,) = chunk.choices
        tokens[choice.index] += choice.logprobs.tokens
        offsets[choice.index] += choice.logprobs.text_offset
        num_chunks += 1
    assert num_chunks > 4
    for choice in expected:
        assert tokens[choice.index] == choice.logprobs.tokens
        assert offsets[choice.index] == choice.logprobs.text_offset
        assert offsets[choice.index] == [sum(map(len, choice.logprobs.tokens[:i])) for i in range(24)]


def test_logprobs_of_chat(client):
    reply = client.chat.completions.create(
        model="nano",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    entries = reply.choices[0].logprobs.content
    assert reply.choices[0].finish_reason == "stop"
    assert len(entries) == reply.usage.completion_tokens - 1  # the end token has no entry
    assert "".join(entry.token for entry in entries) == reply.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6


def test_tokenize_health_and_metrics(server, client, reference_llm):
    url, async_llm = server
    client.completions.create(model="nano", prompt=PROMPT, max_tokens=4)
    assert httpx.post(url + "/tokenize", json={"prompt": PROMPT}).json()["tokens"] == list(reference_llm.encode(PROMPT))
    assert httpx.get(url + "/health").json() == {"status": "ok"}
    wait_until_idle(async_llm)
    text = httpx.get(url + "/metrics").text
    counts = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#"}
    assert counts["outrider_output_tokens_total"] == async_llm.stats.output_tokens > 0
    assert counts["outrider_num_requests_running"] == 0
    assert counts["outrider_e2e_request_latency_seconds_count"] > 0


def test_pages_need_no_internet(server):
    paths = ["/", "/docs"]
    for path in paths:  # it grows by the parts of the pages
        page = httpx.get(server[0] + path)
        assert page.status_code == 200
        policy = page.headers["content-security-policy"]
        assert "script-src 'self'; style-src 'self'; connect-src 'self'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"//(?!www\.w3\.org/2000/svg)[a-z]+\.", page.text)
        parts = re.findall(r"""(?:src|href|from) ?=?["'](?:\./)?(?:page/)?([\w.]+\.(?:js|css|svg))["']""", page.text)
        paths += sorted({"/page/" + part for part in parts} - set(paths))
    assert len(paths) > 15
    assert httpx.get(server[0] + "/page/none.js").status_code == 404
    assert httpx.get(server[0] + "/redoc").status_code == 404


def test_the_model_says_what_it_takes(server, monkeypatch):
    model = httpx.get(server[0] + "/v1/models").json()["data"][0]
    assert (model["input"], model["enable_thinking"]) == ("chat", False)
    thinks = "{% if enable_thinking %}<think>{% endif %}</think>"
    for template, expected in ((None, ("prompt", False)), (thinks, ("chat", True))):
        monkeypatch.setattr(server[1].codec.tokenizer, "chat_template", template)
        model = httpx.get(server[0] + "/v1/models").json()["data"][0]
        assert (model["input"], model["enable_thinking"]) == expected


@needs_browser
def test_docs_in_browser(server):
    paths = httpx.get(server[0] + "/openapi.json").json()["paths"]
    with browse(server[0] + "/docs#Message") as (page, expect):
        expect(page.locator("#routes > details")).to_have_count(len(paths))
        chat = page.locator("#routes > details", has_text="/v1/chat/completions")
        chat.locator("summary").first.click()
        expect(chat.get_by_text("temperature", exact=True)).to_be_visible()
        expect(page.locator("#Message code", has_text="tool_call_id")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


@needs_browser
def test_docs_in_browser_with_api_keys():
    """The page opens without a key and asks for it. A wrong one is an error that says so."""
    with serving(api_key=["secret"]) as (url, _), browse(url + "/docs") as (page, expect):
        expect(page.locator("#ask")).to_be_visible()
        page.fill("#key", "wrong")
        page.locator("#ask button").click()
        expect(page.locator("#error")).to_contain_text("the API key is missing or wrong")
        expect(page.locator("#routes > details")).to_have_count(0)
        page.fill("#key", "secret")
        page.locator("#ask button").click()
        expect(page.locator("#routes > details").first).to_be_visible()
