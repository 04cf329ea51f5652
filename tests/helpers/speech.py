"""Recordings, and small speech models with their generation configs."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSpeechSeq2Seq, GenerationConfig

from tests.helpers import tiny

RATE = 16000
LANGUAGES = {"<|de|>": 241, "<|en|>": 240}
TASKS = {"transcribe": 243, "translate": 244}
NO_TIMESTAMPS = 246
SUPPRESSED, SUPPRESSED_FIRST = [3, 95, 206], [39, 255]
MULTILINGUAL = {
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "is_multilingual": True,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "return_timestamps": False,
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": SUPPRESSED_FIRST,
}
END, PREVIOUS, MAX_INITIAL = 239, 245, 10
TIMESTAMPS = {
    **MULTILINGUAL,
    "eos_token_id": END,
    "pad_token_id": END,
    "prev_sot_token_id": PREVIOUS,
    "max_initial_timestamp_index": MAX_INITIAL,
}
FIRST_TIMESTAMP = NO_TIMESTAMPS + 1
SIZE = 310  # of a vocabulary with 63 timestamps, beyond those of a window of one second


def recording(seed: int, samples: int = 9000) -> Any:
    """Three random chirps, [samples] float32."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / RATE
    sound = np.zeros(samples)
    for _ in range(3):
        loudness, pitch, slide = rng.uniform(0, 0.3), rng.uniform(100, 6000), rng.uniform(0, 1)
        sound += loudness * np.sin(2 * np.pi * pitch * time * (1 + slide * time))
    return sound.astype(np.float32)


def write_wav(path: Path, samples: Any, *, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    """Write samples [n] or [n, channels] in [-1, 1] as integers of `width` bytes."""
    scaled = np.round(np.asarray(samples, np.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8")
    if width == 1:
        scaled += 128
    data = scaled.reshape(-1).view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data)
    return path


def set_generation(folder: Path, **settings: Any) -> Path:
    """Add settings to the generation config of a folder, as published checkpoints have them."""
    config = GenerationConfig.from_pretrained(folder)
    config._from_model_config = False  # otherwise transformers drops what it does not know
    for name, value in settings.items():
        setattr(config, name, value)
    config.save_pretrained(folder)
    return folder


def save_whisper(folder: Path, *, seed: int = 0, layers: int = tiny.LAYERS, **settings: Any) -> Path:
    """Write a small random Whisper with these settings in its generation config."""
    config = tiny.SPEECH["whisper"]()
    config.decoder_layers = layers
    return set_generation(tiny.save(folder, config, seed=seed), **settings)


def load_reference(folder: Path) -> Any:
    """Return the model of a folder in transformers."""
    return AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def save_with_timestamps(folder: Path, *, seed: int = 0, layers: int = tiny.LAYERS, **settings: Any) -> Path:
    """Write a small random model whose vocabulary has timestamps."""
    config = tiny.SPEECH["whisper"]()
    config.decoder_layers = layers
    config.vocab_size = SIZE
    config.eos_token_id = END
    config.pad_token_id = END
    return set_generation(tiny.save(folder, config, seed=seed, size=SIZE), **{**TIMESTAMPS, **settings})
