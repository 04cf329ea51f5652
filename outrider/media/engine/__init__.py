"""The engine of media: one output is made block by block."""

from outrider.media.engine.engine import MediaEngine, MediaRun, block_noise

__all__ = ["MediaEngine", "MediaRun", "block_noise"]
