"""Rollouts for reinforcement learning that stay exact while the policy changes."""

from outrider.train.rl.draft_training import DraftTraining
from outrider.train.rl.grpo import GRPO
from outrider.train.rl.peft import merged_weights
from outrider.train.rl.records import Provenance, Rollout, RolloutBatch
from outrider.train.rl.report import StepReport
from outrider.train.rl.rewards import Problem
from outrider.train.rl.rollout import RolloutEngine
from outrider.train.rl.settings import GRPOSettings
from outrider.train.rl.trl import TRLRollouts

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
