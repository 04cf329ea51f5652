"""Trainings of draft heads for encoder-decoder targets: data with sources, results, and mistakes."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.core.prompts import Prompt
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.train.data.batches import Collator, score_sequence
from outrider.train.data.feature_cache import FeatureCache
from outrider.train.data.prompts import encode_sourced_prompt, read_prompts
from outrider.train.data.sample import Sample
from outrider.train.model.presets import Sizes, describe
from outrider.train.run import Training
from outrider.train.settings import Settings
from tests.helpers import speech, tiny
from tests.helpers.configured import with_engine
from tests.helpers.train_setup import NANO, make_request, make_sample


def write(file, *lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = tiny.ENCODER_DECODER["bart"]()
    config.d_model = 64
    return tiny.save(tmp_path_factory.mktemp("bart"), config)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = random.Random(0)
    sources = ("".join(rng.choices("abcdefgh", k=rng.randint(2, 20))) for _ in range(48))
    return write(tmp_path_factory.mktemp("data") / "sources.jsonl", *({"source": source} for source in sources))


def settings(folder, data, out, **options):
    defaults = {
        "target": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "steps_per_generation": 2,
        "epochs": 2,
        "max_tokens": 16,
        "ignore_eos": True,
        "temperature": 0.0,
        "eval_every": 0,
    }
    return with_engine(Settings, out=str(out), data=[data], **defaults | options)


def test_trained_heads_draft_for_the_target(folder, data, tmp_path):
    sources = [json.loads(line)["source"] for line in Path(data).read_text("utf-8").splitlines()][:4]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4}
    plain = LLM(folder, proposer="none", **options).generate(sources=sources, params=params)
    for kind in ("medusa", "mtp"):
        out = tmp_path / kind
        cache = {"cache_dir": str(tmp_path / "cache")}
        document, _ = Training(kind, settings(folder, data, out, **cache)).run()
        assert document["evaluation"]["temperature 1"]["tau"] > 1.3
        llm = LLM(folder, proposer=f"draft:{out}", k=4, **options)
        drafted = llm.generate(sources=sources, params=params)
        assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
        assert llm.stats.draft_tokens > 0
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 46 * 2  # of two epochs, used by both heads


@pytest.mark.fast_cases("slim")
@pytest.mark.parametrize("kind", ["eagle3", "slim", "dflash"])
def test_head_for_t5_is_trained_and_exact(kind, data, tmp_path):
    config = tiny.ENCODER_DECODER["t5"]()
    config.d_model = 64
    target = tiny.save(tmp_path / "t5", config)
    _, lines = Training(kind, settings(target, data, tmp_path / "out", epochs=3, lr=1e-2)).run()
    assert lines[-1]["loss"] < lines[0]["loss"]
    options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 2}
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    llms = [LLM(target, proposer=proposer, **options) for proposer in ("none", f"draft:{tmp_path / 'out'}")]
    plain, drafted = (llm.generate(sources=["abc", "hgfedcba"], params=replace(params, k=3)) for llm in llms)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert llms[1].stats.draft_tokens > 0


@pytest.mark.parametrize("name", ["t5", "bart", "t5gemma"])
@torch.inference_mode()
def test_target_distribution_is_that_of_the_source(name, tmp_path):
    target = tiny.Shelf(tmp_path).target(name, layers=(tiny.LAYERS - 1,))
    tables = target.share_weights()
    vocab, hidden = tables.head.shape
    description = describe("medusa", Sizes(hidden=hidden, layers=target.layers, vocab=vocab, epsilon=tables.epsilon))
    collator = Collator(description.aux_states, (target.layers - 1,), tables, torch.arange(vocab))
    tokens, source = (0, 3, 9), (5, 6, 7, 8)
    collator.check(target, tokens, source)
    scores = score_sequence(target, tokens, source)
    states = scores.states((target.layers - 1,), 0, ())
    batch = collator.collate([Sample(id=0, tokens=(*tokens, 4), states=states, prompt=3)], train_on_prompts=False)
    expected = scores.logits[0, 0].softmax(-1)
    other = score_sequence(target, tokens, (9, 9, 1)).logits[0, 0].softmax(-1)
    # The states are in bfloat16.
    assert (batch.target_probs[0] - expected).abs().sum() < 0.1 * (other - expected).abs().sum()


def test_sequences_of_another_source_are_other_samples(tmp_path):
    cache = FeatureCache(tmp_path, gigabytes=1.0, origin="here", layers=(1,))
    request = replace(make_request(), source_token_ids=(1, 2))
    cache.write(request, make_sample([1, 2, 3, 4], prompt=2))
    assert cache.read(request) is not None
    for source in ((), (1, 3)):
        assert cache.read(replace(request, source_token_ids=source)) is None


def test_prompt_begins_the_output(folder, tmp_path):
    file = write(tmp_path / "lines.jsonl", {"source": "ab"}, {"source": "cd", "prompt": "e", "category": "x"})
    first, second = read_prompts([file], with_sources=True)
    llm = LLM(folder, proposer="none", dtype="float32", device="cpu")
    assert encode_sourced_prompt(llm, first) == (llm.start_tokens(), llm.encode_source("ab"))
    assert encode_sourced_prompt(llm, second) == (llm.encode("e"), llm.encode_source("cd"))
    assert second.category == "x"


def test_lines_for_decoder_only_targets_may_have_a_field_source(tmp_path):
    file = write(tmp_path / "lines.jsonl", {"prompt": "a", "source": "the web"})
    assert read_prompts([file]) == [Prompt(id=f"{file}:1", category="", prompt="a", messages=None)]


LINES = {
    "no source": ({"prompt": "a"}, "1: no source, which this encoder-decoder target reads; give lines like"),
    "no text": ({"source": 3}, "1: no source"),
    "messages": ({"source": "a", "messages": []}, "1: messages are for decoder-only targets"),
    "empty prompt": ({"source": "a", "prompt": ""}, "1: prompt must be a string of at least one character"),
}


@pytest.mark.parametrize(("line", "message"), LINES.values(), ids=LINES)
def test_invalid_lines(line, message, folder, tmp_path):
    with pytest.raises(OutriderError, match=message):
        Training("medusa", settings(folder, write(tmp_path / "lines.jsonl", line), tmp_path / "out"))


REFUSED = {
    "draft": ("draft", {}, "the kind draft does not support encoder-decoder targets; train another one, such as"),
    "kv-sharing": ("kv-sharing", {}, "the kind kv-sharing does not support encoder-decoder targets"),
    "train_target": ("mtp", {"train_target": 0.3}, "--train-target does not support encoder-decoder targets"),
    "init_target": ("slim", {"init_from": NANO, "init_target": NANO}, "--init-target does not support encoder-decoder"),
}


@pytest.mark.parametrize(("kind", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_trainings(kind, options, message, folder, data, tmp_path):
    if kind == "mtp":  # leaves the options of answers out
        options = options | {"max_tokens": 256, "temperature": 1.0, "ignore_eos": False}
    with pytest.raises(OutriderError, match=message):
        Training(kind, settings(folder, data, tmp_path / "out", **options))


def test_source_that_is_too_long(folder, tmp_path):
    file = write(tmp_path / "lines.jsonl", {"source": "a"}, {"source": "a" * 129})
    with pytest.raises(OutriderError, match="2: source is 129 tokens long, and the encoder takes 128"):
        Training("medusa", settings(folder, file, tmp_path / "out"))


def test_speech_target_is_refused(data, tmp_path):
    whisper = speech.save_whisper(tmp_path / "target", **speech.MULTILINGUAL)
    with pytest.raises(OutriderError, match="train reads sources of text, and this target is a speech model"):
        Training("medusa", settings(whisper, data, tmp_path / "out"))
