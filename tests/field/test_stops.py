"""Where a completion ends: stop strings, stop tokens, end-of-text tokens and the limit, in any part of a block."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from outrider.core.params import SamplingParams
from outrider.core.types import FinishReason
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.loader.gguf.file import GGUFFile
from tests.field.models import BOTH, EVERY, IDS, LETTERS, PROMPTS, make_pair, token_ids
from tests.helpers.serving import metric_values, serving

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}


@pytest.fixture(scope="module")
def text(native_pair):
    """A prompt, and 24 letters that follow it, of which the third is not one of the first two."""
    for prompt in ("abcabcab", "cab", "bca", "a", "bb", "acb", "cc", "baab"):
        (completion,) = native_pair.generate("none", prompt, SamplingParams(max_tokens=24, logit_bias=LETTERS), k=0)
        if completion.text[2] not in completion.text[:2]:
            return prompt, completion.text
    raise AssertionError("no prompt has such a text")


@pytest.fixture(scope="module")
def server(folders):
    """A server whose draft model is the target."""
    options = {"target": folders[0], "proposer": f"draft:{folders[0]}", "k": 8, **OPTIONS}
    with serving(options) as (url, _):
        yield url


def complete(url, **body):
    reply = httpx.post(f"{url}/v1/completions", json={"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


@EVERY
@pytest.mark.parametrize("stop", ["string", "token", "end"])
def test_a_stop_within_the_limit_is_the_reason(native_pair, text, name, stop):
    """A stop at the third token, a limit near it, and a block of 8 accepted tokens (sglang#31599)."""
    prompt, whole = text
    llm = native_pair.llm(name)
    third = IDS[whole[2]]
    if stop == "end":
        llm = LLM.from_parts(replace(llm.parts, end_ids=frozenset({third})))
    stops = {"string": {"stop": whole[2]}, "token": {"stop_token_ids": (third,)}, "end": {}}[stop]
    for limit in range(1, 7):
        params = SamplingParams(max_tokens=limit, logit_bias=LETTERS, **stops)
        (completion,) = llm.generate(prompt, params)
        is_stopped = limit >= 3
        assert completion.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
        assert completion.text == whole[: min(limit, 2)]
        assert len(completion.token_ids) == len(completion.from_draft) == min(limit, 3)


@EVERY
@pytest.mark.parametrize("k", [1, 3, 8])
def test_streams_send_no_part_of_a_stop_string(native_pair, text, name, k):
    """Stops that share a beginning, begin at the end of a chunk, or are the first token.

    (SwiftLM#133, mzau/mlx-knife#68, llama.cpp#10914)
    """
    prompt, whole = text
    llm = native_pair.llm(name, k=k)
    cases = ((5, 7), (5, 8)), ((0, 1),), ((2, 6), (4, 5)), ((7, 10), (9, 11)), ((9, 17),)
    for spans in cases:
        stops = tuple(whole[begin:end] for begin, end in spans)
        # The stop string that is complete first ends the text, also if another one begins before it.
        end, begin = min((whole.find(stop) + len(stop), whole.find(stop)) for stop in stops)
        chunks = list(llm.stream(prompt, SamplingParams(max_tokens=24, logit_bias=LETTERS, stop=stops)))
        assert "".join(chunk.text for chunk in chunks) == whole[:begin]
        assert len(chunks[-1].completion.token_ids) == end
        assert chunks[-1].completion.text == whole[:begin]
        assert chunks[-1].completion.finish_reason is FinishReason.STOP


def test_usage_counts_what_was_sent(server):
    """A block of 9 tokens is accepted and the limit is within it (ik_llama PR #2358)."""
    before = metric_values(server, "outrider_output_tokens_total")[0]
    for limit in range(1, 21):
        reply = complete(server, prompt="abcabcab", max_tokens=limit, ignore_eos=True, logprobs=1)
        assert reply["usage"]["completion_tokens"] == limit
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == limit
        assert reply["choices"][0]["finish_reason"] == "length"
    assert metric_values(server, "outrider_output_tokens_total")[0] - before == sum(range(1, 21))


@EVERY
def test_min_tokens_counts_tokens_and_not_rounds(native_pair, name):
    """End-of-text is by far the likeliest token from the first one on (sglang PR #33643)."""
    llm = native_pair.llm(name)
    llm = LLM.from_parts(replace(llm.parts, end_ids=frozenset({IDS["z"]})))
    bias = {IDS["z"]: 100.0}
    for minimum in (0, 1, 5, 12):
        (completion,) = llm.generate("zzzz", SamplingParams(max_tokens=30, min_tokens=minimum, logit_bias=bias))
        assert len(completion.token_ids) == minimum + 1
        assert completion.token_ids.index(IDS["z"]) == minimum
        assert completion.finish_reason is FinishReason.STOP


def test_min_tokens_over_http(server):
    """The same on a server, with a stop token (sglang PR #33643)."""
    body = {"prompt": "zzzz", "max_tokens": 30, "stop_token_ids": [IDS["z"]], "logit_bias": {str(IDS["z"]): 100}}
    for minimum in (0, 12):
        usage = complete(server, **body, min_tokens=minimum)["usage"]
        assert usage["completion_tokens"] == minimum + 1


@pytest.fixture(scope="module")
def three_ends(folders, tmp_path_factory):
    """A target with three end-of-text tokens in its generation config, and itself as a draft with another one."""
    root = tmp_path_factory.mktemp("ends")
    for name, ends in {"target": [IDS["a"], IDS["b"], IDS["c"]], "draft": [IDS["z"]]}.items():
        shutil.copytree(folders[0], root / name)
        (root / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return make_pair(root / "target", root / "draft")


@EVERY
def test_each_end_of_text_token_ends_the_text(three_ends, name):
    """A list of end-of-text tokens in the generation config alone; the draft has another one (colibri#675)."""
    llm = three_ends.llm(name)
    assert llm.parts.end_ids == {IDS[letter] for letter in "abc"}
    for end in "abc":
        params = SamplingParams(max_tokens=9, min_tokens=4, logit_bias={IDS[end]: 100.0})
        (completion,) = llm.generate("xyz", params)
        assert completion.token_ids[4:] == (IDS[end],)
        assert completion.finish_reason is FinishReason.STOP
    (other,) = llm.generate("xyz", SamplingParams(max_tokens=9, logit_bias={IDS["z"]: 100.0}))
    assert other.token_ids == (IDS["z"],) * 9
    assert other.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("keys", [("eos",), ("eot",), ("eom",), ("eos", "eot", "eom")])
def test_end_of_text_tokens_of_a_gguf_file(keys):
    """A file may name the end of a turn or of a message alone (colibri#675)."""
    fields = {f"tokenizer.ggml.{key}_token_id": id for id, key in enumerate(keys)}
    assert GGUFFile.end_ids(SimpleNamespace(field=fields.get)) == set(range(len(keys)))


@pytest.mark.fast_cases("ngram-native", "suffix-torch", "itself-native", "random-torch")
@BOTH
@EVERY
def test_the_first_token(pair, name):
    """The token of the prefill counts: one token, end-of-text at once, a prompt of one token or of none.

    (Lightning-AI/litgpt PR #2308, mlx-lm PR #1109)
    """
    prompts = [*PROMPTS, (7,)]
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    plain = pair.generate("none", prompts, one, k=0)
    llm = pair.llm(name)
    completions = llm.generate(prompts, one)
    assert token_ids(completions) == token_ids(plain)
    assert [completion.finish_reason for completion in completions] == [FinishReason.LENGTH] * 4
    for prompt, completion in zip(prompts, plain, strict=True):
        ends = LLM.from_parts(replace(llm.parts, end_ids=frozenset(completion.token_ids)))
        (ended,) = ends.generate(prompt if isinstance(prompt, str) else [prompt], SamplingParams(max_tokens=9))
        assert ended.token_ids == completion.token_ids
        assert (ended.text, ended.finish_reason) == ("", FinishReason.STOP)
    with pytest.raises(OutriderError, match="prompt"):
        llm.generate("", one)
