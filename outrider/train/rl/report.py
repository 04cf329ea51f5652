"""The results of one step of training, and where its time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.core.stats import Stats
from outrider.runtime.grouping import group_by
from outrider.train.rl.overlap import Overlap
from outrider.train.rl.records import Rollout
from outrider.train.rl.regimes import Regime

_PHASE = 16  # output tokens of a phase


@dataclass(slots=True, kw_only=True)
class StepSeconds:
    """Seconds of the parts of a step, by the clock of `GRPO`: the wall clock, unless it is replaced."""

    generation: float = 0.0
    reward: float = 0.0
    reference: float = 0.0  # log-probabilities under the reference model of the KL penalty
    training: float = 0.0  # forward, backward and optimizer
    draft: float = 0.0  # training of the draft
    sync: float = 0.0  # new weights into the engine

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.generation + self.reward + self.reference + self.training + self.draft + self.sync

    @property
    def generation_share(self) -> float:
        """R, the share of the generation in the step."""
        return self.generation / self.total if self.total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How the draft did in some rollouts."""

    rollouts: int
    tokens: int  # of the output
    tau: float | None  # output tokens per pass of the target; None: no pass
    acceptance: tuple[float, ...]  # by position of the draft token, given that the tokens before it were accepted

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Speculation:
        """Sum up rollouts."""
        return cls.of_stats(sum((rollout.stats for rollout in rollouts), Stats()), len(rollouts))

    @classmethod
    def of_stats(cls, stats: Stats, rollouts: int) -> Speculation:
        """Return the figures of statistics of so many rollouts."""
        pairs = zip(stats.accepted, stats.reached, strict=True)
        return cls(
            rollouts=rollouts,
            tokens=stats.output_tokens,
            tau=stats.output_tokens / stats.passes if stats.passes else None,
            acceptance=tuple(accepted / reached if reached else 0.0 for accepted, reached in pairs),
        )


def by_version(rollouts: Sequence[Rollout]) -> dict[str, Speculation]:
    """Return the speculation by version of the policy. A rollout of several versions counts as "mixed"."""
    groups = group_by(rollouts, lambda each: "mixed" if each.version is None else str(each.version))
    return {name: Speculation.of(group) for name, group in groups.items()}


def by_draft_age(rollouts: Sequence[Rollout]) -> dict[int, Speculation]:
    """Return the speculation by the age of the draft: the policy's version minus the draft's."""
    groups = group_by(rollouts, _draft_age)
    return {age: Speculation.of(groups[age]) for age in sorted(groups)}


def _draft_age(rollout: Rollout) -> int:
    last = rollout.weight_versions[-1][1] if rollout.weight_versions else 0
    return last - rollout.draft_version


def by_phase(rollouts: Sequence[Rollout], tokens: int = _PHASE) -> dict[int, Speculation]:
    """Return the speculation by phase: the index of the first output token of a round, in steps of `tokens`."""
    rounds: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    counts: dict[int, int] = defaultdict(int)
    for rollout in rollouts:
        position = 0
        phases = set()
        for each in rollout.rounds:
            phase = position // tokens * tokens
            rounds[phase].append(each)
            phases.add(phase)
            position += each[2]
        for phase in phases:
            counts[phase] += 1
    return {phase: Speculation.of_stats(Stats.of_passes(rounds[phase]), counts[phase]) for phase in sorted(rounds)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step of training."""

    step: int
    version: int  # of the policy that sampled the rollouts, or the newest one
    seconds: StepSeconds
    rewards: tuple[float | None, ...]  # by rollout; None: the reward function failed
    errors: tuple[str, ...]  # of the rollouts without a reward
    loss: float
    kl: float  # estimate of the divergence from the reference; 0 without one
    grad_norm: float
    # Largest difference between the log-probabilities of engine and trainer. It is rounding, unless something is wrong.
    logprob_error: float
    speculation: Speculation
    overlap: Overlap = field(default_factory=Overlap)  # of the answers with each other and with the previous pass
    by_version: dict[str, Speculation] = field(default_factory=dict)
    by_draft_age: dict[int, Speculation] = field(default_factory=dict)
    by_phase: dict[int, Speculation] = field(default_factory=dict)  # by the index of the output token
    regimes: tuple[Regime, ...] = ()  # the rounds by the number of sequences that ran
    draft_rolled_back: bool = False  # whether the draft's last update has cost acceptance and was taken back

    @property
    def mean_reward(self) -> float | None:
        """The mean of the rewards that there are."""
        given = [reward for reward in self.rewards if reward is not None]
        return sum(given) / len(given) if given else None

    def as_dict(self) -> dict[str, Any]:
        """Return the report for a JSON document."""
        document = asdict(self)
        document["mean_reward"] = self.mean_reward
        document["seconds"] |= {"total": self.seconds.total, "generation_share": self.seconds.generation_share}
        return document
