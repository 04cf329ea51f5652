"""The answers to a prompt as tensors, and their log-probabilities under a model of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from outrider.train.rl.records import Rollout

_PADDING = -100  # no token; torch's losses ignore it
# Newer versions of transformers call the argument `cache`.
_CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """B answers to one prompt, the longest of which has A tokens."""

    rollouts: tuple[Rollout, ...]
    prompt: torch.Tensor  # [P] int64
    tokens: torch.Tensor  # [B, A] int64, padded on the right with -100
    sampled_logprobs: torch.Tensor  # [B, A] float32, as of `Rollout`; 0 at padding
    advantages: torch.Tensor  # [B, 1] float32

    @property
    def mask(self) -> torch.Tensor:
        """Which entries are tokens and not padding, [B, A] bool."""
        return self.tokens != _PADDING


def split_answers(
    rollouts: Sequence[Rollout], advantages: Sequence[float], size: int, device: torch.device
) -> list[Answers]:
    """Split rollouts by prompt, and the answers to each prompt into parts of at most `size` with similar lengths."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for b, rollout in enumerate(rollouts):
        by_prompt.setdefault(rollout.prompt_token_ids, []).append(b)
    parts = []
    for prompt, indices in by_prompt.items():
        indices.sort(key=lambda b: len(rollouts[b].token_ids))
        for begin in range(0, len(indices), size):
            chosen = indices[begin : begin + size]
            answers = [rollouts[b] for b in chosen]
            tokens = [torch.tensor(each.token_ids, dtype=torch.int64) for each in answers]
            logprobs = [torch.tensor(each.sampled_logprobs) for each in answers]
            parts.append(
                Answers(
                    rollouts=tuple(answers),
                    prompt=torch.tensor(prompt, device=device),
                    tokens=pad_sequence(tokens, batch_first=True, padding_value=_PADDING).to(device),
                    sampled_logprobs=pad_sequence(logprobs, batch_first=True).to(device),
                    advantages=torch.tensor([advantages[b] for b in chosen], device=device)[:, None],
                )
            )
    return parts


def answer_logprobs(model: Any, answers: Answers, *, temperature: float, share_prompt: bool) -> torch.Tensor:
    """Return the log-probabilities [B, A] of the tokens of answers at a temperature; 0 at padding.

    Padding needs no mask: it is behind the last token of an answer, so no token attends to it.
    Logits are computed for the tokens of the answers only.

    Args:
        model: a causal language model of transformers.
        temperature: divides the logits.
        share_prompt: compute the keys and values of the prompt once for all answers. Gradients flow through them. A
            model with recurrent layers cannot: transformers writes their states in place, which has no gradient.
    """
    count, length = answers.tokens.shape
    last = answers.prompt[-1:].expand(count, 1)
    inputs = torch.cat([last, answers.tokens[:, :-1].clamp(min=0)], 1)  # the tokens before those of the answers
    before = answers.prompt[:-1]
    options: dict[str, Any] = {"use_cache": False}
    if share_prompt and len(before):
        cache = DynamicCache(config=model.config)
        options = {"use_cache": True, _CACHE: cache}
        model(input_ids=before[None], logits_to_keep=1, **options)
        cache.batch_repeat_interleave(count)
    else:
        inputs = torch.cat([before.expand(count, -1), inputs], 1)
    logits = model(input_ids=inputs, logits_to_keep=length, **options).logits.float()
    if temperature != 1:
        logits = logits / temperature
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), answers.tokens.flatten(), ignore_index=_PADDING, reduction="none"
    )
    return -losses.view(count, length)
