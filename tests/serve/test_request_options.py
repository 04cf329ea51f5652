"""Options of a request that a server of OpenAI's API does not have, and the request log."""

import logging

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.llm import LLM
from tests.helpers.serving import (
    BODY,
    OPTIONS,
    OTHER_PROMPTS,
    PROMPT,
    SWITCH_OPTIONS,
    expected_texts,
    post_concurrently,
    serving,
    text_of,
    wait_until_idle,
)


def draft_tokens_by_proposer(url):
    lines = httpx.get(url.removesuffix("/v1/completions") + "/metrics").text.splitlines()
    samples = (line for line in lines if line.startswith("outrider_proposer_draft_tokens_total"))
    return {sample.split('"')[1]: float(sample.split()[-1]) for sample in samples}


def test_request_chooses_proposer(switching_server, reference_llm):
    url, async_llm = switching_server
    (expected,) = expected_texts(reference_llm, [PROMPT])
    for name, other in (("ngram", "recycle"), ("recycle", "ngram")):
        wait_until_idle(async_llm)
        before = draft_tokens_by_proposer(url)
        response = httpx.post(url, json={**BODY, "proposer": name})
        assert text_of(response) == expected
        wait_until_idle(async_llm)
        after = draft_tokens_by_proposer(url)
        assert after[name] - before[name] == response.json()["usage"]["speculation"]["draft_tokens"] > 0
        assert after[other] == before[other]
    bodies = [{**BODY, "proposer": "ngram"}, {**BODY, "proposer": "recycle", "prompt": OTHER_PROMPTS[0]}]
    responses = post_concurrently(url, bodies)
    assert [text_of(response) for response in responses] == expected_texts(reference_llm, [PROMPT, OTHER_PROMPTS[0]])
    assert all(response.json()["usage"]["speculation"]["draft_tokens"] for response in responses)


def test_request_disables_speculation(switching_server, reference_llm):
    response = httpx.post(switching_server[0], json={**BODY, "k": 0})
    assert response.json()["usage"]["speculation"]["draft_tokens"] == 0
    assert text_of(response) == expected_texts(reference_llm, [PROMPT])[0]


@pytest.fixture(scope="module")
def walk_llm():
    return LLM(**{**OPTIONS, **SWITCH_OPTIONS}, max_num_seqs=4, verifier="walk")


@pytest.mark.fast_cases("traversal", "walk")
@pytest.mark.parametrize("verifier", ["siblings", "traversal", "coupled", "walk"])
def test_request_chooses_verifier(verifier, walk_llm):
    body = {**BODY, "temperature": 1, "seed": 8, "proposer": "ngram"}
    params = SamplingParams(temperature=1, seed=8, max_tokens=40, ignore_eos=True, proposer="ngram")
    chosen_llm = LLM(**{**OPTIONS, **SWITCH_OPTIONS}, max_num_seqs=4, verifier=verifier)
    with serving(SWITCH_OPTIONS) as (url, _):
        # This request is alone and comes first. With some verifiers the text depends on the draft, and the draft on
        # what the proposer has learned.
        response = httpx.post(url + "/v1/completions", json={**body, "verifier": verifier})
        assert text_of(response) == chosen_llm.generate([PROMPT], params)[0].text
        default_body = {**body, "prompt": OTHER_PROMPTS[0]}
        _, default = post_concurrently(url + "/v1/completions", [{**body, "verifier": verifier}, default_body])
        assert text_of(default) == walk_llm.generate([OTHER_PROMPTS[0]], params)[0].text


def test_error_of_unknown_option_lists_valid_ones(switching_server):
    url, _ = switching_server
    for fields, message in (
        ({"proposer": "oracle"}, "use ngram or recycle, or leave it out"),
        ({"verifier": "block"}, "use walk, coupled, siblings or traversal"),  # recycle makes trees
        ({"verifier": "typical"}, "use walk"),
    ):
        response = httpx.post(url, json={"prompt": "x", **fields})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]
    model = httpx.get(url.removesuffix("completions") + "models").json()["data"][0]
    assert model["proposers"] == ["ngram", "recycle"]
    assert model["verifiers"] == ["walk", "coupled", "siblings", "traversal"]


def test_request_id_and_request_log(switching_server, caplog):
    url, async_llm = switching_server
    with caplog.at_level(logging.INFO, "outrider.serve.requests"):
        completed = httpx.post(url, json=BODY, headers={"x-request-id": "client-7"})
        rejected = httpx.post(url, json={"prompt": 3}, headers={"x-request-id": "x" * 500})
        httpx.post(url, json={**BODY, "stream": True}, headers={"x-request-id": "streamed"})
        httpx.get(url.removesuffix("/v1/completions") + "/health")
        wait_until_idle(async_llm)
    assert completed.headers["x-request-id"] == "client-7"
    assert len(rejected.headers["x-request-id"]) == 32
    ids = {"client-7", rejected.headers["x-request-id"], "streamed"}  # the log may have a late line of another test
    first, second, third = (record.fields for record in caplog.records if record.fields["id"] in ids)
    usage = completed.json()["usage"]
    assert (first["id"], first["status"], first["finish_reason"], first["output_tokens"]) == (
        "client-7",
        200,
        "length",
        40,
    )
    assert first["tau"] == pytest.approx(usage["speculation"]["tokens_per_pass"], abs=1e-3)
    assert 0 < first["time_to_first_token_seconds"] <= first["seconds"]
    assert (second["status"], "output_tokens" in second) == (400, False)
    assert (third["id"], third["finish_reason"], third["output_tokens"]) == ("streamed", "length", 40)
