"""Reads and writes the folder of a set of video models: config.json and a safetensors file for each model."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.errors import OutriderError
from outrider.media.engine import MediaEngine
from outrider.media.models.config import AutoencoderConfig, GeneratorConfig, ScorerConfig, VideoConfig
from outrider.media.models.generator import VideoGenerator
from outrider.media.models.scorer import MatchModel, MatchScorer
from outrider.media.models.transformer import BlockTransformer
from outrider.media.models.vae import Decoder, StreamingDecoder

EMBEDDED = Path(__file__).parents[2] / "assets" / "media"
_FORMAT = "outrider-video-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The networks of a set, and their sizes."""

    video: VideoConfig
    target: BlockTransformer
    drafter: BlockTransformer
    decoder: Decoder
    scorer: MatchModel
    held_out_scorer: MatchModel

    def modules(self) -> dict[str, nn.Module]:
        """Return the networks by the names of their files."""
        return {
            "target": self.target,
            "drafter": self.drafter,
            "decoder": self.decoder,
            "scorer": self.scorer,
            "held_out_scorer": self.held_out_scorer,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoModels:
    """A loaded set, ready for use."""

    video: VideoConfig
    engine: MediaEngine
    held_out_scorer: MatchScorer  # it never decides, so it can say what the decisions cost
    compute_ratio: float  # multiplications of a pass of the target as a multiple of the drafter's


def save_networks(networks: Networks, autoencoder: AutoencoderConfig, folder: Path) -> None:
    """Write a set in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "format": _FORMAT,
        "video": asdict(networks.video),
        "target": asdict(networks.target.config),
        "drafter": asdict(networks.drafter.config),
        "autoencoder": asdict(autoencoder),
        "scorer": asdict(networks.scorer.config),
        "held_out_scorer": asdict(networks.held_out_scorer.config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, module in networks.modules().items():
        weights = {key: value.to(torch.bfloat16).contiguous() for key, value in module.state_dict().items()}
        save_file(weights, folder / f"{name}.safetensors")


def load_models(folder: str | Path | None = None, *, eager_commits: bool = False) -> VideoModels:
    """Load a set of video models in float32.

    Args:
        folder: what `recipes.video` wrote. None: the embedded models.
        eager_commits: see `MediaEngine`.

    Raises:
        OutriderError: the folder holds no such set, or it is damaged.
    """
    if folder is None and not (EMBEDDED / "config.json").is_file():
        raise OutriderError(
            "this copy of Outrider has no video models; train them with python -m recipes.video.train --out DIR, and"
            " name DIR/models"
        )
    path = EMBEDDED if folder is None else Path(folder).expanduser()
    networks = _load_networks(path)
    return VideoModels(
        video=networks.video,
        engine=MediaEngine(
            VideoGenerator(networks.target),
            VideoGenerator(networks.drafter),
            StreamingDecoder(networks.decoder),
            MatchScorer(networks.scorer),
            eager_commits=eager_commits,
        ),
        held_out_scorer=MatchScorer(networks.held_out_scorer),
        compute_ratio=networks.target.pass_work / networks.drafter.pass_work,
    )


def _load_networks(folder: Path) -> Networks:
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise OutriderError(f"{folder} has no readable config.json; name a folder that recipes.video wrote") from None
    if config.get("format") != _FORMAT:
        raise OutriderError(f"{folder}/config.json is of format {config.get('format')}; this version reads {_FORMAT}")
    try:
        video = VideoConfig(**{**config["video"], "steps": tuple(config["video"]["steps"])})
        autoencoder = AutoencoderConfig(**config["autoencoder"])
        networks = Networks(
            video=video,
            target=BlockTransformer(GeneratorConfig(**config["target"]), video),
            drafter=BlockTransformer(GeneratorConfig(**config["drafter"]), video),
            decoder=Decoder(autoencoder, video),
            scorer=MatchModel(ScorerConfig(**config["scorer"])),
            held_out_scorer=MatchModel(ScorerConfig(**config["held_out_scorer"])),
        )
        for name, module in networks.modules().items():
            module.load_state_dict(load_file(folder / f"{name}.safetensors"))
            module.eval().requires_grad_(False)
    except (OSError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise OutriderError(f"the models in {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    return networks
