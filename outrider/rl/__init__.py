"""Rollouts for reinforcement learning that stay exact while the policy changes."""

from __future__ import annotations

from outrider.rl.draft_training import DraftTraining
from outrider.rl.grpo import GRPO
from outrider.rl.peft import merged_weights
from outrider.rl.records import Provenance, Rollout, RolloutBatch
from outrider.rl.report import StepReport
from outrider.rl.rewards import Problem
from outrider.rl.rollout import RolloutEngine
from outrider.rl.settings import GRPOSettings
from outrider.rl.trl import TRLRollouts

__all__ = [
    "DraftTraining",
    "GRPO",
    "GRPOSettings",
    "Problem",
    "Provenance",
    "Rollout",
    "RolloutBatch",
    "RolloutEngine",
    "StepReport",
    "TRLRollouts",
    "merged_weights",
]
