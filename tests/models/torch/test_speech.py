"""Speech targets: greedy outputs, suppressed tokens, trees, caches, drafts, sampled outputs, recordings, mistakes."""

import random
from itertools import product

import numpy as np
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq

from outrider.core import tree
from outrider.core.params import SamplingParams
from outrider.core.types import AudioFeatures, SequenceState
from outrider.errors import OutriderError
from outrider.lab.audit.statistics import g_test
from outrider.llm import LLM
from outrider.models.loader.load import load_checkpoint
from outrider.models.loader.make import make_target
from outrider.models.torch.speech.wav import Recording, read_wav_file
from outrider.testing import random_tree
from tests.helpers import tiny
from tests.helpers.speech import (
    LANGUAGES,
    MULTILINGUAL,
    NO_TIMESTAMPS,
    RATE,
    SUPPRESSED,
    SUPPRESSED_FIRST,
    TASKS,
    load_reference,
    recording,
    save_whisper,
    set_generation,
    write_wav,
)

TOLERANCE = 1e-4  # relative to the norm of the logits
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 64}
PROPOSERS = ("none", "ngram", "suffix:1000", "merge(ngram,recycle)", "draft", "tree", "cascade")
LENGTHS = (9000, 16000, 1, 4000, 12345)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_whisper(tmp_path_factory.mktemp("speech") / "target", **MULTILINGUAL)


@pytest.fixture(scope="module")
def sibling(tmp_path_factory):
    """A smaller model that hears the same features."""
    return save_whisper(tmp_path_factory.mktemp("sibling") / "draft", seed=1, layers=1, **MULTILINGUAL)


@pytest.fixture(scope="module")
def model(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return LLM(folder, proposer="none", k=0, max_num_seqs=4, **OPTIONS)


@pytest.fixture
def target(folder):
    return make_target(load_checkpoint(folder, dtype="float32", device="cpu"), slots=4, context=128)


def features_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return AudioFeatures(torch.randn(8, 100, generator=generator))


def relative_error(actual, expected):
    return float(((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def expected_logits(model, features, tokens):
    inputs = {"input_features": features.values[None], "decoder_input_ids": torch.tensor([tokens])}
    return model(**inputs, use_cache=False).logits[0, -1]


def suppress(logits, *, first):
    logits = logits.clone()
    logits[..., SUPPRESSED] = -torch.inf
    if first:
        logits[..., SUPPRESSED_FIRST] = -torch.inf
    return logits


def generated(model, features, count, **options):
    """The output of transformers, without the prompt."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.generation_config, "eos_token_id", None)  # so that outputs are equally long
        out = model.generate(features.values[None], max_new_tokens=count, do_sample=False, **options)
    return out[0].tolist()


@pytest.fixture(scope="module")
def translations(model, plain):
    """Recordings, and their outputs from transformers."""
    sources = [recording(seed, samples) for seed, samples in enumerate(LENGTHS)]
    heard = [plain.encode_source(source) for source in sources]
    expected = [generated(model, features, 20, language="de", task="translate") for features in heard]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    return sources, expected


@pytest.mark.fast_cases("ngram", "draft")
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_greedy_equals_generate(proposer, folder, sibling, translations):
    sources, expected = translations
    if proposer in ("draft", "tree", "cascade"):
        proposer = f"{proposer}:{sibling}"
    llm = LLM(folder, proposer=proposer, k=4, max_num_seqs=4, **OPTIONS)
    prompts = [llm.start_tokens("de", "translate")] * len(sources)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    completions = llm.generate(prompts, params, sources=sources)
    assert [list(completion.token_ids) for completion in completions] == expected
    assert (llm.stats.draft_tokens > 0) == (proposer != "none")


def test_greedy_equals_generate_with_a_prompt_of_the_user(folder, model, plain):
    features = plain.encode_source(recording(3))
    prompt = [0, 240, 243, 246, 65, 66]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.generation_config, "eos_token_id", None)
        out = model.generate(
            features.values[None], decoder_input_ids=torch.tensor([prompt]), max_new_tokens=12, do_sample=False
        )
    (completion,) = plain.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True), sources=[features])
    assert list(completion.token_ids) == out[0, -12:].tolist()
    assert plain.encode("AB", language="en")[:4] == tuple(prompt[:4])


def test_checkpoint_that_suppresses_nothing(tmp_path):
    folder = save_whisper(tmp_path)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).eval()
    llm = LLM(folder, proposer="ngram", k=4, **OPTIONS)
    features = llm.encode_source(recording(0))
    (completion,) = llm.generate(sources=features, params=SamplingParams(max_tokens=12, ignore_eos=True))
    assert completion.prompt_token_ids == (0,)
    assert list(completion.token_ids) == generated(model, features, 12)


def test_suppressed_tokens_would_be_emitted_otherwise(tmp_path, folder, plain):
    """So the other tests see what they suppress."""
    free = save_whisper(tmp_path, **{**MULTILINGUAL, "suppress_tokens": None, "begin_suppress_tokens": None})
    llm = LLM(free, proposer="none", k=0, max_num_seqs=4, **OPTIONS)
    sources = [recording(seed) for seed in range(8)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [llm.start_tokens("en")] * len(sources)
    outputs = [completion.token_ids for completion in llm.generate(prompts, params, sources=sources)]
    assert any(token in SUPPRESSED for tokens in outputs for token in tokens)
    assert any(tokens[0] in SUPPRESSED_FIRST for tokens in outputs)
    for completion in plain.generate(prompts, params, sources=sources):
        assert not set(completion.token_ids) & set(SUPPRESSED)
        assert completion.token_ids[0] not in SUPPRESSED_FIRST


@torch.inference_mode()
def test_tree_scores_equal_each_branch_alone(model, target):
    rng = random.Random(1)
    sources = [features_of(seed) for seed in range(3)]
    seqs = [
        tiny.admit(target, slot, tiny.text(rng, length), source)
        for slot, length, source in zip((0, 1, 3), (1, 4, 9), sources, strict=True)
    ]
    batch = tiny.everything(seqs)
    draft = random_tree([6, 4, 5], tiny.VOCAB, rng)
    scores = target.score(batch, draft)
    for b, (seq, source) in enumerate(zip(seqs, sources, strict=True)):
        for node in range(-1, draft.width[b]):
            path = [int(draft.tokens[b, each]) for each in tiny.branch(draft, b, node)]
            expected = suppress(expected_logits(model, source, seq.token_ids + path), first=node == -1)
            actual = scores.logits[b, 1 + node]
            assert torch.equal(actual == -torch.inf, expected == -torch.inf)
            kept = expected > -torch.inf
            assert relative_error(actual[kept], expected[kept]) < TOLERANCE


@pytest.mark.fast_cases("draft")
@pytest.mark.parametrize("proposer", ["draft", "ngram"])
def test_sampled_output_has_the_distribution_of_the_model(proposer, folder, sibling, model, plain):
    prompt = [*plain.start_tokens("en")]
    features = plain.encode_source(recording(5))
    probs = {}
    with torch.inference_mode():
        for first, second, third in product(range(2), repeat=3):
            tokens, prob = list(prompt), 1.0
            for rank in (first, second, third):
                logits = suppress(expected_logits(model, features, tokens), first=len(tokens) == len(prompt))
                top = (logits / 2).topk(2)
                prob *= float(top.values.softmax(-1)[rank])
                tokens.append(int(top.indices[rank]))
            probs[tuple(tokens[len(prompt) :])] = prob
    proposer = f"draft:{sibling}" if proposer == "draft" else proposer
    llm = LLM(folder, proposer=proposer, k=3, max_num_seqs=64, **OPTIONS)
    params = SamplingParams(max_tokens=3, temperature=2.0, top_k=2, n=600, seed=1, ignore_eos=True)
    outputs = [completion.token_ids for completion in llm.generate([prompt], params, sources=[features])]
    counts = [outputs.count(tokens) for tokens in probs]
    assert sum(counts) == len(outputs)
    assert g_test(counts, list(probs.values())).p_value > 1e-3
    assert llm.stats.draft_tokens > 0


def test_draft_of_the_same_weights_is_accepted(folder):
    """So the draft hears the source, and suppresses what the target suppresses."""
    llm = LLM(folder, proposer=f"draft:{folder}", k=4, max_num_seqs=4, **OPTIONS)
    sources = [recording(seed) for seed in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate([llm.start_tokens("en")] * 4, params, sources=sources)
    assert llm.stats.accepted == llm.stats.reached


@torch.inference_mode()
def test_sequence_that_no_user_requested_has_the_logits_of_the_model(target):
    target.cache.admit(0, (0,))
    seq = SequenceState.of((0,))
    assert target.score(tiny.everything([seq]), tree.empty(1, target.device)).logits.isfinite().all()
    with pytest.raises(OutriderError, match="give each request a source"):
        target.score(tiny.everything([tiny.admit(target, 1, [0])]), tree.empty(1, target.device))


# The tokens before a transcript.

OLD = {"forced_decoder_ids": [[1, 240], [2, 243], [3, 246]]}
STARTS = {  # settings, what the user gives, and the tokens
    "a code": (MULTILINGUAL, ("en",), (0, LANGUAGES["<|en|>"], TASKS["transcribe"], NO_TIMESTAMPS)),
    "a name and a task": (
        MULTILINGUAL,
        ("German", "translate"),
        (0, LANGUAGES["<|de|>"], TASKS["translate"], NO_TIMESTAMPS),
    ),
    "a token": (MULTILINGUAL, ("<|de|>",), (0, LANGUAGES["<|de|>"], TASKS["transcribe"], NO_TIMESTAMPS)),
    "a default": ({**MULTILINGUAL, "language": "de"}, (), (0, LANGUAGES["<|de|>"], TASKS["transcribe"], NO_TIMESTAMPS)),
    "old settings": ({**MULTILINGUAL, **OLD}, (), (0, 240, 243, 246)),
    "old settings and a code": (
        {**MULTILINGUAL, **OLD},
        ("de",),
        (0, LANGUAGES["<|de|>"], TASKS["transcribe"], NO_TIMESTAMPS),
    ),
    "without timestamps": ({"no_timestamps_token_id": 246, "return_timestamps": False}, (), (0, 246)),
    "one language": ({}, ("english", "transcribe"), (0,)),
}


@pytest.mark.fast_cases("a code", "a token", "without timestamps")
@pytest.mark.parametrize(("settings", "given", "expected"), STARTS.values(), ids=STARTS)
def test_start_tokens_equal_those_of_transformers(settings, given, expected, tmp_path):
    folder = save_whisper(tmp_path, **settings)
    rules = load_checkpoint(folder, dtype="float32", device="cpu").source.speech
    assert rules.start_tokens(*given) == expected
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    generation = model.generation_config
    if settings.get("lang_to_id"):
        for name, value in zip(("language", "task"), given, strict=False):
            setattr(generation, name, value)
    if "return_timestamps" not in settings:
        generation.return_timestamps = False
    theirs = model._retrieve_init_tokens(
        features_of(0).values[None],
        batch_size=1,
        generation_config=generation,
        config=model.config,
        num_segment_frames=100,
        kwargs={},
    )
    assert tuple(theirs[0].tolist()) == expected


START_MISTAKES = [
    (MULTILINGUAL, (), "transcribes several languages; give the language of the audio: de, en"),
    (MULTILINGUAL, ("fr",), "language 'fr' is unknown to this model; use de or en"),
    (MULTILINGUAL, ("en", "sing"), "task 'sing' is unknown to this model; use transcribe or translate"),
    ({}, ("de",), "language is 'de', and this model transcribes English only"),
    ({}, (None, "translate"), "task is 'translate', and this model transcribes English only"),
    ({**MULTILINGUAL, "forced_decoder_ids": [[1, None], [2, 243]]}, (), "transcribes several languages"),
]


@pytest.mark.parametrize(("settings", "given", "message"), START_MISTAKES)
def test_wrong_start_tokens(settings, given, message, tmp_path):
    llm = LLM(save_whisper(tmp_path, **settings), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match=message):
        llm.start_tokens(*given)


def test_languages_are_for_speech(tmp_path):
    llm = LLM(tiny.save(tmp_path, tiny.ENCODER_DECODER["bart"]()), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match="language is for speech models"):
        llm.start_tokens("en")
    with pytest.raises(OutriderError, match="task is for speech models"):
        llm.encode("a", task="transcribe")


def test_language_of_token_ids(tmp_path):
    llm = LLM(save_whisper(tmp_path, **MULTILINGUAL), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match="language is for a prompt of text"):
        llm.encode([1, 2], language="en")
    with pytest.raises(OutriderError, match="task is for a prompt of text"):
        llm.encode([1, 2], task="translate")


# Recordings.


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files(width, tmp_path):
    samples = recording(0, 500)
    read = read_wav_file(write_wav(tmp_path / "a.wav", samples, width=width))
    assert read.rate == RATE
    assert read.samples.dtype == np.float32
    assert np.abs(read.samples - samples).max() < 2.0 ** (2 - 8 * width) + 1e-6


def test_channels_become_their_mean(tmp_path):
    left, right = recording(0, 500), recording(1, 500)
    read = read_wav_file(write_wav(tmp_path / "a.wav", np.stack([left, right], axis=1), channels=2))
    assert np.abs(read.samples - (left + right) / 2).max() < 1e-4


def test_forms_of_a_source(plain, tmp_path):
    samples = recording(2)
    file = write_wav(tmp_path / "a.wav", samples, width=4)
    expected = plain.encode_source(samples).values
    theirs = tiny.extractor(tiny.SPEECH["whisper"]())(samples, sampling_rate=RATE, return_tensors="pt").input_features
    assert torch.equal(expected, theirs[0])
    for source in (
        samples.astype(np.float64),
        samples.tolist(),
        torch.tensor(samples),
        AudioFeatures(expected),
        Recording(samples=samples, rate=RATE),
        str(file),
        file,
    ):
        assert (plain.encode_source(source).values - expected).abs().max() < 1e-3


def test_streams_and_many_sources(plain, tmp_path):
    file = write_wav(tmp_path / "a.wav", recording(2))
    prompt = plain.start_tokens("en")
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    alone = [plain.generate([prompt], params, sources=source)[0] for source in (recording(1), file)]
    together = plain.generate([prompt] * 2, params, sources=[recording(1), file])
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]
    streamed = [token for chunk in plain.stream(prompt, params, source=file) for token in chunk.token_ids]
    assert tuple(streamed) == alone[1].token_ids


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text.wav").write_text("no recording")
    write_wav(tmp_path / "empty.wav", [])
    short = write_wav(tmp_path / "short.wav", recording(0)).read_bytes()
    (tmp_path / "short.wav").write_bytes(short[:20])
    return tmp_path


MISTAKES = {
    "nowhere.wav": "nowhere.wav' cannot be read .No such file or directory",
    "text.wav": "text.wav is no WAV file of PCM samples",
    "short.wav": "short.wav is no WAV file of PCM samples",
    "empty.wav": "empty.wav holds no samples",
}


@pytest.mark.parametrize(("name", "message"), MISTAKES.items(), ids=MISTAKES)
def test_wrong_files(name, message, files, plain):
    with pytest.raises(OutriderError, match=message):
        plain.generate(sources=[files / name])


WRONG_SOURCES = [
    (None, "source is missing"),
    (recording(0, 16001), "the audio is 1.0 s long, and the encoder takes 1 s; use outrider.transcribe"),
    (np.zeros(0, np.float32), r"an array of shape \(0,\)"),
    (np.zeros((2, 5, 1), np.float32), r"an array of shape \(2, 5, 1\)"),
    (np.zeros((2, 500), np.float32), r"shape \(2, 500\), which is \[n, channels\] with 500 channels; transpose it"),
    (Recording(samples=recording(0), rate=0), "the audio has 0 samples per second; give a rate of at least 1"),
    (np.full(5, np.nan, np.float32), "NaN or infinite samples"),
    (np.zeros(5, np.int16), "the audio has samples of type int16; give floats"),
    (["a"], "cannot be read"),
    ([[None, 1.0]], "items that are not numbers"),
    ({1}, "the audio is a set"),
    (AudioFeatures(torch.zeros(8, 99)), r"have shape \(8, 99\), and the model takes \(8, 100\)"),
]


@pytest.mark.parametrize(("source", "message"), WRONG_SOURCES)
def test_wrong_sources(source, message, plain):
    with pytest.raises(OutriderError, match=message):
        plain.generate([plain.start_tokens("en")], sources=None if source is None else source)


def test_tokens_are_no_audio(plain):
    with pytest.raises(OutriderError, match="source is text, and this target is a speech model"):
        plain.codec.check_source((1, 2))


def test_audio_for_a_model_of_text(tmp_path):
    llm = LLM(tiny.save(tmp_path, tiny.ENCODER_DECODER["bart"]()), proposer="none", **OPTIONS)
    with pytest.raises(OutriderError, match="a source has the type ndarray; give a string"):
        llm.generate(sources=[recording(0)])
    with pytest.raises(OutriderError, match="source is audio, and this target reads text"):
        llm.codec.check_source(features_of(0))


# What does not fit together.


def test_refused_drafts(folder, tmp_path):
    bart = tiny.save(tmp_path / "bart", tiny.ENCODER_DECODER["bart"]())
    with pytest.raises(OutriderError, match="reads text and the target speech"):
        LLM(folder, proposer=f"draft:{bart}", **OPTIONS)
    config = tiny.SPEECH["whisper"]()
    config.num_mel_bins = 16
    other = set_generation(tiny.save(tmp_path / "bins", config), **MULTILINGUAL)
    with pytest.raises(OutriderError, match="takes 100 frames of 16 bins and the target 100 of 8"):
        LLM(folder, proposer=f"draft:{other}", **OPTIONS)


def test_feature_extractor_of_another_model(tmp_path):
    folder = save_whisper(tmp_path)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(OutriderError, match="has no working feature extractor"):
        load_checkpoint(folder)
    config = tiny.SPEECH["whisper"]()
    config.num_mel_bins = 16
    tiny.extractor(config).save_pretrained(folder)
    with pytest.raises(OutriderError, match="makes 100 frames of 16 bins, and the model takes 100 of 8"):
        load_checkpoint(folder)


@pytest.mark.parametrize("proposer", ["exit:1", "quantized:int8", "mtp"])
def test_refused_proposers(proposer, folder):
    with pytest.raises(OutriderError, match=r"cannot draft with its own layers|has no module for multi-token"):
        LLM(folder, proposer=proposer, k=4, **OPTIONS)


def test_bfloat16(folder):
    llm = LLM(folder, proposer="ngram", k=4, **{**OPTIONS, "dtype": "bfloat16"})
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (completion,) = llm.generate([llm.start_tokens("en")], params, sources=[recording(0)])
    assert len(completion.token_ids) == 8
