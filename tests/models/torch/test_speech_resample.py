"""Recordings of other rates and of several channels."""

import sys

import numpy as np
import pytest

from outrider.errors import OutriderError
from outrider.llm import LLM
from outrider.models.torch.speech.source import at_rate
from outrider.models.torch.speech.wav import Recording, read_wav_file
from tests.helpers.speech import MULTILINGUAL, RATE, recording, save_whisper, write_wav


def tone(rate, seconds=0.5, pitch=440.0):
    return (0.5 * np.sin(2 * np.pi * pitch * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = save_whisper(tmp_path_factory.mktemp("speech"), **MULTILINGUAL)
    return LLM(folder, proposer="none", dtype="float32", device="cpu", max_model_len=64)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_other_rates(rate, llm, tmp_path):
    pytest.importorskip("soxr")
    resampled = at_rate(Recording(samples=tone(rate), rate=rate), RATE)
    expected = tone(RATE)
    assert resampled.rate == RATE
    assert abs(resampled.samples.size - expected.size) <= 1
    inner = slice(400, expected.size - 400)  # without the ends, where a filter sees silence
    assert np.abs(resampled.samples[inner] - expected[inner]).max() < 0.01
    file = write_wav(tmp_path / "a.wav", tone(rate), rate=rate)
    error = llm.encode_source(file).values - llm.encode_source(expected).values
    assert error[:, 3:47].abs().max() < 0.1  # frames with sound


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(OutriderError, match=r'pip install "outrider\[speech\]", which resamples, or convert it'):
        at_rate(Recording(samples=tone(8000), rate=8000), RATE)
    same = Recording(samples=tone(RATE), rate=RATE)
    assert np.array_equal(at_rate(same, RATE).samples, same.samples)


def test_too_short_to_resample():
    pytest.importorskip("soxr")
    with pytest.raises(OutriderError, match="the audio has 1 samples, too few to resample"):
        at_rate(Recording(samples=np.zeros(1, np.float32), rate=192000), RATE)


def test_channels_become_their_mean(llm, tmp_path):
    left, right = recording(0, 5000), recording(1, 5000)
    both = np.stack([left, right], axis=1)
    expected = llm.encode_source((left + right) / 2).values
    file = write_wav(tmp_path / "a.wav", both, channels=2, width=4)
    for source in (both, Recording(samples=both, rate=RATE), file, read_wav_file(file)):
        assert (llm.encode_source(source).values - expected).abs().max() < 1e-3
    assert (llm.encode_source(left).values - expected).abs().max() > 1e-2
