"""The settings of a GRPO run."""

from dataclasses import dataclass

from outrider.errors import OutriderError


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings:
    """The settings of a run. All of them are checked when the record is made."""

    problems: int = 4  # per step
    samples: int = 8  # answers to each problem
    trained_samples: int | None = None  # of them, those that the update uses (see `down_sample`); None: all
    temperature: float = 1.0
    max_tokens: int = 128  # of an answer
    updates: int = 1  # optimizer steps on the rollouts of a step
    micro_batch: int = 8  # answers to a problem in one forward pass, at most
    lr: float = 1e-6
    clip: float = 0.2  # largest change of the probability ratio that is rewarded
    # Weigh each token by the ratio of its probabilities under the policy and the rollout, at most this (truncated
    # importance sampling). None: no weights, as the rollouts of an exact engine are samples of the policy.
    importance_cap: float | None = None
    beta: float = 0.0  # weight of the KL penalty; 0: none, and no reference model is kept
    max_grad_norm: float = 1.0
    scale_rewards: bool = True  # divide advantages by the standard deviation of the group
    reward_timeout: float | None = None  # seconds; None: no limit
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("problems", "samples", "max_tokens", "updates", "micro_batch"):
            if getattr(self, name) < 1:
                raise OutriderError(f"{name} is {getattr(self, name)}; use a number above 0")
        for name in ("temperature", "lr", "clip", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise OutriderError(f"{name} is {getattr(self, name)}; use a number above 0")
        if self.samples < 2:
            raise OutriderError("samples is 1, and a group of one answer has no advantage; use at least 2")
        if self.trained_samples is not None and not 2 <= self.trained_samples <= self.samples:
            raise OutriderError(
                f"trained_samples is {self.trained_samples}; use 2 to {self.samples}, the number of samples"
            )
        if self.importance_cap is not None and not self.importance_cap >= 1:
            raise OutriderError(f"importance_cap is {self.importance_cap}; use a number of at least 1, such as 2")
        if self.beta < 0:
            raise OutriderError(f"beta is {self.beta}; use 0 for no KL penalty, or a number above 0")
