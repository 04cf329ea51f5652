"""The recipe that trains the video models, in the smallest size."""

import random

import torch
from typer import Typer
from typer.testing import CliRunner

from outrider.media import Stride, load_models
from outrider.media.models.captions import LANGUAGE, Scene
from recipes.media.loop import train as train_module
from recipes.media.scorers import one_wrong_word
from recipes.video import train
from recipes.video.shapes import draw_clip, random_clips
from tests.media.made_up import AUTOENCODER, CAPTION, DRAFTER, TARGET, VIDEO


def test_the_recipe_from_end_to_end(tmp_path, monkeypatch):
    sizes = {"VIDEO": VIDEO, "AUTOENCODER": AUTOENCODER, "TARGET": TARGET, "DRAFTER": DRAFTER}
    for name, value in sizes.items():
        monkeypatch.setattr(train, name, value)
    app = Typer(pretty_exceptions_enable=False)
    app.command()(train.main)
    steps = [f"--{name}-steps=2" for name in ("autoencoder", "target", "drafter", "scorer", "held-out-scorer")]
    words = ["--out", str(tmp_path), "--clips", "64", *steps]
    assert CliRunner().invoke(app, words).exit_code == 0
    first = load_models(tmp_path / "models")
    assert first.engine.generate(CAPTION, Stride(2)).content.shape == (10, 3, 16, 16)
    # The same command finds everything trained, and writes the same weights.
    before = (tmp_path / "models" / "target.safetensors").read_bytes()
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (tmp_path / "models" / "target.safetensors").read_bytes() == before


def test_an_interrupted_training_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.media.loop.SAVE_EVERY", 2)

    def run(file, stop_at=None):
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 1)
        calls = []

        def loss(generator):
            calls.append(1)
            if stop_at is not None and len(calls) > stop_at:
                raise KeyboardInterrupt
            return module(torch.randn(4, 3, generator=generator)).square().mean()

        try:
            train_module(module, loss, steps=6, lr=0.1, file=file, seed=1)
        except KeyboardInterrupt:
            return None
        return module.weight

    whole = run(tmp_path / "whole.pt")
    assert run(tmp_path / "parts.pt", stop_at=3) is None
    assert torch.equal(run(tmp_path / "parts.pt"), whole)


def test_drawn_clips_show_their_scene():
    scene = Scene(color="red", shape="square", motion="right", row="top", column="left", background="black")
    clip = draw_clip(scene, 12, 32, random.Random(3))
    assert clip.shape == (12, 3, 32, 32)
    assert 0 <= float(clip.min()) <= float(clip.max()) <= 1
    red = (clip[:, 0] - clip[:, 2]).clamp(min=0.0)
    grid = torch.arange(32.0) + 0.5
    columns = (red.sum(1) * grid).sum(1) / red.sum((1, 2))
    rows = (red.sum(2) * grid).sum(1) / red.sum((1, 2))
    assert abs(float(columns[0]) - 8.5) < 1.2
    assert abs(float(rows[0]) - 8.5) < 1.2
    assert float(rows.max() - rows.min()) < 0.1
    steps = columns.diff()
    assert 0.8 < float(steps.min()) <= float(steps.max()) < 1.2
    clips, scenes = random_clips(2, 3, 32, 0)
    assert clips.shape == (2, 3, 3, 32, 32)
    assert len(scenes) == 2


def test_one_word_is_wrong():
    tokens = torch.tensor([[0, 6, 10, 14, 17, 20]] * 20)
    wrong = one_wrong_word(tokens, (0, 1, 5), torch.Generator().manual_seed(0), LANGUAGE)
    changed = wrong != tokens
    assert changed.sum(1).tolist() == [1] * 20
    assert not changed[:, [2, 3, 4]].any()
    ranges = [(0, 6), (6, 10), (10, 14), (14, 17), (17, 20), (20, 23)]
    for slot, (low, high) in enumerate(ranges):
        assert bool(((wrong[:, slot] >= low) & (wrong[:, slot] < high)).all())
