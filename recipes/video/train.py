"""Trains the embedded video models: autoencoder, target, drafter and two scorers.

python -m recipes.video.train --out video
"""

from pathlib import Path
from typing import Annotated

import torch
import typer

from outrider.media.models.config import AutoencoderConfig, GeneratorConfig, ScorerConfig, VideoConfig
from outrider.media.models.store import Networks, save_networks
from recipes.family.train import say
from recipes.media.generators import train_generator
from recipes.video.autoencoder import encode_clips, train_autoencoder
from recipes.video.scorers import train_frame_scorer

VIDEO = VideoConfig()
AUTOENCODER = AutoencoderConfig()
TARGET = GeneratorConfig(width=128, layers=4, heads=4, repeats=2)
DRAFTER = GeneratorConfig(width=80, layers=2, heads=2, text_width=32)
SCORER = ScorerConfig(width=16)
HELD_OUT_SCORER = ScorerConfig(width=24, frames=2)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the models. The same command continues in it.")],
    clips: Annotated[int, typer.Option(min=64, help="Training videos.")] = 4000,
    autoencoder_steps: Annotated[int, typer.Option(min=1, help="Training steps of the autoencoder.")] = 3000,
    target_steps: Annotated[int, typer.Option(min=1, help="Training steps of the target.")] = 6000,
    drafter_steps: Annotated[int, typer.Option(min=1, help="Training steps of the drafter.")] = 7000,
    scorer_steps: Annotated[int, typer.Option(min=1, help="Training steps of the scorer.")] = 2000,
    held_out_scorer_steps: Annotated[int, typer.Option(min=1, help="Training steps of the held-out scorer.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
) -> None:
    """Train all models, and write them to OUT/models."""
    out.mkdir(parents=True, exist_ok=True)
    autoencoder = train_autoencoder(AUTOENCODER, VIDEO, steps=autoencoder_steps, folder=out, seed=seed)
    autoencoder.requires_grad_(False)
    frames = VIDEO.blocks * VIDEO.frames
    data = encode_clips(autoencoder, clips, frames=frames, file=out / "clips.pt", seed=seed)
    say(f"{len(data.latents)} videos of {frames} frames are encoded")
    drafter = train_generator(
        DRAFTER, VIDEO, data, steps=drafter_steps, batch=8, lr=4e-3, file=out / "drafter.pt", seed=seed + 1
    )
    scorer = train_frame_scorer(
        SCORER, autoencoder.decoder, data, steps=scorer_steps, file=out / "scorer.pt", seed=seed + 2
    )
    held_out_scorer = train_frame_scorer(
        HELD_OUT_SCORER,
        autoencoder.decoder,
        data,
        steps=held_out_scorer_steps,
        file=out / "held_out_scorer.pt",
        seed=seed + 3,
    )
    target = train_generator(
        TARGET, VIDEO, data, steps=target_steps, batch=4, lr=4e-3, file=out / "target.pt", seed=seed + 4
    )
    networks = Networks(
        video=VIDEO,
        target=target,
        drafter=drafter,
        decoder=autoencoder.decoder,
        scorer=scorer,
        held_out_scorer=held_out_scorer,
    )
    save_networks(networks, AUTOENCODER, out / "models")
    say(f"{out / 'models'} is written")


if __name__ == "__main__":
    torch.set_flush_denormal(True)
    typer.run(main)
