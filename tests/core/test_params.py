"""Tests of the validation of sampling parameters."""

import math

import pytest

from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.errors import OutriderError

NAN, INF = math.nan, math.inf
INVALID = {
    "temperature": [-0.1, NAN, INF, "hot", None, True, False, 1e-50, 1e-40, 1e-38, 9e-7, 10001, 1e300, 10**400],
    "top_k": [-2, -1.0, 1.5, None, True, 2**63],
    "top_p": [0, 0.0, -0.1, 1.1, NAN, "all", None],
    "min_p": [-0.1, 1.1, NAN, None],
    "repetition_penalty": [0, -1.0, NAN, INF, None, 1e-40, 9e-7, 10001, 1e300, 10**400],
    "presence_penalty": [-2.1, 2.1, NAN, None],
    "frequency_penalty": [-2.1, 2.1, NAN, None],
    "logit_bias": [{-1: 1.0}, {"5": 1.0}, {5: 101.0}, {5: NAN}, {5: INF}, {5: "much"}, {True: 1.0}, None, [5]],
    "max_tokens": [0, -1, 1.5, "many", True],
    "min_tokens": [-1, 1.5, None, 129],
    "stop": ["", ("",), ("a", ""), (5,), (None,), 5, None],
    "stop_token_ids": [(-1,), ("5",), (1.5,), (True,), 5, None],
    "ignore_eos": [None, "yes", 1],
    "seed": [-1, 1.5, "lucky", 2**63, True],
    "n": [0, -1, 1.5, None, True],
    "logprobs": [-1, 1.5, True, "all"],
    "k": [-1, 257, 1.5, True, "all"],
    "constraint": ["a", 5, {"type": "object"}],
    "scope": [None, 5, ("tenant",)],
    "priority": [-101, 101, 1.5, True, None, "first"],
    "proposer": [5, ("ngram",)],
    "verifier": [5, ("walk",)],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values], ids=repr
)
def test_errors_of_invalid_values_name_the_parameter(name, value):
    with pytest.raises(OutriderError, match=name):
        SamplingParams(**{name: value})


def test_every_field_has_an_invalid_value():
    assert set(INVALID) == set(SamplingParams.__dataclass_fields__)


def test_limits_are_valid():
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2, seed=0)
    SamplingParams(logit_bias={0: -INF, 1: -100, 2: 100.0}, logprobs=0, seed=2**63 - 1, max_tokens=None, min_tokens=500)
    SamplingParams(max_tokens=4, min_tokens=4, k=256, top_p=1e-9, repetition_penalty=1e-6, temperature=1e-6)
    SamplingParams(repetition_penalty=1e4, temperature=1e4)


def test_minus_one_keeps_all_tokens():
    assert SamplingParams(top_k=-1) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("structured_outputs", "use constraint$"),
        ("max_token", r"did you mean max_tokens\?"),
        ("model", "use temperature, .* or priority"),
    ],
)
def test_an_unknown_parameter_is_an_error_that_names_ours(name, fix):
    with pytest.raises(OutriderError, match=f"^{name} is not a sampling parameter; {fix}"):
        SamplingParams(**{name: 1})


def test_an_unknown_option_of_an_engine_is_an_error_that_names_ours():
    for name, fix in (("model", "use target$"), ("tensor_parallel_size", "use tp$"), ("verifer", "did you mean ver")):
        with pytest.raises(OutriderError, match=f"^{name} is not an option of an engine; {fix}"):
            EngineConfig.from_options(**{name: "a"})


def test_error_states_the_range():
    with pytest.raises(OutriderError, match="use 0 for greedy decoding, or a number from 0"):
        SamplingParams(temperature=1e-40)


def test_sequences_become_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_params_are_immutable():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 1.0
