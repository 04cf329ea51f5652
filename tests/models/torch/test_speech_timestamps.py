"""The rules of timestamps: equal to those of transformers at every node of a tree, and in sampled outputs."""

import random

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from outrider.core.params import SamplingParams
from outrider.core.types import AudioFeatures, SpeechOutput
from outrider.lab.audit.statistics import g_test
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch.speech.timestamps import TimestampRules
from outrider.testing import random_tree
from tests.helpers import tiny
from tests.helpers.speech import (
    END,
    FIRST_TIMESTAMP,
    MAX_INITIAL,
    NO_TIMESTAMPS,
    SIZE,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    recording,
)

RULES = TimestampRules(begin=FIRST_TIMESTAMP, end_of_text=END, no_timestamps=NO_TIMESTAMPS, max_initial=MAX_INITIAL)
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128}


def processor(begin_index, max_initial=MAX_INITIAL):
    config = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id = NO_TIMESTAMPS
    config.max_initial_timestamp_index = max_initial
    return WhisperTimeStampLogitsProcessor(config, begin_index=begin_index)


def random_output(rng, length):
    """Tokens among which timestamps are frequent."""
    return [
        rng.randrange(FIRST_TIMESTAMP, SIZE - 20) if rng.random() < 0.5 else rng.randrange(END) for _ in range(length)
    ]


@pytest.mark.parametrize("max_initial", [None, MAX_INITIAL, 1000])
def test_masks_equal_those_of_transformers(max_initial):
    rules = TimestampRules(begin=FIRST_TIMESTAMP, end_of_text=END, no_timestamps=NO_TIMESTAMPS, max_initial=max_initial)
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    prompt = [0, 240, 243]
    outputs = [random_output(rng, length) for length in (0, 1, 1, 2, 2, 2, 2, 3, 3, 4, 7, 20)] * 4
    logits = 3 * torch.randn(len(outputs), SIZE, generator=generator)
    masked = rules.mask(logits, [rules.end_of(output) for output in outputs])
    for output, row, actual in zip(outputs, logits, masked, strict=True):
        expected = processor(len(prompt), max_initial)(torch.tensor([prompt + output]), row[None])[0]
        assert torch.equal(actual, expected), output
    kept = (masked > -torch.inf).sum(-1)
    assert len(set(kept.tolist())) > 5


def test_ends_grow_with_their_tokens():
    rng = random.Random(1)
    for _ in range(20):
        output = random_output(rng, 12)
        end = RULES.end_of([])
        for i, token in enumerate(output):
            end = RULES.extend(end, token)
            assert end == RULES.end_of(output[: i + 1])


@torch.inference_mode()
def test_tree_scores_equal_each_branch_alone(timed_whisper, whisper_model):
    target = make_target(load_checkpoint(timed_whisper, dtype="float32", device="cpu"), slots=4, context=128)
    rng = random.Random(2)
    sources = [AudioFeatures(torch.randn(8, 100, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    prompt = [0, 241, 243]
    outputs = [random_output(rng, length) for length in (0, 1, 6)]
    seqs = []
    for slot, (output, source) in enumerate(zip(outputs, sources, strict=True)):
        seq = tiny.admit(target, slot, prompt, source, speech_output=SpeechOutput.TIMESTAMPS)
        seq.token_ids += output
        seqs.append(seq)
    draft = random_tree([6, 4, 5], SIZE, rng)
    logits = target.score(tiny.everything(seqs), draft).logits
    for b, (seq, source) in enumerate(zip(seqs, sources, strict=True)):
        for node in range(-1, draft.width[b]):
            path = [int(draft.tokens[b, each]) for each in tiny.branch(draft, b, node)]
            tokens = torch.tensor([seq.token_ids + path])
            raw = whisper_model(input_features=source.values[None], decoder_input_ids=tokens, use_cache=False).logits[
                :, -1
            ]
            raw[:, SUPPRESSED] = -torch.inf
            if len(seq.token_ids) + len(path) == len(prompt):
                raw[:, SUPPRESSED_FIRST] = -torch.inf
            expected = processor(len(prompt))(tokens, raw)[0]
            actual = logits[b, 1 + node]
            assert torch.equal(actual == -torch.inf, expected == -torch.inf)
            kept = expected > -torch.inf
            assert (actual[kept] - expected[kept]).norm() < 1e-4 * expected[kept].norm()


@pytest.mark.slow
def test_sampled_output_has_the_distribution_of_the_model(timed_whisper, whisper_draft, whisper_model):
    plain = LLM(timed_whisper, proposer="none", k=0, **OPTIONS)
    features = plain.encode_source(recording(5))
    prompt = plain.start_tokens("en")[:-1]
    probs = {}
    rule = processor(len(prompt))

    @torch.no_grad()
    def spread(tokens, prob):
        if len(tokens) == len(prompt) + 3:
            probs[tuple(tokens[len(prompt) :])] = prob
            return
        ids = torch.tensor([tokens])
        logits = whisper_model(input_features=features.values[None], decoder_input_ids=ids, use_cache=False).logits[
            :, -1
        ]
        logits[:, SUPPRESSED] = -torch.inf
        if len(tokens) == len(prompt):
            logits[:, SUPPRESSED_FIRST] = -torch.inf
        top = (rule(ids, logits)[0] / 2).topk(2)
        for token, share in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
            if share:
                spread([*tokens, token], prob * share)

    spread([*prompt], 1.0)
    assert any(tokens[1] < FIRST_TIMESTAMP for tokens in probs)
    for proposer in (f"draft:{whisper_draft}", "suffix:1000"):
        llm = LLM(timed_whisper, proposer=proposer, k=3, max_num_seqs=16, **OPTIONS)
        params = SamplingParams(max_tokens=3, temperature=2.0, top_k=2, n=400, seed=1, ignore_eos=True)
        requests = llm.request_maker.of_tokens(prompt, params, features, speech_output=SpeechOutput.TIMESTAMPS)
        rows = [llm.add(request) for request in requests]
        while not all(row.finish_reason for row in rows):
            llm.engine.step()
        outputs = [llm.completion(row).token_ids for row in rows]
        counts = [outputs.count(tokens) for tokens in probs]
        assert sum(counts) == len(outputs)
        assert g_test(counts, list(probs.values())).p_value > 1e-3
        assert llm.stats.draft_tokens > 0


def test_draft_of_the_same_weights_is_accepted(timed_whisper):
    """So the draft follows the rules as well."""
    llm = LLM(timed_whisper, proposer=f"draft:{timed_whisper}", k=4, **OPTIONS)
    features = llm.encode_source(recording(1))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (request,) = llm.request_maker.of_tokens((0, 240, 243), params, features, speech_output=SpeechOutput.TIMESTAMPS)
    row = llm.add(request)
    while not row.finish_reason:
        llm.engine.step()
    assert llm.stats.draft_tokens > 0
    assert llm.stats.accepted == llm.stats.reached
