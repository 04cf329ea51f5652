"""The sizes of the embedded models, as config.json holds them."""

from dataclasses import dataclass

from outrider.media.models import captions
from outrider.media.models.language import Language


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """The settings that all models of a set share, whatever their content is."""

    blocks: int = 8  # of an output
    frames: int = 3  # latent frames of a block
    channels: int = 8  # of a latent
    latent_size: int = 8  # rows and columns of a latent frame
    steps: tuple[float, ...] = (1.0, 0.75, 0.5, 0.25)  # noise levels of the denoising passes

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """The shape of a block: frames, channels, rows, columns."""
        return self.frames, self.channels, self.latent_size, self.latent_size

    @property
    def language(self) -> Language:
        """The captions that the models understand."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoConfig(BlockConfig):
    """The settings that all models of a set of video models share. A latent frame gives one frame of the video."""

    frame_size: int = 32  # rows and columns of a frame of the video

    @property
    def language(self) -> Language:
        """The captions that the models understand."""
        return captions.LANGUAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorConfig:
    """A block-causal transformer."""

    width: int
    layers: int
    heads: int
    repeats: int = 1  # how often a pass runs through all layers, with the same weights
    window: int = 2  # past blocks that a block attends to
    mlp: int = 3  # width of an MLP, in multiples of `width`
    text_width: int = 64
    patch: int = 2  # rows and columns of a latent frame that make a token


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoencoderConfig:
    """The encoder, and the streaming decoder."""

    encoder_width: int = 64
    width: int = 64
    full_width: int = 16  # channels at half of the video's resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerConfig:
    """A model that says how well a frame matches a caption."""

    width: int = 16
    embedding: int = 48
    frames: int = 1  # adjacent frames that it sees at once; 2 show motion
