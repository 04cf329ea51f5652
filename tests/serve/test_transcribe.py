"""`transcribe`: segments and texts equal to those of transformers, with and without speculation; options, mistakes."""

import itertools

import numpy as np
import pytest
import torch

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.serve.speech.run import transcribe
from tests.helpers import tiny
from tests.helpers.speech import PREVIOUS, RATE, load_reference, recording, save_with_timestamps

OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_seqs": 4}
TOKENS = 24  # of a window
LONG = (40000, 47321, 30000)  # samples


@pytest.fixture(scope="module")
def llm(timed_whisper):
    return LLM(timed_whisper, proposer="ngram", k=4, **OPTIONS)


def whole_features(samples):
    """The features of a recording without padding, [1, bins, frames]."""
    extractor = tiny.extractor(tiny.SPEECH["whisper"]())
    options = {"sampling_rate": RATE, "truncation": False, "padding": "longest", "return_tensors": "pt"}
    return extractor(samples, **options).input_features


def expected_segments(model, features, **options):
    out = model.generate(
        features,
        return_timestamps=True,
        return_segments=True,
        max_new_tokens=TOKENS,
        do_sample=False,
        **{"task": "transcribe", **options},
    )
    return [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in out["segments"][0]]


def check_equal(transcript, expected):
    assert [list(segment.token_ids) for segment in transcript.segments] == [tokens for _, _, tokens in expected]
    for segment, (start, end, _) in zip(transcript.segments, expected, strict=True):
        assert segment.start == pytest.approx(start)
        assert segment.end == pytest.approx(end)


@pytest.mark.fast_cases("tree")
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft", "tree"])
def test_long_recordings_equal_generate(proposer, timed_whisper, whisper_draft, whisper_model):
    recordings = [recording(seed, samples) for seed, samples in enumerate(LONG)]
    spec = f"{proposer}:{whisper_draft}" if proposer in ("draft", "tree") else proposer
    llm = LLM(timed_whisper, proposer=spec, k=4, **OPTIONS)
    transcripts = transcribe(llm, recordings, SamplingParams(max_tokens=TOKENS), language="de")
    for samples, transcript in zip(recordings, transcripts, strict=True):
        expected = expected_segments(whisper_model, whole_features(samples), language="de")
        assert len(transcript.completions) > 1
        check_equal(transcript, expected)
        assert transcript.text == "".join(segment.text for segment in transcript.segments)
        assert transcript.seconds == pytest.approx(samples.size / RATE)
        assert (transcript.language, transcript.language_detected) == ("de", False)
    assert (llm.stats.draft_tokens > 0) == (proposer != "none")


def test_timestamps_of_short_recordings_equal_generate(llm, whisper_model):
    for seed, samples in enumerate((16000, 9000, 4000)):
        samples = recording(seed + 10, samples)
        for source, features in (
            (samples, whole_features(samples)),
            (llm.encode_source(samples), llm.encode_source(samples).values[None]),  # padded with silence
        ):
            (transcript,) = transcribe(
                llm, source, SamplingParams(max_tokens=TOKENS), language="en", task="translate", timestamps=True
            )
            check_equal(transcript, expected_segments(whisper_model, features, language="en", task="translate"))
            assert transcript.task == "translate"


def test_previous_text_equals_generate(llm, whisper_model):
    samples = recording(3, 40000)
    features = whole_features(samples)
    params = SamplingParams(max_tokens=TOKENS)
    (plain,) = transcribe(llm, samples, params, language="de")
    (conditioned,) = transcribe(llm, samples, params, language="de", condition_on_previous_text=True)
    check_equal(conditioned, expected_segments(whisper_model, features, language="de", condition_on_prev_tokens=True))
    assert conditioned.segments != plain.segments
    words = [PREVIOUS, *tiny.tokenizer()(" Mia reads", add_special_tokens=False)["input_ids"]]
    expected = expected_segments(
        whisper_model, features, language="de", prompt_ids=torch.tensor(words), condition_on_prev_tokens=False
    )
    (prompted,) = transcribe(llm, samples, params, language="de", prompt="  Mia reads ")
    check_equal(prompted, expected)
    assert prompted.completions[0].prompt_token_ids == (*words, 0, 241, 243)


def test_language_detection_equals_generate(tmp_path):
    codes = {4: "de", 2: "en"}  # tokens between which this model decides by what it hears
    folder = save_with_timestamps(tmp_path, lang_to_id={f"<|{code}|>": token for token, code in codes.items()})
    model = load_reference(folder)
    llm = LLM(folder, proposer="ngram", k=4, **OPTIONS)
    found = set()
    for seed in itertools.takewhile(lambda _: len(found) < len(codes), range(5)):
        samples = recording(seed, 20000)
        features = whole_features(samples)
        expected = int(model.detect_language(features, num_segment_frames=100)[0])
        (transcript,) = transcribe(llm, samples, SamplingParams(max_tokens=TOKENS))
        assert transcript.language_detected
        assert transcript.language == codes[expected]
        check_equal(transcript, expected_segments(model, features))
        (short,) = transcribe(llm, samples[:16000], SamplingParams(max_tokens=4))
        padded = llm.encode_source(samples[:16000]).values[None]
        assert short.completions[0].prompt_token_ids[1] == int(model.detect_language(padded, num_segment_frames=100)[0])
        found.add(transcript.language)
    assert found == set(codes.values())


def test_encoder_runs_once_per_window(timed_whisper, monkeypatch):
    llm = LLM(timed_whisper, proposer="none", k=0, **OPTIONS)
    encoder = llm.parts.loaded.checkpoint.model.get_encoder()
    forward = encoder.forward
    passes = []
    monkeypatch.setattr(encoder, "forward", lambda features: passes.append(1) or forward(features))
    (transcript,) = transcribe(llm, recording(0, 40000), SamplingParams(max_tokens=TOKENS))
    assert transcript.language_detected
    assert len(passes) == len(transcript.completions) > 1


def test_short_recording_without_timestamps_equals_generate_of_llm(llm):
    samples = recording(4)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    (transcript,) = transcribe(llm, samples, params, language="de", task="translate")
    (completion,) = llm.generate([llm.start_tokens("de", "translate")], params, sources=[samples])
    assert transcript.completions[0].token_ids == completion.token_ids
    assert transcript.text == completion.text
    assert transcript.segments == ()


def test_very_short_recording(llm):
    (transcript,) = transcribe(
        llm, np.zeros(1, np.float32), SamplingParams(max_tokens=8), language="en", timestamps=True
    )
    assert len(transcript.completions) == 1
    assert transcript.segments


def test_seed_repeats_the_transcript(llm):
    samples = recording(2, 40000)
    params = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5)
    first, again = transcribe(llm, [samples, samples], params, language="de")
    assert [each.token_ids for each in first.segments] == [each.token_ids for each in again.segments]
    other = transcribe(llm, samples, SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=6), language="de")[0]
    assert [each.token_ids for each in first.segments] != [each.token_ids for each in other.segments]


def test_checkpoint_names_the_language(tmp_path):
    old = {"forced_decoder_ids": [[1, None], [2, 244]]}
    llm = LLM(save_with_timestamps(tmp_path, **old), proposer="none", **OPTIONS)
    (transcript,) = transcribe(llm, recording(0), SamplingParams(max_tokens=4))
    assert transcript.language_detected
    assert transcript.task == "translate"
    assert transcript.completions[0].prompt_token_ids[2:] == (244, 246)
    named = LLM(save_with_timestamps(tmp_path / "b", language="de"), proposer="none", **OPTIONS)
    (transcript,) = transcribe(named, recording(0), SamplingParams(max_tokens=4))
    assert (transcript.language, transcript.language_detected) == ("de", False)


MISTAKES = [
    ({"language": "xx"}, {}, "language 'xx' is unknown to this model; use de or en"),
    ({"task": "sing"}, {}, "task 'sing' is unknown to this model; use transcribe or translate"),
    ({"prompt": "a <300>"}, {}, "prompt has the special token <300>; leave it out"),
    ({"prompt": 5}, {}, "prompt is 5; give a string, or None"),
    (
        {"condition_on_previous_text": True},
        {"temperature": 0.9},
        "condition_on_previous_text needs a temperature below 0.5, because errors go on, and it is 0.9",
    ),
    ({}, {"n": 2}, "n is 2, and a recording has one transcript"),
    ({}, {"stop": "a"}, "stop is not supported in transcripts"),
]


@pytest.mark.parametrize(("options", "params", "message"), MISTAKES)
def test_mistakes(options, params, message, llm):
    with pytest.raises(OutriderError, match=message):
        transcribe(llm, recording(0), SamplingParams(max_tokens=4, **params), **options)
    assert not llm.engine.busy()


def test_checkpoints_without_what_is_needed(tmp_path):
    bare = tiny.save(tmp_path / "bare", tiny.SPEECH["whisper"]())
    llm = LLM(bare, proposer="none", dtype="float32", device="cpu", max_model_len=64)
    with pytest.raises(OutriderError, match="has no no_timestamps_token_id, so its timestamps are unknown"):
        transcribe(llm, recording(0, 20000))
    with pytest.raises(OutriderError, match="has no prev_sot_token_id"):
        transcribe(llm, recording(0), prompt="a")
    (transcript,) = transcribe(llm, recording(0), SamplingParams(max_tokens=4))
    assert (transcript.language, transcript.language_detected) == ("en", False)
    text = LLM(tiny.save(tmp_path / "bart", tiny.ENCODER_DECODER["bart"]()), proposer="none", device="cpu")
    with pytest.raises(OutriderError, match="this target is no speech model and transcribes no audio"):
        transcribe(text, recording(0))
