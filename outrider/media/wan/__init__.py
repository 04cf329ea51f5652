"""Wan's transformer and autoencoder of diffusers in a block-causal arrangement. Needs the package `diffusers`."""

from outrider.media.wan.decoder import WanStreamDecoder
from outrider.media.wan.generator import SELF_FORCING_STEPS, WanBlockGenerator

__all__ = ["SELF_FORCING_STEPS", "WanBlockGenerator", "WanStreamDecoder"]
