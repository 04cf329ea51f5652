"""Makes a set of audio models from its config.json, and writes it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.scorer import SoundMatchModel, SoundScorerConfig
from outrider.media.models.config import GeneratorConfig
from outrider.media.models.files import read_weights, write_set
from outrider.media.models.transformer import BlockTransformer

FORMAT = "outrider-audio-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioNetworks:
    """The networks of a set, and their sizes. The decoder has no weights."""

    audio: AudioConfig
    target: BlockTransformer
    drafter: BlockTransformer
    scorer: SoundMatchModel
    held_out_scorer: SoundMatchModel


def save_audio_networks(networks: AudioNetworks, folder: Path) -> None:
    """Write a set in bfloat16."""
    config = {
        "format": FORMAT,
        "audio": asdict(networks.audio),
        "target": asdict(networks.target.config),
        "drafter": asdict(networks.drafter.config),
        "scorer": asdict(networks.scorer.config),
        "held_out_scorer": asdict(networks.held_out_scorer.config),
    }
    write_set(config, networks, folder)


def load_audio_networks(config: dict[str, Any], folder: Path) -> AudioNetworks:
    """Return the networks of a folder. Raises what a damaged folder causes."""
    audio = AudioConfig(**{**config["audio"], "steps": tuple(config["audio"]["steps"])})
    networks = AudioNetworks(
        audio=audio,
        target=BlockTransformer(GeneratorConfig(**config["target"]), audio),
        drafter=BlockTransformer(GeneratorConfig(**config["drafter"]), audio),
        scorer=SoundMatchModel(SoundScorerConfig(**config["scorer"]), audio),
        held_out_scorer=SoundMatchModel(SoundScorerConfig(**config["held_out_scorer"]), audio),
    )
    read_weights(networks, folder)
    return networks
