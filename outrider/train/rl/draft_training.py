"""Train the draft together with the policy, on hidden states that the policy has computed already.

The passes of the policy's first update also record its hidden states. They are detached and belong
to no graph, and the draft has its own optimizer and its own clipping of gradients. So the policy's
gradients are the same with and without it, bit by bit.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.core.stats import Stats
from outrider.drafting.propose.leaves import draft_models
from outrider.errors import OutriderError
from outrider.models.torch.submodel import layer_stack
from outrider.train.data.batches import Collator, micro_batches
from outrider.train.data.sample import Sample
from outrider.train.loss.losses import parse
from outrider.train.model.trainee import make_trainee, target_weights
from outrider.train.rl.records import Rollout
from outrider.train.rl.rollout import RolloutEngine
from outrider.train.settings import DRAFT, Settings
from outrider.train.trainer import Trainer

_PEAK = 0.03  # progress at which the learning rate of `Trainer` has its full value
_MICRO_BATCH_TOKENS = 4096
_STANDARD_ERRORS = 2.0  # a difference of the acceptance within so many standard errors is chance
_MIN_DRAFT_TOKENS = 32  # verified draft tokens that judge a draft


class AcceptanceEstimate(NamedTuple):
    """The share of accepted draft tokens and its standard error."""

    rate: float
    error: float


def acceptance_estimate(stats: Stats) -> AcceptanceEstimate | None:
    """Return the share of accepted ones among draft tokens whose ancestors were accepted; None if there are too few.

    Unlike tau, it hardly depends on the draft length, which a planner changes.
    """
    reached = sum(stats.reached)
    if reached < _MIN_DRAFT_TOKENS:
        return None
    rate = sum(stats.accepted) / reached
    return AcceptanceEstimate(rate, math.sqrt(rate * (1 - rate) / reached))


class DraftTraining:
    """Trains the draft of a rollout engine after each step of the policy, and takes back updates that make it worse."""

    def __init__(
        self,
        engine: RolloutEngine,
        folder: str | Path,
        *,
        kind: str = DRAFT,
        lr: float = 1e-4,
        loss: str = "ce",
        max_tokens: int = 8192,
        tolerance: float = 0.05,
    ) -> None:
        """Load a trainable copy of the draft.

        Args:
            engine: its proposer must be a draft with weights of its own: draft:DIR or tree:DIR.
            folder: the folder of the same draft.
            kind: draft for a draft model; the kind of a draft head, such as mtp or eagle3.
            lr: learning rate.
            loss: as of `outrider train --loss`.
            max_tokens: the most tokens of rollouts that one step of the draft trains on.
            tolerance: the share of the acceptance that an update may cost. An update that costs
                more is taken back, if the difference is larger than chance explains.

        Raises:
            OutriderError: the draft cannot be trained, or an option is out of range.
        """
        if not 0 <= tolerance < 1:
            raise OutriderError(f"tolerance is {tolerance}; use a share from 0 to below 1, such as 0.05")
        if max_tokens < 1:
            raise OutriderError(f"max_tokens is {max_tokens}; use at least 1")
        setup = engine.llm.parts.setup
        if not draft_models(engine.llm.parts.proposer):
            raise OutriderError("the engine has no draft with weights; use proposer draft:DIR or tree:DIR")
        settings = Settings(out="", data=["rollouts"], init_from=str(folder), lr=lr, loss=loss)
        self.engine = engine
        self.rollbacks = 0
        self.acceptance: tuple[float, ...] = ()  # of the last step, by position, with teacher forcing
        self._setup = setup
        self.trainee = make_trainee(kind, settings, setup, target_weights(setup))
        if self.trainee.shared_kv:
            raise OutriderError(
                f"{kind} reads keys and values of the target, which a trainer does not record; use another kind"
            )
        self._trainer = Trainer(
            self.trainee, losses=parse(loss), steps=settings.ttt_length or self.trainee.steps, decay=1.0, lr=lr
        )
        self._max_tokens = max_tokens
        self._tolerance = tolerance
        self.samples: list[Sample] = []  # recorded since the last step
        self._layers: list[int] = []  # of the policy whose outputs samples have
        self._recorded: dict[int, list[torch.Tensor]] = defaultdict(list)  # by layer, of the passes that are recorded
        self._previous: dict[str, torch.Tensor] | None = None  # weights before the last update
        self._previous_acceptance: AcceptanceEstimate | None = None

    @contextmanager
    def recording(self, policy: Any, rollouts: Sequence[Rollout]) -> Iterator[None]:
        """Record the hidden states of the policy for rollouts of one prompt, which are padded on the right.

        The policy may read the first tokens of the prompt in a pass of their own, once for all rollouts.
        """
        stack = layer_stack(policy)[1]
        layers = self._layers = sorted({*self.trainee.aux_states.layers, len(stack) - 1})
        hooks = [stack[layer].register_forward_hook(partial(self._record, layer)) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        by_layer = []
        for layer in layers:
            passes = [states.expand(len(rollouts), -1, -1) for states in self._recorded.pop(layer)]
            by_layer.append(torch.cat(passes, 1))
        states = torch.stack(by_layer, 2)
        for b, rollout in enumerate(rollouts):
            tokens = rollout.prompt_token_ids + rollout.token_ids
            self.samples.append(
                Sample(
                    id=len(self.samples),
                    tokens=tokens,
                    states=states[b, : len(tokens) - 1].clone(),
                    prompt=len(rollout.prompt_token_ids),
                )
            )

    def train(self) -> None:
        """Train on what was recorded, and give the new weights to the engine.

        Call it while the engine still has the weights of the policy that was recorded.
        """
        samples: list[Sample] = []
        total = 0
        for sample in self.samples:
            total += len(sample.tokens)
            if samples and total > self._max_tokens:
                break
            samples.append(sample)
        self.samples = []
        if not samples:
            return
        tables = target_weights(self._setup)
        self.trainee.use_tables(tables)
        collator = Collator(self.trainee.aux_states, self._layers, tables, self.trainee.ids)
        groups = micro_batches(samples, _MICRO_BATCH_TOKENS)
        self._previous = _copied(self.trainee.module)
        batches = (collator.collate(group, train_on_prompts=False) for group in groups)
        stats = self._trainer.train(batches, progress=_PEAK)
        self.acceptance = tuple(stats.acceptance) or self.acceptance
        self.engine.update_draft(_copied(self.trainee.module))

    def judge(self, stats: Stats) -> bool:
        """Compare the draft with the one before, by the first rollouts since its update.

        Returns:
            Whether the update was taken back.
        """
        acceptance = acceptance_estimate(stats)
        if acceptance is None:
            return False
        before = self._previous_acceptance
        if self._previous is None or before is None or not self._is_worse(acceptance, before):
            self._previous_acceptance = acceptance
            return False
        self.trainee.module.load_state_dict(self._previous)
        self.engine.update_draft(self._previous)
        self._previous = None
        self.rollbacks += 1
        return True

    def _is_worse(self, now: AcceptanceEstimate, before: AcceptanceEstimate) -> bool:
        chance = _STANDARD_ERRORS * math.hypot(now.error, before.error)
        return now.rate < (1 - self._tolerance) * before.rate - chance

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "module": self.trainee.module.state_dict(),
            "optimizer": self._trainer.optimizer.state_dict(),
            "previous": self._previous,
            "previous_acceptance": None if self._previous_acceptance is None else tuple(self._previous_acceptance),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, and give the weights of the draft to the engine."""
        self.trainee.module.load_state_dict(state["module"])
        self._trainer.optimizer.load_state_dict(state["optimizer"])
        self._previous = state["previous"]
        before = state["previous_acceptance"]
        self._previous_acceptance = None if before is None else AcceptanceEstimate(*before)
        self.engine.update_draft(_copied(self.trainee.module))

    def _record(self, layer: int, _module: nn.Module, _inputs: object, output: Any) -> None:
        out = output[0] if isinstance(output, tuple) else output
        self._recorded[layer].append(out.detach())


def _copied(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the weights of a module."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
