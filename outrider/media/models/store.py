"""Loads the folder of a set of video or audio models, and writes that of video models."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from lzma import LZMAError
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors import SafetensorError

from outrider.errors import OutriderError
from outrider.media.contract import Scorer
from outrider.media.engine import MediaEngine
from outrider.media.models.audio.config import AudioConfig
from outrider.media.models.audio.store import FORMAT as AUDIO_FORMAT
from outrider.media.models.audio.store import AudioNetworks, load_audio_networks
from outrider.media.models.audio.synthesizer import StreamingSynthesizer
from outrider.media.models.config import AutoencoderConfig, GeneratorConfig, ScorerConfig, VideoConfig
from outrider.media.models.files import read_config, read_weights, write_set
from outrider.media.models.generator import TransformerGenerator
from outrider.media.models.language import Language
from outrider.media.models.scorer import MatchModel, MatchScorer
from outrider.media.models.transformer import BlockTransformer
from outrider.media.models.vae import Decoder, StreamingDecoder

EMBEDDED = Path(__file__).parents[2] / "assets" / "media"
_VIDEO_FORMAT = "outrider-video-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """The networks of a set of video models, and their sizes."""

    video: VideoConfig
    target: BlockTransformer
    drafter: BlockTransformer
    decoder: Decoder
    scorer: MatchModel
    held_out_scorer: MatchModel


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModels:
    """A loaded set, ready for use."""

    engine: MediaEngine
    held_out_scorer: Scorer  # it never decides, so it can say what the decisions cost
    compute_ratio: float  # multiplications of a pass of the target as a multiple of the drafter's
    language: Language  # the captions that the models understand


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoModels(MediaModels):
    """A loaded set of video models."""

    video: VideoConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioModels(MediaModels):
    """A loaded set of audio models."""

    audio: AudioConfig


def save_networks(networks: Networks, autoencoder: AutoencoderConfig, folder: Path) -> None:
    """Write a set of video models in bfloat16."""
    config = {
        "format": _VIDEO_FORMAT,
        "video": asdict(networks.video),
        "target": asdict(networks.target.config),
        "drafter": asdict(networks.drafter.config),
        "autoencoder": asdict(autoencoder),
        "scorer": asdict(networks.scorer.config),
        "held_out_scorer": asdict(networks.held_out_scorer.config),
    }
    write_set(config, networks, folder)


def load_models(
    folder: str | Path | None = None, *, eager_commits: bool = False, clock: Callable[[], float] = perf_counter
) -> VideoModels | AudioModels:
    """Load a set of models in float32. Its config.json says whether they make video or audio.

    Args:
        folder: what `recipes.video` or `recipes.audio` wrote. None: the embedded video models.
        eager_commits: see `MediaEngine`.
        clock: see `MediaEngine`.

    Raises:
        OutriderError: the folder holds no such set, or it is damaged.
    """
    if folder is None and not (EMBEDDED / "config.json").is_file():
        raise OutriderError(
            "this copy of Outrider has no video models; train them with python -m"
            " recipes.video.train --out DIR, and name DIR/models"
        )
    path = EMBEDDED if folder is None else Path(folder).expanduser()
    config = read_config(path)
    if config.get("format") not in (_VIDEO_FORMAT, AUDIO_FORMAT):
        raise OutriderError(
            f"{path}/config.json is of format {config.get('format')}; this version reads"
            f" {_VIDEO_FORMAT} and {AUDIO_FORMAT}"
        )
    try:
        if config["format"] == AUDIO_FORMAT:
            sound = load_audio_networks(config, path)
            synthesizer = StreamingSynthesizer(sound.audio)
            return AudioModels(audio=sound.audio, **_shared_parts(sound, synthesizer, eager_commits, clock))
        networks = _load_networks(config, path)
        decoder = StreamingDecoder(networks.decoder)
        return VideoModels(video=networks.video, **_shared_parts(networks, decoder, eager_commits, clock))
    except (OSError, KeyError, TypeError, RuntimeError, SafetensorError, LZMAError) as error:
        reason = str(error).partition("\n")[0]
        raise OutriderError(
            f"the models in {path} cannot be loaded ({type(error).__name__}: {reason}); copy the folder again"
        ) from None


def _shared_parts(
    networks: Networks | AudioNetworks,
    decoder: StreamingDecoder | StreamingSynthesizer,
    eager_commits: bool,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Return the fields of `MediaModels`."""
    target, drafter = TransformerGenerator(networks.target), TransformerGenerator(networks.drafter)
    scorer = MatchScorer(networks.scorer)
    return {
        "engine": MediaEngine(target, drafter, decoder, scorer, eager_commits=eager_commits, clock=clock),
        "held_out_scorer": MatchScorer(networks.held_out_scorer),
        "compute_ratio": networks.target.pass_work / networks.drafter.pass_work,
        "language": networks.scorer.language,
    }


def _load_networks(config: dict[str, Any], folder: Path) -> Networks:
    video = VideoConfig(**{**config["video"], "steps": tuple(config["video"]["steps"])})
    networks = Networks(
        video=video,
        target=BlockTransformer(GeneratorConfig(**config["target"]), video),
        drafter=BlockTransformer(GeneratorConfig(**config["drafter"]), video),
        decoder=Decoder(AutoencoderConfig(**config["autoencoder"]), video),
        scorer=MatchModel(ScorerConfig(**config["scorer"])),
        held_out_scorer=MatchModel(ScorerConfig(**config["held_out_scorer"])),
    )
    read_weights(networks, folder)
    return networks
