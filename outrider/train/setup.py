"""Load the target and the draft of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.config import EngineConfig
from outrider.core.types import SharedWeights
from outrider.engine.build import EngineParts, build
from outrider.models.base import WeightSharer
from outrider.plan.planner import FixedPlanner
from outrider.propose.base import ProposerSetup
from outrider.propose.registry import find_proposer
from outrider.train.data.answers import Recorder
from outrider.train.distributed import device_of
from outrider.train.model.joint import JointTrainee
from outrider.train.model.trainee import DraftTrainee, make_trainee, target_weights
from outrider.train.settings import Settings

_BATCHED_TOKENS = 1024  # prompt tokens of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """Who takes part."""

    parts: EngineParts
    trainee: DraftTrainee
    recorder: Recorder
    tables: SharedWeights  # the target's


def make_train_setup(kind: str, settings: Settings, target: Path, *, most: int) -> TrainSetup:
    """Load the target, with memory for `--max-num-seqs` texts or for as many as there are, `most`; and make the draft.

    Raises:
        OutriderError: they cannot be had, or do not fit.
    """
    made: list[tuple[DraftTrainee, Recorder, SharedWeights]] = []

    def maker(setup: ProposerSetup) -> Recorder:
        tables = target_weights(setup)
        assert isinstance(setup.target, WeightSharer)
        pupil: DraftTrainee
        if settings.train_target is None:
            pupil = make_trainee(kind, settings, setup, tables)
        else:
            pupil = JointTrainee(kind, replace(settings, target=str(target)), setup, tables)
        layers = sorted({*pupil.aux_states.layers, setup.target.layers - 1})
        inner = find_proposer(settings.proposer, setup)
        recorder = Recorder(
            inner, layers, memory=tables.kv_view, looked=sorted({view.layer for view in pupil.shared_kv})
        )
        made.append((pupil, recorder, tables))
        return recorder

    config = EngineConfig(
        target=target,
        proposer=maker,
        verifier="walk",
        device=device_of(settings.device),
        max_num_seqs=min(settings.max_num_seqs, most),
        max_num_batched_tokens=_BATCHED_TOKENS,
        prefix_caching=False,
    )
    parts = build(config, planner=FixedPlanner(0) if settings.proposer == "none" else None)
    pupil, recorder, tables = made[0]
    return TrainSetup(parts=parts, trainee=pupil, recorder=recorder, tables=tables)
