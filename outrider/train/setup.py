"""Load the target and the draft of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from outrider.core.config import EngineConfig
from outrider.core.types import Tables
from outrider.engine.build import EngineParts, build
from outrider.models.base import Lender
from outrider.plan.planner import FixedPlanner
from outrider.propose.base import Setup
from outrider.propose.registry import find_proposer
from outrider.train.data.answers import Recorder
from outrider.train.distributed import device_of
from outrider.train.model.joint import JointPupil
from outrider.train.model.trainee import Pupil, lent, make_pupil
from outrider.train.settings import Settings

_BATCHED_TOKENS = 1024  # prompt tokens of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Classroom:
    """Who takes part."""

    parts: EngineParts
    pupil: Pupil
    recorder: Recorder
    tables: Tables  # the target's


def make_classroom(kind: str, settings: Settings, target: Path, *, most: int) -> Classroom:
    """Load the target, with memory for `--rows` texts or for as many as there are, `most`; and make the draft.

    Raises:
        OutriderError: they cannot be had, or do not fit.
    """
    made: list[tuple[Pupil, Recorder, Tables]] = []

    def maker(setup: Setup) -> Recorder:
        tables = lent(setup)
        assert isinstance(setup.target, Lender)
        pupil: Pupil
        if settings.with_target is None:
            pupil = make_pupil(kind, settings, setup, tables)
        else:
            pupil = JointPupil(kind, replace(settings, target=str(target)), setup, tables)
        layers = sorted({*pupil.taps.layers, setup.target.layers - 1})
        inner = find_proposer(settings.proposer, setup)
        recorder = Recorder(inner, layers, memory=tables.memory, looked=sorted({view.layer for view in pupil.views}))
        made.append((pupil, recorder, tables))
        return recorder

    config = EngineConfig(
        target=target,
        proposer=maker,
        verifier="walk",
        device=device_of(settings.device),
        max_num_seqs=min(settings.rows, most),
        max_num_batched_tokens=_BATCHED_TOKENS,
        prefix_caching=False,
    )
    parts = build(config, planner=FixedPlanner(0) if settings.proposer == "none" else None)
    pupil, recorder, tables = made[0]
    return Classroom(parts=parts, pupil=pupil, recorder=recorder, tables=tables)
