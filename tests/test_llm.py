"""The Python front door, on the embedded pair in float32."""

import math
import random

import numpy as np
import pytest
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.core.planner import FixedPlanner
from outrider.core.types import FinishReason
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint

CODE = "<|endoftext|>import os\nimport sys\n\n\ndef main():\n    parser ="
TASK = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32", k=4, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def plain():
    return LLM(dtype="float32", proposer="none", max_num_seqs=4, max_model_len=256)


def test_equals_transformers(llm):
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    checkpoint.model.set_attn_implementation("sdpa")
    ids = llm.encode(CODE)
    with torch.inference_mode():
        theirs = checkpoint.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=40, do_sample=False
        )
    (ours,) = llm.generate(CODE, SamplingParams(max_tokens=40))
    assert list(ours.token_ids) == theirs[0, len(ids) :].tolist()
    assert ours.stats.tau > 1.3


def test_a_seed_gives_the_same_text_whatever_the_planner_has_learned():
    llm = LLM(dtype="float32", max_num_seqs=4, max_model_len=256)
    want = SamplingParams(temperature=1.0, max_tokens=24, seed=5)
    (first,) = llm.generate(CODE, want)
    llm.generate([CODE] * 4, SamplingParams(temperature=1.0, max_tokens=48))
    (again,) = llm.generate(CODE, want)
    assert again.token_ids == first.token_ids
    assert max(first.stats.offered, default=0) > 0


def test_a_seed_gives_the_same_text_whoever_is_beside_and_whatever_was_read_before():
    """Also of a prompt that the draft would read in several rounds."""
    llm, chance = LLM(dtype="float32", max_num_seqs=4, max_model_len=1024), random.Random(2)
    long, other = ([chance.randrange(5, 12000) for _ in range(700)] for _ in range(2))
    for seed in range(2):
        want = SamplingParams(temperature=1.0, max_tokens=12, seed=seed, ignore_eos=True)
        (first,) = llm.generate([long[seed:]], want)
        (again,) = llm.generate([long[seed:]], want)
        beside = llm.generate([other, long[seed:]], [SamplingParams(temperature=1.0, max_tokens=16), want])[1]
        assert again.token_ids == beside.token_ids == first.token_ids


def test_order_n_and_seeds(llm):
    want = SamplingParams(temperature=1.0, max_tokens=8, n=3, seed=5)
    both = llm.generate([CODE, llm.encode_chat(TASK)], want)
    assert [c.prompt_token_ids for c in both] == [llm.encode(CODE)] * 3 + [llm.encode_chat(TASK)] * 3
    assert len({c.token_ids for c in both[:3]}) == 3
    again = llm.generate(CODE, SamplingParams(temperature=1.0, max_tokens=8, seed=5))
    assert again[0].token_ids == both[0].token_ids
    unseeded = llm.generate(CODE, SamplingParams(temperature=1.0, max_tokens=8))[0]
    replay = llm.generate(CODE, SamplingParams(temperature=1.0, max_tokens=8, seed=unseeded.seed))[0]
    assert replay.token_ids == unseeded.token_ids


def test_parameters_per_prompt(llm):
    short, long = llm.generate([CODE, CODE], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=9)])
    assert (len(short.token_ids), len(long.token_ids)) == (3, 9)
    assert short.finish_reason is FinishReason.LENGTH
    assert long.token_ids[:3] == short.token_ids
    with pytest.raises(OutriderError, match="one per prompt"):
        llm.generate([CODE, CODE], [SamplingParams()])


def test_stop_string_inside_an_accepted_run(llm):
    whole = llm.generate(CODE, SamplingParams(max_tokens=40))[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]
    for k_text in (llm, LLM(dtype="float32", k=8, max_num_seqs=1, max_model_len=256)):
        cut = k_text.generate(CODE, SamplingParams(max_tokens=40, stop=stop))[0]
        assert cut.finish_reason is FinishReason.STOP
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert len(cut.token_ids) == len(cut.from_draft) <= len(whole.token_ids)
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_stop_tokens_and_end_of_text(llm):
    whole = llm.generate(CODE, SamplingParams(max_tokens=30))[0]
    stop = whole.token_ids[11]
    first = whole.token_ids.index(stop)
    cut = llm.generate(CODE, SamplingParams(max_tokens=30, stop_token_ids=(stop,)))[0]
    assert cut.token_ids == whole.token_ids[: first + 1]
    assert cut.finish_reason is FinishReason.STOP
    late = llm.generate(CODE, SamplingParams(max_tokens=30, stop_token_ids=(stop,), min_tokens=25))[0]
    assert len(late.token_ids) >= 25
    answer = llm.generate([llm.encode_chat(TASK)], SamplingParams(max_tokens=200))[0]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids[-1] in (0, 3)
    assert "<|" not in answer.text
    on = llm.generate([llm.encode_chat(TASK)], SamplingParams(max_tokens=len(answer.token_ids) + 5, ignore_eos=True))[0]
    assert len(on.token_ids) == len(answer.token_ids) + 5


def test_logprobs_are_the_models_own(llm):
    want = SamplingParams(temperature=0.7, top_k=20, max_tokens=12, seed=1, logprobs=3)
    got = llm.generate(CODE, want)[0]
    checkpoint = load_checkpoint(embedded("mini"), dtype="float32", device="cpu")
    checkpoint.model.set_attn_implementation("eager")
    text = [*got.prompt_token_ids, *got.token_ids]
    with torch.inference_mode():
        logits = checkpoint.model(torch.tensor([text])).logits[0, len(got.prompt_token_ids) - 1 : -1]
    law = logits.log_softmax(-1)
    drawn = (logits / 0.7).masked_fill(logits < logits.topk(20).values[:, -1:], -torch.inf).log_softmax(-1)
    assert len(got.logprobs) == len(got.token_ids) == 12
    for i, entry in enumerate(got.logprobs):
        assert entry.token == got.token_ids[i]
        assert math.isclose(entry.logprob, law[i, entry.token], abs_tol=1e-4)
        assert math.isclose(entry.sampled_logprob, drawn[i, entry.token], abs_tol=1e-4)
        assert [token for token, _ in entry.top] == law[i].topk(3).indices.tolist()
    greedy = llm.generate(CODE, SamplingParams(max_tokens=3, logprobs=0))[0]
    assert all(entry.sampled_logprob == 0 and entry.top == () for entry in greedy.logprobs)


def test_stream_adds_up(llm, plain):
    want = SamplingParams(max_tokens=40, temperature=0.8, seed=2)
    chunks = list(llm.stream(CODE, want))
    whole = llm.generate(CODE, want)[0]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.completion is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert len(chunks) < len(whole.token_ids)
    stopped = list(plain.stream(CODE, SamplingParams(max_tokens=40, stop="parse")))
    assert "parse" not in "".join(chunk.text for chunk in stopped)


@pytest.mark.parametrize("k", [4, "auto"])
def test_streams_and_others_carry_each_other_on(k):
    llm = LLM(target=embedded("nano"), proposer="ngram", dtype="float32", max_num_seqs=2, max_model_len=256, k=k)
    want = SamplingParams(max_tokens=20, ignore_eos=True)
    wanted = llm.generate(CODE, want)[0]
    first, second, third = (llm.stream(CODE, want) for _ in range(3))
    chunks = [[next(first)], [next(second)], []]  # the third has no slot yet
    assert llm.generate(CODE, want)[0].text == wanted.text
    for found, stream in zip(chunks, (first, second, third), strict=True):
        found += stream
        assert "".join(chunk.text for chunk in found) == found[-1].completion.text == wanted.text
        assert tuple(token for chunk in found for token in chunk.token_ids) == wanted.token_ids
    assert llm.engine.step() == ()


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_is_aborted_from_outside_ends(plain, waits):
    streams = [plain.stream(CODE, SamplingParams(max_tokens=50)) for _ in range(4 if waits else 0)]
    (request,) = plain.request_maker.of_prompt(CODE, SamplingParams(max_tokens=50))
    streams.append(plain.chunks(request))
    if not waits:
        next(streams[-1])
    plain.abort(request.id)
    assert [chunk.completion.finish_reason for chunk in streams[-1]] == [FinishReason.ABORT]
    for stream in streams[:-1]:
        next(stream)
        stream.close()
    assert not plain.engine.busy()


def test_leaving_a_stream_frees_its_row(llm):
    for _ in range(6):  # more than there are rows
        for _ in llm.stream(CODE, SamplingParams(max_tokens=50)):
            break
    assert not llm.engine.busy()


@pytest.mark.parametrize("streamed", [False, True])
def test_texts_are_not_lost_with_a_plan_that_cannot_be_written(tmp_path, caplog, streamed):
    plan = tmp_path / "gone" / "plan.json"
    plan.parent.mkdir()
    llm = LLM(target=embedded("nano"), proposer="ngram", dtype="float32", max_num_seqs=2, max_model_len=256, plan=plan)
    plan.parent.rmdir()
    want = SamplingParams(max_tokens=8, ignore_eos=True)
    done = list(llm.stream(CODE, want))[-1].completion if streamed else llm.generate(CODE, want)[0]
    assert len(done.token_ids) == 8
    (said,) = [record.getMessage() for record in caplog.records if "plan" in record.getMessage()]
    assert "cannot be written" in said
    with pytest.raises(OutriderError, match="cannot be written"):
        llm.save_plan()


def test_64_rows_at_once():
    many = LLM(dtype="float32", max_num_seqs=64, max_model_len=64, max_num_batched_tokens=256)
    ids = many.encode(CODE)
    prompts = [ids[: 1 + i % len(ids)] for i in range(70)]
    wants = [SamplingParams(max_tokens=2 + i % 9, temperature=(i % 3) / 2, seed=i) for i in range(70)]
    together = many.generate(prompts, wants)
    assert [len(c.token_ids) for c in together if c.finish_reason is FinishReason.LENGTH] != []
    walk = LLM(dtype="float32", max_num_seqs=64, max_model_len=64, verifier="walk", k=4)
    alone = LLM(dtype="float32", max_num_seqs=1, max_model_len=64, verifier="walk", k=2)
    for i in (0, 7, 33, 69):
        assert walk.generate(prompts[i], wants[i])[0].token_ids == alone.generate(prompts[i], wants[i])[0].token_ids
    assert together[3].token_ids == many.generate(prompts[3], wants[3])[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "fix"),
    [
        ("", SamplingParams(), "empty"),
        ([], SamplingParams(), "empty"),
        ([5] * 256, SamplingParams(), "shorten the prompt"),
        ([12288], SamplingParams(), "vocabulary of 12288; use ids from 0 to 12287"),
        ([-1], SamplingParams(), "vocabulary of 12288; use ids from 0 to 12287"),
        ("a", SamplingParams(max_tokens=None, min_tokens=256), "min_tokens is 256, and after the prompt the context"),
        ("a\ud800", SamplingParams(), "half of a surrogate pair.*character 1; leave it out"),
        (b"abc", SamplingParams(), "a prompt has the type bytes; give a string"),
        (None, SamplingParams(), "has no default prompt; give a prompt"),
        (torch.tensor([1, 2]), SamplingParams(), "of an array its tolist"),
        ([5, 2.7], SamplingParams(), "2.7 among its token ids"),
        ([True], SamplingParams(), "True among its token ids"),
        (["a", "b"], SamplingParams(), "'a' among its token ids"),
        ("a", {"temperature": 1}, r"give SamplingParams\(...\)"),
        ("a", SamplingParams(stop_token_ids=(99999,)), "99999"),
        ("a", SamplingParams(logit_bias={99999: 1.0}), "99999"),
    ],
)
def test_bad_prompts(llm, prompt, params, fix):
    with pytest.raises(OutriderError, match=fix):
        llm.generate([prompt], params)
    with pytest.raises(OutriderError, match=fix):
        llm.stream(prompt, params)
    assert not llm.engine.busy()


@pytest.mark.parametrize(
    ("messages", "fix"),
    [
        ("hello", "a conversation is a list of messages"),
        (["hello"], "a conversation is a list of messages"),
        ([{"role": "user", "content": "\udfff"}], "half of a surrogate pair"),
    ],
)
def test_bad_conversations(llm, messages, fix):
    with pytest.raises(OutriderError, match=fix):
        llm.encode_chat(messages)


def test_prompts_of_other_numbers_than_pythons_own(llm):
    want = SamplingParams(max_tokens=4)
    ids = llm.encode(CODE)
    assert llm.generate(list(np.array(ids)), want)[0].token_ids == llm.generate(ids, want)[0].token_ids


@pytest.mark.parametrize(
    ("tokens", "fix"),
    [
        ([-1], "token id -1 is not in the vocabulary of 12288; use ids from 0 to 12287"),
        ([5, 12288], "token id 12288 is not in the vocabulary of 12288; use ids from 0 to 12287"),
        ([1.5], "1.5 among its token ids"),
        ("abc", "'abc' is not a list of token ids"),
        (7, "7 is not a list of token ids"),
    ],
)
def test_what_cannot_be_decoded(llm, tokens, fix):
    with pytest.raises(OutriderError, match=fix):
        llm.decode(tokens)


def test_what_is_no_constraint_cannot_be_prepared(llm):
    with pytest.raises(OutriderError, match="constraint is 'a'; use one of Constraint's"):
        llm.prepare("a")


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"k": -1}, "k is -1"),
        ({"k": 257}, "k is 257; use a number of draft tokens from 0 .plain decoding. to 256, or auto"),
        ({"k": 2.5}, "k is 2.5; use a number of draft tokens"),
        ({"k": True}, "k is True; use a number of draft tokens"),
        ({"k": None}, "k is None; use a number of draft tokens"),
        ({"target": b"here"}, "target is b'here'; give the folder"),
        ({"target": ""}, "target is ''; give the folder"),
        ({"target": embedded("mtp")}, "is a draft head, which does not run alone; use it as draft:DIR or tree:DIR"),
        ({"proposer": "oracle"}, "none, ngram.*draft:DIR"),
        ({"proposer": ""}, "use none for plain decoding"),
        ({"proposer": 5}, "proposer is 5; use none, ngram"),
        ({"verifier": "magic"}, "walk, coupled"),
        ({"verifier": 3}, "walk, coupled"),
        (
            {"verifier": "block", "proposer": "ngram"},
            "and ngram drafts trees; use walk, coupled, siblings or traversal",
        ),
        ({"verifier": "rejection", "proposer": "first(ngram,draft:@nano)"}, "and ngram drafts trees; use walk"),
        ({"verifier": "block", "proposer": "merge(draft:@nano,exit:1)"}, "and merge drafts trees; use walk"),
        ({"verifier": "lenient", "proposer": "tree:@nano"}, "and tree drafts trees; use walk"),
        ({"proposer": "draft"}, "draft needs the folder of a draft model; write draft:DIR"),
        ({"proposer": "draft:nowhere"}, "nowhere is not a folder"),
        ({"proposer": "tree:nowhere"}, "nowhere is not a folder"),
        ({"proposer": "cascade:@mtp"}, "use it as draft:DIR or tree:DIR"),
        ({"proposer": "draft-text:@mtp"}, "use it as draft:DIR or tree:DIR"),
        ({"proposer": "merge(ngram,draft-tokens:@mtp)"}, "use it as draft:DIR or tree:DIR"),
        ({"proposer": "retrieval:nowhere"}, "nowhere holds no datastore"),
        ({"proposer": "retrieval:nowhere:17"}, "use 1 to 16"),
        ({"proposer": "suffix:many"}, "write suffix:100000"),
        ({"proposer": "lookahead:9"}, "write lookahead:10x3x8"),
        ({"proposer": "exit:all"}, "exit:all is not a number of layers; write for example exit:2"),
        ({"proposer": "skip:1+1"}, "names a layer twice"),
        ({"proposer": "quantized:int3"}, "quantized:int3 is unknown"),
        ({"threads": 0}, "at least 1"),
        ({"threads": "2"}, "threads is '2'; use a whole number"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_seqs": "4"}, "max_num_seqs is '4'; use a whole number of at least 1"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens is 2.5; use a whole number of at least 1"),
        ({"max_model_len": "64"}, "max_model_len is '64'; use a whole number of at least 1"),
        ({"cache_gb": math.nan}, "cache_gb is nan; use a number above 0"),
        ({"cache_gb": math.inf}, "cache_gb is inf; use a number above 0"),
        ({"planner": 3}, "planner is 3; use an object with the methods plan and trim"),
        ({"planner": FixedPlanner}, "use an object with the methods plan and trim"),
        ({"cache_gb": 0}, "cache_gb is 0; use a number above 0"),
        ({"plan": 5}, "plan is 5; give the path of a file"),
        ({"plan": "plan.json", "k": 4}, "plan plan.json needs k auto, and k is 4"),
        ({"max_seqs": 4}, "did you mean max_num_seqs"),
        ({"dtype": ["float32"]}, "dtype is .*; use a name"),
        ({"quantize": ["int8"]}, "use int8 or int4"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_loaded(arguments, fix, monkeypatch):
    monkeypatch.setattr("outrider.models.loader.load.name_weights", lambda *args: pytest.fail("it was loaded"))
    with pytest.raises(OutriderError, match=fix):
        LLM(**arguments)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ({"max_model_len": 4096}, "from 2 to 2048"),
        ({"dtype": "int3"}, "float32"),
        ({"device": "abacus"}, "auto or cpu"),
        ({"proposer": "json:absent"}, r"has no attribute 'absent'\); correct the module json, or name a class"),
        ({"proposer": "json:loads"}, "loads cannot make a proposer from a ProposerSetup"),
        ({"proposer": lambda setup: setup}, r"lacks needs = Needs\(\), admit, propose, commit, release"),
    ],
)
def test_bad_arguments(arguments, fix):
    with pytest.raises(OutriderError, match=fix):
        LLM(**{"max_model_len": 64, "max_num_seqs": 1, **arguments})


def test_context_full_ends_the_completion(llm):
    ids = llm.encode(CODE)
    full = llm.generate([(ids * 20)[:250]], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(full.token_ids) == 6
    assert full.finish_reason is FinishReason.LENGTH


def test_draft_in_a_crowded_context():
    """Rows of different room: some have spent theirs while others still guess."""
    small = LLM(dtype="float32", max_num_seqs=2, max_model_len=40, k=8)
    ids = small.encode(CODE) * 4
    wants = [SamplingParams(max_tokens=n, temperature=1.0, seed=1, ignore_eos=True) for n in (10, 35)]
    done = small.generate([ids[:30], ids[:5]], wants)
    assert [len(c.token_ids) for c in done] == [10, 35]


def test_lossy_says_so():
    loose = LLM(dtype="float32", verifier="typical", max_num_seqs=1, max_model_len=128)
    assert loose.generate(CODE, SamplingParams(max_tokens=4))[0].stats.exact is False
