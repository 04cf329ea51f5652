"""Loads the target and makes the draft of a training."""

from dataclasses import replace
from pathlib import Path

from outrider.core.params import AUTO
from outrider.core.planner import FixedPlanner
from outrider.core.proposer import ProposerSetup
from outrider.core.target import WeightSharer
from outrider.core.types import SharedWeights
from outrider.drafting.propose.registry import find_proposer
from outrider.engine.build import build
from outrider.errors import OutriderError
from outrider.models.loader.load import reads_sources
from outrider.runtime.processes import local_device
from outrider.train.data.answers import Recorder
from outrider.train.model.joint import JointTrainee
from outrider.train.model.presets import KV_SHARING
from outrider.train.model.trainee import DraftTrainee, make_trainee, target_weights
from outrider.train.settings import DRAFT, Settings

_BATCHED_TOKENS = 1024  # prompt tokens per round


class TrainSetup:
    """The engine with the target, and the draft to train.

    Attributes:
        parts: the engine and what it was made from.
        tables: the weights of the target that the draft shares.
        trainee: the draft.
        recorder: the proposer of the engine. It records what the draft is trained with.
    """

    tables: SharedWeights
    trainee: DraftTrainee
    recorder: Recorder

    def __init__(self, kind: str, settings: Settings, target: Path, *, num_prompts: int) -> None:
        """Load the target and make the draft.

        The engine has slots for `settings.engine.max_num_seqs` sequences, but not for more than `num_prompts`.

        Raises:
            OutriderError: the target or the draft cannot be loaded, or they do not fit together.
        """
        if reads_sources(target):
            _check_encoder_decoder(kind, settings)
        self._kind = kind
        self._settings = replace(settings, engine=replace(settings.engine, target=target))
        config = replace(
            self._settings.engine,
            proposer=self._make_recorder,
            k=AUTO,
            verifier="walk",
            device=local_device(settings.engine.device),
            threads=None,  # set before
            max_num_seqs=min(settings.engine.max_num_seqs, num_prompts),
            max_num_batched_tokens=_BATCHED_TOKENS,
            prefix_caching=False,
        )
        self.parts = build(config, planner=FixedPlanner(0) if settings.proposer == "none" else None)

    def _make_recorder(self, setup: ProposerSetup) -> Recorder:
        """Make the draft for the loaded target, and the proposer. `build` calls this once."""
        if setup.source_rules is not None and setup.source_rules.speech is not None:
            raise OutriderError(
                "train reads sources of text, and this target is a speech model; use it with draft:DIR of a smaller one"
            )
        self.tables = target_weights(setup)
        assert isinstance(setup.target, WeightSharer)
        make = make_trainee if self._settings.train_target is None else JointTrainee
        self.trainee = make(self._kind, self._settings, setup, self.tables)
        layers = sorted({*self.trainee.aux_states.layers, setup.target.layers - 1})
        kv_layers = sorted({view.layer for view in self.trainee.shared_kv})
        proposer = find_proposer(self._settings.proposer, setup)
        self.recorder = Recorder(proposer, layers, kv_view=self.tables.kv_view, kv_layers=kv_layers)
        return self.recorder


def _check_encoder_decoder(kind: str, settings: Settings) -> None:
    """Reject kinds and options that read sequences without their sources, which encoder-decoder targets need."""
    problems = (
        (
            kind in (DRAFT, KV_SHARING),
            f"the kind {kind} does not support encoder-decoder targets; train another one, such as eagle31 or mtp",
        ),
        (settings.train_target, "--train-target does not support encoder-decoder targets; leave it out"),
        (settings.init_target, "--init-target does not support encoder-decoder targets; leave it out"),
    )
    for is_wrong, message in problems:
        if is_wrong:
            raise OutriderError(message)
