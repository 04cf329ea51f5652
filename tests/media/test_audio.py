"""Audio models: spectra and samples, the streaming synthesizer, scores of windows, files, commands and the recipe."""

import math
import random
import wave

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from outrider.errors import OutriderError
from outrider.media import AudioModels, QualityGate, Scorer, StreamDecoder, TargetOnly, load_models
from outrider.media.models.audio.config import LANGUAGE, AudioConfig
from outrider.media.models.audio.scorer import SoundMatchModel, SoundScorerConfig
from outrider.media.models.audio.spectrum import encode, magnitudes
from outrider.media.models.audio.store import AudioNetworks, save_audio_networks
from outrider.media.models.audio.synthesizer import StreamingSynthesizer
from outrider.media.models.config import GeneratorConfig
from outrider.media.models.scorer import MatchScorer
from outrider.media.models.transformer import BlockTransformer
from outrider.media.output.wav import check_sound_file, write_wav
from recipes.audio import train
from recipes.audio.fits import CaptionFits
from recipes.audio.scorers import damage_sounds
from recipes.audio.sounds import make_sound, random_sounds
from tests.media.commands import document, run

CAPTION = "a bright arpeggio on a low do at a fast tempo"
AUDIO = AudioConfig(blocks=4, frames=4, channels=32, steps=(1.0, 0.5))
TARGET = GeneratorConfig(width=32, layers=2, heads=2, text_width=16, patch=1, repeats=2)
DRAFTER = GeneratorConfig(width=8, layers=1, heads=1, text_width=8, patch=1)
SCORERS = (
    SoundScorerConfig(width=4, embedding=8, window=4, step=2),
    SoundScorerConfig(width=4, embedding=8, window=3, step=1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    target, drafter = BlockTransformer(TARGET, AUDIO), BlockTransformer(DRAFTER, AUDIO)
    for network in (target, drafter):
        torch.nn.init.normal_(network.head.weight, std=0.3)
    scorer, held_out = (SoundMatchModel(config, AUDIO) for config in SCORERS)
    networks = AudioNetworks(audio=AUDIO, target=target, drafter=drafter, scorer=scorer, held_out_scorer=held_out)
    path = tmp_path_factory.mktemp("audio")
    save_audio_networks(networks, path)
    return path


def sine(frequency, samples, audio, amplitude=0.5):
    return amplitude * (2 * math.pi * frequency / audio.sample_rate * torch.arange(samples)).sin()


def stream(decoder, latents, frames):
    decoder.reset()
    return torch.cat([decoder.decode(block) for block in latents.split(frames)])


def test_latents_and_magnitudes():
    audio = AudioConfig()
    latents = encode(sine(1000, 2048, audio), audio)
    assert latents.shape == (16, 128, 1, 1)
    spectra = magnitudes(latents, audio)
    # 1000 Hz is bin 32 of 31.25 Hz, which is channel 31. A sine of 0.5 has 0.5 x 256 / 4 there with a Hann window.
    assert spectra[4].argmax() == 31
    assert float(spectra[4, 31]) == pytest.approx(32, rel=0.01)


@pytest.mark.parametrize("frequency", [440.0, 1007.0, 2500.5])
def test_the_synthesizer_answers_with_the_sine_one_hop_later(frequency):
    audio = AudioConfig()
    sound = stream(StreamingSynthesizer(audio), encode(sine(frequency, 8192, audio), audio), audio.frames)
    assert sound.shape == (8192,)
    # The phase is the synthesizer's own, so the best sine of this frequency is subtracted. The frequency that it reads
    # from the spectra is off by up to 0.5 Hz, so over long times the phases drift apart.
    steady = sound[4096:4608]
    times = torch.arange(len(steady)) * (2 * math.pi * frequency / audio.sample_rate)
    basis = torch.stack([times.sin(), times.cos()], dim=1)
    fit = torch.linalg.lstsq(basis, steady[:, None]).solution
    assert float(fit.norm()) == pytest.approx(0.5, abs=0.03)
    assert float((steady - (basis @ fit)[:, 0]).square().mean().sqrt()) < 0.05


def test_samples_have_the_spectra_that_they_were_made_from():
    audio = AudioConfig()
    sounds, _ = random_sounds(4, audio, 3)
    for sound in sounds:
        latents = encode(sound, audio)
        again = encode(stream(StreamingSynthesizer(audio), latents, audio.frames)[audio.hop :], audio)
        wanted, got = magnitudes(latents[:-2], audio), magnitudes(again[: len(latents) - 2], audio)
        assert float((wanted - got).norm() / wanted.norm()) < 0.15


def test_streaming_gives_the_samples_of_decoding_at_once():
    decoder = StreamingSynthesizer(AUDIO)
    assert isinstance(decoder, StreamDecoder)
    latents = torch.randn(12, *AUDIO.latent_shape[1:], generator=torch.Generator().manual_seed(0))
    streamed = stream(decoder, latents, 4)
    assert streamed.abs().max() > 0
    torch.testing.assert_close(streamed, stream(decoder, latents, 12))


def test_restoring_the_synthesizer_leaves_no_trace():
    decoder = StreamingSynthesizer(AUDIO)
    first, draft, second = torch.randn(3, *AUDIO.latent_shape, generator=torch.Generator().manual_seed(1))
    decoder.decode(first)
    state = decoder.snapshot()
    expected = decoder.decode(second)
    decoder.restore(state)
    assert not torch.equal(decoder.decode(draft), expected)
    decoder.restore(state)
    assert torch.equal(decoder.decode(second), expected)


def test_wild_and_silent_latents_give_finite_samples():
    decoder = StreamingSynthesizer(AUDIO)
    for value in (-1e9, 1e9):
        sound = decoder.decode(torch.full(AUDIO.latent_shape, value))
        assert bool(sound.isfinite().all())
        assert float(sound.abs().max()) <= 1


def test_scores_are_probabilities_of_windows():
    torch.manual_seed(0)
    scorer = MatchScorer(SoundMatchModel(SCORERS[0], AUDIO).eval())
    assert isinstance(scorer, Scorer)
    block = 0.5 * torch.randn(8 * AUDIO.hop)
    scores = scorer.score(CAPTION, block)
    assert scores.shape == (3,)  # windows of 4 hops, 2 apart
    assert bool(((scores > 0) & (scores < 1)).all())
    torch.testing.assert_close(scorer.score(CAPTION, block[2 * AUDIO.hop :]), scores[1:])
    # Damage in one window shows in its score and in that of its neighbor, and the worst window decides.
    damaged = block.clone()
    damaged[: 2 * AUDIO.hop] = 0
    after = scorer.score(CAPTION, damaged)
    assert torch.equal(after[1:], scores[1:])
    assert not torch.equal(after[0], scores[0])
    worst = QualityGate(0.5, aggregate="window:2").judge(scores).score
    assert worst == pytest.approx(min(float(scores[:2].mean()), float(scores[1:].mean())))


def test_captions():
    assert LANGUAGE.words(CAPTION) == ("bright", "arpeggio", "low", "do", "fast")
    assert LANGUAGE.template.format(*LANGUAGE.words(CAPTION)) == CAPTION
    assert LANGUAGE.tokens(CAPTION) == [2, 5, 9, 11, 19]
    assert len(set(LANGUAGE.random_captions(504, 0))) == 504
    with pytest.raises(OutriderError, match="use: a TIMBRE PATTERN on a HEIGHT NOTE"):
        LANGUAGE.words("a red circle")
    with pytest.raises(OutriderError, match="has 'sharp' in place of one of: pure, hollow, bright"):
        LANGUAGE.words(CAPTION.replace("bright", "sharp"))


def test_sounds_have_the_pitches_of_their_caption():
    audio = AudioConfig()

    def pitches(*words):
        sound = make_sound(words, 2 * audio.sample_rate, audio, random.Random(0))
        assert float(sound.abs().max()) <= 1
        return magnitudes(encode(sound, audio), audio).argmax(-1)

    bins = pitches("pure", "arpeggio", "high", "do", "slow")
    # do, mi, sol and do an octave above, from 523 Hz, in bins of 31.25 Hz; a note lasts 16 frames.
    for note, frequency in enumerate((523, 659, 784, 1047)):
        assert abs((int(bins[16 * note + 8]) + 1) * 31.25 - frequency) < 32
    rising, falling = pitches("pure", "rise", "high", "do", "slow"), pitches("pure", "fall", "high", "do", "slow")
    assert bool((rising[4:60].diff() >= 0).all())
    assert bool((falling[4:60].diff() <= 0).all())


def test_captions_fit_the_windows_that_they_may_belong_to():
    fits = CaptionFits(AudioConfig())

    def may_be(caption, other, first=0):
        tokens, others = (torch.tensor([LANGUAGE.tokens(each)]) for each in (caption, other))
        return bool(fits(others, tokens, first, 7))

    rise = "a pure rise on a low do at a slow tempo"
    # A frame is 16 ms. The chirp leaves do, which re's never has; later it has pitches of both.
    assert not may_be(rise, rise.replace("do", "re"))
    assert may_be(rise, rise.replace("do", "re"), first=20)
    assert not may_be(rise, rise.replace("do", "ti"), first=20)
    assert not may_be(rise, rise.replace("rise", "fall"), first=20)
    assert not may_be(rise, rise.replace("pure", "bright"), first=20)
    sol = "a pure pulse on a low sol at a slow tempo"
    assert may_be(sol, "a pure arpeggio on a low do at a slow tempo")
    # An arpeggio on sol has more notes than sol. Its first note lasts 16 frames.
    assert may_be(sol.replace("pulse", "arpeggio"), sol)
    assert not may_be(sol.replace("pulse", "arpeggio"), sol, first=12)
    # Only the first harmonic of the highest pitches can be heard, so timbres sound alike there.
    high = "a hollow pulse on a high ti at a slow tempo"
    assert not may_be(high, high.replace("hollow", "pure"))
    top = high.replace("pulse", "arpeggio")
    assert may_be(top, top.replace("hollow", "pure"), first=52)
    every = torch.tensor([LANGUAGE.tokens(each) for each in LANGUAGE.random_captions(504, 0)])
    assert bool(fits(every, every, 40, 11).all())


def test_damage_changes_every_clip():
    clips = torch.randn(16, 8, *AUDIO.latent_shape[1:], generator=torch.Generator().manual_seed(0))
    damaged = damage_sounds(clips, torch.Generator().manual_seed(1))
    assert damaged.shape == clips.shape
    assert bool(((damaged - clips).abs().amax((1, 2, 3, 4)) > 0.1).all())


def test_a_set_of_models(folder):
    models = load_models(folder)
    assert isinstance(models, AudioModels)
    assert models.audio == AUDIO
    assert models.compute_ratio > 8
    result = models.engine.generate(CAPTION, QualityGate(0.0), seed=1)
    assert result.content.shape == (4 * 4 * 32,)
    assert [block.maker for block in result.blocks] == ["target"] + ["drafter"] * 3
    rejected = models.engine.generate(CAPTION, QualityGate(1.0), seed=1)
    target = models.engine.generate(CAPTION, TargetOnly(), seed=1)
    assert torch.equal(rejected.content, target.content)  # rejected drafts leave no trace


def test_the_clock_is_used(folder):
    ticks = iter(range(1000))
    models = load_models(folder, clock=lambda: float(next(ticks)))
    block = next(models.engine.stream(CAPTION, TargetOnly()))
    assert (block.seconds.generate, block.seconds.decode, block.seconds.score) == (1, 1, 0)


def test_wav_files(tmp_path):
    file = check_sound_file(tmp_path / "a.wav")
    write_wav(torch.tensor([0.0, 0.5, -1.0, 3.0]), file, sample_rate=8000)
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 8000)
        values = torch.frombuffer(bytearray(sound.readframes(4)), dtype=torch.int16)
    assert values.tolist() == [0, 16384, -32767, 32767]


def test_demo(folder, tmp_path):
    report = document(run("demo", "--models", folder, "--threshold", 0.0, "--out", tmp_path / "a.wav"))
    assert report["kind"] == "audio"
    assert report["exact"] is False
    assert report["files"] == [str(tmp_path / f"a.{name}.wav") for name in ("target-only", "drafter-only", "routed")]
    for file in report["files"]:
        with wave.open(file) as sound:
            assert sound.getnframes() == 512
    assert LANGUAGE.words(report["prompt"])


def test_bench_and_tune(folder, tmp_path):
    words = ["--models", folder, "--aggregate", "window:2", "--num-prompts", 4]
    report = document(run("bench", *words, "--rounds", 1, "--processor-time"))
    assert report["time"] == "processor"
    assert {"first block only", "stride 2"} <= {each["router"] for each in report["controls"]}
    assert report["gates"][0]["router"].startswith("gate window:2")
    report = document(run("tune", *words, "--quality", 0.5, "--out", tmp_path / "c.json"))
    assert report["calibration"]["aggregate"] == "window:2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fps 10", "--fps belongs to video"),
        ("--out a.mp4", "is not the name of a sound file; end it with .wav"),
        ("--prompt cat", "has another form than the models know; use: a TIMBRE"),
    ],
)
def test_mistakes_are_one_line(folder, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--models", folder, "--threshold", 0.5, *words.split())
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_recipe_from_end_to_end(tmp_path, monkeypatch):
    sizes = {"AUDIO": AUDIO, "TARGET": TARGET, "DRAFTER": DRAFTER, "SCORER": SCORERS[0], "HELD_OUT_SCORER": SCORERS[1]}
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)
    recipe = Typer(pretty_exceptions_enable=False)
    recipe.command()(train.main)
    steps = [f"--{name}-steps=2" for name in ("target", "drafter", "scorer", "held-out-scorer")]
    words = ["--out", str(tmp_path), "--sounds", "64", *steps]
    result = CliRunner().invoke(recipe, words)
    assert result.exit_code == 0, result.output
    assert load_models(tmp_path / "models").engine.generate(CAPTION, QualityGate(0.0)).content.shape == (512,)
    before = (tmp_path / "models" / "target.safetensors").read_bytes()
    assert CliRunner().invoke(recipe, words).exit_code == 0
    assert (tmp_path / "models" / "target.safetensors").read_bytes() == before


def test_the_recipe_keeps_the_ratio_of_compute():
    target, drafter = (BlockTransformer(config, train.AUDIO) for config in (train.TARGET, train.DRAFTER))
    assert target.pass_work > 8 * drafter.pass_work
    assert sum(parameter.numel() for parameter in target.parameters()) < 1_500_000
