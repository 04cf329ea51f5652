"""Tests that the server rejects invalid requests with a message, and survives generated ones."""

from itertools import product

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import positive_data_acceptance

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from tests.helpers.serving import serving, wait_until_idle

load_all_checks()
FUZZED_OPTIONS = {"proposer": "switch(ngram,recycle)", "isolate_faults": True, "max_model_len": 48}


@pytest.fixture(scope="module")
def server():
    with serving() as (url, async_llm):
        yield url + "/v1/completions", async_llm


INVALID_BODIES = {  # body, part of the message
    "not valid JSON": (b"{oops", "not valid JSON"),
    "incomplete JSON": (b'{"prompt": "x"', "not valid JSON"),
    "a list": (b"[1]", "the request is no JSON object; send one"),
    "empty body": (b"", "the request is no JSON object; send one"),
    "not UTF-8": (b'{"prompt": "\xff\xfe"}', "the request is not JSON in UTF-8; send such text"),
    "below a bound": (b'{"prompt": "x", "temperature": -1}', "temperature: use a number of at least 0"),
    "another type": (b'{"prompt": "x", "user": 5}', "user: use a string"),
    "lone surrogate": (b'{"prompt": "\\ud800"}', ""),
    "lone surrogate in a field name": (b'{"prompt": "x", "\\ud800": 1}', ""),
    "lone surrogate in model": (b'{"prompt": "x", "model": "\\udfff"}', ""),
    "lone surrogate in stop": (b'{"prompt": "x", "stop": "\\ud800"}', ""),
    "deeply nested": (b"[" * 100_000, ""),
    "number with many digits": (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", ""),
    "temperature is NaN": (b'{"prompt": "x", "temperature": NaN}', "temperature"),
    "temperature is infinite": (b'{"prompt": "x", "temperature": Infinity}', "temperature"),
    "infinite bias": (b'{"prompt": "x", "logit_bias": {"5": Infinity}}', "logit_bias"),
    "bias is NaN": (b'{"prompt": "x", "logit_bias": {"5": NaN}}', "logit_bias"),
}


@pytest.mark.parametrize("case", INVALID_BODIES)
def test_invalid_body_is_rejected(server, case):
    content, message = INVALID_BODIES[case]
    response = httpx.post(server[0], content=content, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404)
    assert message in response.json()["error"]["message"]


WRONG_TYPES = {
    "max_tokens": "many",
    "temperature": "hot",
    "stream": "yes",
    "n": 1.5,
    "stop": [1],
    "prompt": {"a": 1},
    "seed": -2,
    "logit_bias": [1],
    "stream_options": {"include_usage": 3},
    "k": 10**9,
    "proposer": 7,
}


@pytest.mark.parametrize("field", WRONG_TYPES)
def test_error_names_field_of_wrong_type(server, field):
    response = httpx.post(server[0], json={"prompt": "x", field: WRONG_TYPES[field]})
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == field


HUGE_VALUES = {
    "n": 10**9,
    "k": 10**9,
    "max_tokens": 10**9,
    "min_tokens": 10**9,
    "top_k": 10**30,
    "seed": 10**30,
    "logit_bias": {str(i): 1 for i in range(2000)},
    "stop": "x" * 2000,
    "stop_token_ids": list(range(1000)),
    "prompt": "word " * 10_000,
    "logprobs": 10**6,
}


@pytest.mark.parametrize("field", HUGE_VALUES)
def test_huge_value_is_rejected(server, field):
    url, async_llm = server
    rounds_before = async_llm.stats.rounds
    response = httpx.post(url, json={"prompt": "x", field: HUGE_VALUES[field]})
    assert response.status_code == 400
    assert field.split("_")[0] in response.json()["error"]["message"]
    assert async_llm.stats.rounds == rounds_before


@pytest.mark.parametrize(
    ("field", "value"),
    [*product(["temperature", "repetition_penalty"], [1e-50, 1e-40, 1e300]), ("k", -1), ("k", 257)],
)
def test_value_out_of_range_is_rejected_as_in_python(server, field, value):
    with pytest.raises(OutriderError) as raised:
        SamplingParams(**{field: value})
    response = httpx.post(server[0], json={"prompt": "x", field: value})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == str(raised.value)


@pytest.mark.parametrize("authorization", ["", "secret", "Bearer", "Basic secret", "Bearer secret2", "Bearer secre"])
def test_wrong_api_key_is_rejected(url_with_keys, authorization):
    response = httpx.post(url_with_keys, json={"prompt": "x"}, headers={"authorization": authorization})
    assert response.status_code == 401
    assert response.headers["x-request-id"]


@pytest.fixture(scope="module")
def url_with_keys():
    with serving(api_key=["secret", "other"]) as (url, _):
        body = {"prompt": "x", "max_tokens": 1}
        for authorization in ("Bearer secret", "bearer other"):
            response = httpx.post(url + "/v1/completions", json=body, headers={"authorization": authorization})
            assert response.status_code == 200
        yield url + "/v1/completions"


def fuzz(url, path, mode, examples, *, derandomize):
    """Send generated requests and check the responses against the OpenAPI document."""
    schema = schemathesis.openapi.from_url(url + "/openapi.json")
    operation = schema[path]["POST"]

    @settings(max_examples=examples, deadline=None, derandomize=derandomize, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        # A request may match the schema but not the model: the prompt is too long, or it has an unknown token.
        case.call_and_validate(base_url=url, excluded_checks=[positive_data_acceptance], timeout=60)

    check()


@pytest.fixture(scope="module")
def small_context_server():
    with serving(FUZZED_OPTIONS, max_n=3) as (url, async_llm):
        yield url, async_llm


MESSAGES = "/v1/messages"
ROUTES = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", MESSAGES, f"{MESSAGES}/count_tokens"),
    *("/tokenize", "/detokenize"),
)


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ROUTES)
def test_fuzzed_requests(small_context_server, path, mode):
    url, async_llm = small_context_server
    fuzz(url, path, mode, 8, derandomize=True)
    wait_until_idle(async_llm)
    assert not async_llm.failed_rounds
    assert httpx.get(url + "/health").status_code == 200


@pytest.mark.heavy
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ROUTES)
def test_many_fuzzed_requests(small_context_server, path, mode):
    url, async_llm = small_context_server
    fuzz(url, path, mode, 400, derandomize=False)
    wait_until_idle(async_llm)
    assert not async_llm.failed_rounds
