"""Scorers from other packages."""

from outrider.media.scorers.image_reward import ImageRewardScorer

__all__ = ["ImageRewardScorer"]
