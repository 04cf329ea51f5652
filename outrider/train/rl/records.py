"""The records of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.core.bound import Bound
from outrider.core.stats import Stats
from outrider.core.types import Completion, FinishReason
from outrider.runtime.grouping import group_by
from outrider.train.rl.regimes import Regime


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sample of the policy.

    Both kinds of log-probabilities belong to the target, never to the draft. They come from the
    logits that have verified the token.
    """

    prompt: int  # index of the prompt in its call
    sample: int  # index among the samples of the prompt
    group: str  # samples of a group have the same prompt
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # with the end token, if one was sampled
    text: str
    finish_reason: FinishReason
    # By token, natural logarithms. `logprobs`: under the model's own softmax, that is, at temperature 1 without filters
    # and penalties. `sampled_logprobs`: under the distribution that the token was sampled from, which is renormalized
    # after temperature, top_k, top_p and min_p; 0 for greedy requests.
    logprobs: tuple[float, ...]
    sampled_logprobs: tuple[float, ...]
    weight_versions: tuple[tuple[int, int], ...]  # (index of the first token, version of the weights), in order
    draft_version: int  # when the rollout ended
    seed: int
    stats: Stats
    error: str = ""
    rounds: tuple[tuple[int, int, int], ...] = ()  # by round: draft depth, accepted and emitted tokens

    @classmethod
    def of(
        cls,
        completion: Completion,
        *,
        prompt: int,
        sample: int,
        group: str,
        draft_version: int,
        rounds: Sequence[tuple[int, int, int]] = (),
    ) -> Rollout:
        """Make the record of a completion."""
        return cls(
            prompt=prompt,
            sample=sample,
            group=group,
            prompt_token_ids=completion.prompt_token_ids,
            token_ids=completion.token_ids,
            text=completion.text,
            finish_reason=completion.finish_reason,
            logprobs=tuple(each.logprob for each in completion.logprobs),
            sampled_logprobs=tuple(each.sampled_logprob for each in completion.logprobs),
            weight_versions=completion.weight_versions,
            draft_version=draft_version,
            seed=completion.seed,
            stats=completion.stats,
            error=completion.error,
            rounds=tuple(rounds),
        )

    @property
    def version(self) -> int | None:
        """The version of the weights that sampled all tokens; None if there were several versions, or no token."""
        return self.weight_versions[0][1] if len(self.weight_versions) == 1 else None

    def token_versions(self) -> tuple[int, ...]:
        """Return the version of the weights for each token."""
        ends = [*(first for first, _ in self.weight_versions[1:]), len(self.token_ids)]
        versions: list[int] = []
        for (_, version), end in zip(self.weight_versions, ends, strict=False):
            versions += [version] * (end - len(versions))
        return tuple(versions)


class RolloutTensors(NamedTuple):
    """Rollouts as padded tensors, for a loss. S is the length of the longest prompt with its completion."""

    token_ids: torch.Tensor  # [B, S] int64: prompt and completion, padded on the right
    attention_mask: torch.Tensor  # [B, S] bool: not padding
    completion_mask: torch.Tensor  # [B, S] bool: tokens of the completion
    logprobs: torch.Tensor  # [B, S] float32 of the tokens of the completion; 0 elsewhere
    sampled_logprobs: torch.Tensor  # the same
    versions: torch.Tensor  # [B, S] int64: version of the weights; -1 elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How rollouts were made, and so what may be assumed of them."""

    verifier: str
    exact: bool  # whether the tokens follow the target's distribution
    bound: Bound | None  # how far they may be from it; None: exact, or not bounded
    same_tokens: bool  # whether plain decoding with the same seeds gives the same tokens, bit by bit
    kernels: str
    dtype: str
    proposer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBatch:
    """The rollouts of one call, ordered by prompt and sample."""

    rollouts: tuple[Rollout, ...]
    seconds: float  # wall clock of the generation
    stats: Stats  # sums over the rollouts
    provenance: Provenance
    regimes: tuple[Regime, ...] = ()  # the rounds by the number of sequences that ran, for many sequences first

    def groups(self) -> tuple[tuple[Rollout, ...], ...]:
        """Return the rollouts by group, in the order in which the groups occur."""
        return tuple(map(tuple, group_by(self.rollouts, lambda rollout: rollout.group).values()))

    def tensors(self, pad_token_id: int) -> RolloutTensors:
        """Return the rollouts as padded tensors on the CPU."""
        return rollout_tensors(self.rollouts, pad_token_id)


def rollout_tensors(rollouts: Sequence[Rollout], pad_token_id: int) -> RolloutTensors:
    """Return rollouts as padded tensors on the CPU."""
    tokens = [torch.tensor(each.prompt_token_ids + each.token_ids) for each in rollouts]
    lengths = torch.tensor(list(map(len, tokens)))
    starts = torch.tensor([len(each.prompt_token_ids) for each in rollouts])
    token_ids = pad_sequence(tokens, batch_first=True, padding_value=pad_token_id)
    position = torch.arange(token_ids.shape[1])
    attention_mask = position < lengths[:, None]
    completion_mask = attention_mask & (position >= starts[:, None])

    def at_completion(values: Sequence[Sequence[float]], fill: torch.Tensor) -> torch.Tensor:
        flat = [value for row in values for value in row]
        return fill.masked_scatter(completion_mask, torch.tensor(flat, dtype=fill.dtype))

    zeros = torch.zeros(token_ids.shape)
    return RolloutTensors(
        token_ids=token_ids,
        attention_mask=attention_mask,
        completion_mask=completion_mask,
        logprobs=at_completion([each.logprobs for each in rollouts], zeros),
        sampled_logprobs=at_completion([each.sampled_logprobs for each in rollouts], zeros),
        versions=at_completion([each.token_versions() for each in rollouts], torch.full_like(token_ids, -1)),
    )
