"""Trains small audio models: target, drafter and two scorers.

python -m recipes.audio.train --out audio
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.scorer import SoundScorerConfig
from outrider.media.models.audio.spectrum import encode
from outrider.media.models.audio.store import AudioNetworks, save_audio_networks
from outrider.media.models.config import GeneratorConfig
from recipes.audio.scorers import train_sound_scorer
from recipes.audio.sounds import random_sounds
from recipes.family.train import say
from recipes.media.clips import Clips
from recipes.media.generators import train_generator

AUDIO = AudioConfig()
TARGET = GeneratorConfig(width=160, layers=4, heads=4, repeats=2, patch=1)
# A token is a whole spectrum. Below a width of about 80 a model cannot hold the spectra of the training sounds.
DRAFTER = GeneratorConfig(width=96, layers=2, heads=2, text_width=32, patch=1)
SCORER = SoundScorerConfig(width=48)
HELD_OUT_SCORER = SoundScorerConfig(width=64, window=12, step=6)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the models. The same command continues in it.")],
    sounds: Annotated[int, typer.Option(min=64, help="Training sounds.")] = 6000,
    target_steps: Annotated[int, typer.Option(min=1, help="Training steps of the target.")] = 2000,
    drafter_steps: Annotated[int, typer.Option(min=1, help="Training steps of the drafter.")] = 12000,
    scorer_steps: Annotated[int, typer.Option(min=1, help="Training steps of the scorer.")] = 3000,
    held_out_scorer_steps: Annotated[int, typer.Option(min=1, help="Training steps of the held-out scorer.")] = 3000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
) -> None:
    """Train all models, and write them to OUT/models."""
    out.mkdir(parents=True, exist_ok=True)
    samples, tokens = random_sounds(sounds, AUDIO, seed)
    latents = torch.stack([encode(each, AUDIO).half() for each in samples])
    say(f"{len(latents)} sounds of {latents.shape[1]} frames are ready")
    data = Clips(latents=latents, tokens=tokens)
    drafter = train_generator(
        DRAFTER, AUDIO, data, steps=drafter_steps, batch=8, lr=4e-3, file=out / "drafter.pt", seed=seed + 1
    )
    scorer = train_sound_scorer(SCORER, AUDIO, data, steps=scorer_steps, file=out / "scorer.pt", seed=seed + 2)
    held_out_scorer = train_sound_scorer(
        HELD_OUT_SCORER,
        AUDIO,
        data,
        steps=held_out_scorer_steps,
        file=out / "held_out_scorer.pt",
        seed=seed + 3,
    )
    target = train_generator(
        TARGET, AUDIO, data, steps=target_steps, batch=8, lr=4e-3, file=out / "target.pt", seed=seed + 4
    )
    networks = AudioNetworks(
        audio=AUDIO, target=target, drafter=drafter, scorer=scorer, held_out_scorer=held_out_scorer
    )
    save_audio_networks(networks, out / "models")
    say(f"{out / 'models'} is written")


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    typer.run(main)
