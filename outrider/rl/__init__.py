"""Rollouts for reinforcement learning that stay exact while the policy changes."""

from __future__ import annotations

from outrider.rl.records import Rollout, RolloutBatch
from outrider.rl.rollout import RolloutEngine

__all__ = ["Rollout", "RolloutBatch", "RolloutEngine"]
