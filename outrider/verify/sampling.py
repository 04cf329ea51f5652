"""From logits to the law p that is sampled: bias, penalties, temperature, filters; per node, along its own path.

Each step equals the logits processor of the same name in transformers; greedy is a one-hot p and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.types import Draft, DrawParams, Packed, SequenceState
from outrider.verify.verdict import ahead

_EACH = slice(None)  # of the rows in their order, as logits [B, M, V] are


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """The sampling parameters of a batch as tensors, made when the batch changes and not every round."""

    rows: tuple[SequenceState, ...]
    wants: torch.Tensor  # [B, 1, 4] float32: the fields of `DrawParams`
    temperature: torch.Tensor  # [B, 1, 1]; 1 where greedy
    greedy: torch.Tensor  # [B, 1, 1] bool
    top_k: torch.Tensor  # [B, 1, 1] int64; V where off
    top_p: torch.Tensor  # [B, 1, 1]
    min_p: torch.Tensor  # [B, 1, 1]
    repetition: torch.Tensor  # [B, 1, 1]
    presence: torch.Tensor  # [B, 1, 1]
    frequency: torch.Tensor  # [B, 1, 1]
    bias: torch.Tensor | None  # [B, V]
    seed: torch.Tensor  # [B] int64
    all_greedy: bool
    any_temperature: bool  # but 1
    widest: int  # the most tokens that a row's top_k leaves
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    any_minimum: bool  # min_tokens
    sampled: tuple[bool, ...]  # [B] temperature above 0

    @property
    def bare(self) -> bool:
        """Whether every row just takes the likeliest token of its logits as they are."""
        return self.all_greedy and self.bias is None and not self.any_penalty and not self.any_minimum

    @property
    def soft(self) -> bool:
        """Whether laws follow from logits as they are: nothing is added to them and no token forbidden."""
        return self.bias is None and not self.any_penalty and not self.any_minimum

    @classmethod
    def of(cls, rows: Sequence[SequenceState], vocab: int, device: torch.device) -> SamplingTensors:
        """Of rows [B] whose logits have `vocab` ids."""
        wants = [row.request.params for row in rows]

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

        return cls(
            rows=tuple(rows),
            wants=torch.tensor([want_of(row, vocab) for row in rows], device=device)[:, None],
            temperature=column([w.temperature or 1.0 for w in wants]),
            greedy=column([w.temperature == 0 for w in wants], torch.bool),
            top_k=column([min(w.top_k or vocab, vocab) for w in wants], torch.int64),
            top_p=column([w.top_p for w in wants]),
            min_p=column([w.min_p for w in wants]),
            repetition=column([w.repetition_penalty for w in wants]),
            presence=column([w.presence_penalty for w in wants]),
            frequency=column([w.frequency_penalty for w in wants]),
            bias=_bias(rows, vocab, device),
            seed=torch.tensor([row.request.seed for row in rows], device=device),
            all_greedy=all(w.temperature == 0 for w in wants),
            any_temperature=any(w.temperature not in (0, 1) for w in wants),
            widest=max([min(w.top_k, vocab) for w in wants if w.top_k], default=1),
            any_top_k=any(0 < w.top_k < vocab for w in wants),
            any_top_p=any(w.top_p < 1 for w in wants),
            any_min_p=any(w.min_p > 0 for w in wants),
            any_penalty=any(w.repetition_penalty != 1 or w.presence_penalty or w.frequency_penalty for w in wants),
            any_minimum=any(w.min_tokens for w in wants),
            sampled=tuple(w.temperature > 0 for w in wants),
        )


def want_of(row: SequenceState, vocab: int) -> DrawParams:
    """What the kernels draw the row's tokens by; `vocab` stands for a top_k that is off or larger."""
    params = row.request.params
    return DrawParams(
        temperature=params.temperature,
        top_k=min(params.top_k or vocab, vocab),
        top_p=params.top_p,
        min_p=params.min_p,
    )


def target_probs(logits: torch.Tensor, knobs: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    """Laws from changed logits [T, M, V], of which [t] belongs to row `of[t]`: temperature, then the filters."""
    if knobs.all_greedy:
        return _one_hot(logits)
    soft = logits / knobs.temperature[of] if knobs.any_temperature else logits
    law = _filter(soft, knobs, of).softmax(-1)
    return torch.where(knobs.greedy[of], _one_hot(logits), law) if not all(knobs.sampled) else law


ProbsFunction = Callable[
    [torch.Tensor, SamplingTensors, torch.Tensor | slice], torch.Tensor
]  # what `shape` does, whoever does it


def apply_sampling(
    logits: torch.Tensor,
    knobs: SamplingTensors,
    draft: Draft,
    *,
    last: bool = False,
    shape: ProbsFunction = target_probs,
) -> torch.Tensor:
    """The law of the next token at each node of `draft`, the root first.

    Args:
        logits: [B, 1 + N, V] float; [B, 1, V] with `last`. They must be `sound`.
        knobs: of the same rows.
        draft: whose paths the penalties see.
        last: the logits are those of node N - 1 alone.
        shape: makes laws of changed logits.

    Returns:
        p, shaped like `logits`, each row summing to 1.
    """
    if knobs.bias is not None:
        logits = logits + knobs.bias[:, None]
    if knobs.any_penalty:
        at, vocab = _every(ahead(draft)), logits.shape[-1]
        output, prompt = _histories(knobs.rows, draft, at, (at.numel(), vocab))
        output = output.view(*at.shape, vocab)
        logits = _penalise(logits, knobs, _EACH, output[:, -1:] if last else output, prompt)
    if knobs.any_minimum:
        depth = ahead(draft)[:, -1:] if last else ahead(draft)
        logits = _forbid_ends(logits.flatten(0, 1), knobs, depth, _every(depth)).view_as(logits)
    return shape(logits, knobs, _EACH)


def apply_sampling_packed(
    logits: Packed, knobs: SamplingTensors, draft: Draft, *, shape: ProbsFunction = target_probs
) -> Packed:
    """`warp` for the nodes that exist: the same numbers, and none for padding."""
    values, of = logits.values[:, None], _owners(logits)  # as if they were so many rows of one node
    if knobs.bias is not None:
        values = values + knobs.bias[of][:, None]
    if knobs.any_penalty or knobs.any_minimum:
        # What padding would see and forbid goes to a place behind all others.
        nodes = torch.where(tree.live(draft), logits.at[:, 1:], len(values))
        at = torch.cat([logits.at[:, :1], nodes], 1)
        if knobs.any_penalty:
            output, prompt = _histories(knobs.rows, draft, at, (1 + len(values), values.shape[-1]))
            values = _penalise(values, knobs, of, output[:-1, None], prompt)
        if knobs.any_minimum:
            values = _forbid_ends(values[:, 0], knobs, ahead(draft), at)[:, None]
    return replace(logits, values=shape(values, knobs, of)[:, 0])


def sound(logits: torch.Tensor) -> torch.Tensor:
    """[..., ] bool: where a law can be found in logits [..., V]; not in NaN, +inf, or everything -inf."""
    return logits.amax(-1).isfinite()


def _every(nodes: torch.Tensor) -> torch.Tensor:
    """Places of all nodes [B, M] where nothing is left out."""
    return torch.arange(nodes.numel(), device=nodes.device).view_as(nodes)


def _owners(packed: Packed) -> torch.Tensor:
    """[T]: whose nodes they are, where padding points to nodes of the same row."""
    rows = torch.arange(len(packed.at), device=packed.at.device)[:, None].expand_as(packed.at)
    return rows.new_empty(len(packed.values)).scatter_(0, packed.at.flatten(), rows.flatten())


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _filter(logits: torch.Tensor, knobs: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    """Top-k, then top-p, then min-p, each on what the one before left; equals of the last one kept stay."""
    if knobs.any_top_k:
        best = logits.topk(knobs.widest, -1).values
        top_k = knobs.top_k[of]
        kth = best.gather(-1, (top_k - 1).clamp(max=knobs.widest - 1).expand(*best.shape[:-1], 1))
        logits = logits.masked_fill((logits < kth) & (top_k < logits.shape[-1]), -torch.inf)
    if knobs.any_top_p:
        ordered, index = logits.sort(-1, descending=True)
        mass = ordered.softmax(-1)
        top_p = knobs.top_p[of]
        nucleus = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1)
        nucleus[..., 0] = False
        logits = torch.empty_like(logits).scatter_(-1, index, ordered.masked_fill(nucleus, -torch.inf))
    if knobs.any_min_p:
        mass = logits.softmax(-1)
        logits = logits.masked_fill(mass < knobs.min_p[of] * mass.amax(-1, keepdim=True), -torch.inf)
    return logits


def _penalise(
    logits: torch.Tensor, knobs: SamplingTensors, of: torch.Tensor | slice, output: torch.Tensor, prompt: torch.Tensor
) -> torch.Tensor:
    seen, repetition = prompt[of] | (output > 0), knobs.repetition[of]
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - knobs.frequency[of] * output - knobs.presence[of] * (output > 0)


def _histories(
    rows: Sequence[SequenceState], draft: Draft, at: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Occurrences in the output up to each node, [T, V] by places [B, 1 + N]; the tokens of each prompt, [B, 1, V]."""
    vocab = size[1]
    output = torch.zeros(size, device=at.device)
    prompt = torch.zeros(len(rows), 1, vocab, dtype=torch.bool, device=at.device)
    for b, row in enumerate(rows):
        split = len(row.request.prompt_token_ids)
        text = torch.tensor(row.token_ids, device=at.device)
        output[at[b, :1]] = text[split:].bincount(minlength=vocab)[:vocab].to(output)
        prompt[b, 0, text[:split]] = True
    each = torch.arange(len(rows), device=at.device)
    for node in range(draft.size):
        here = at[:, node + 1]
        output[here] = output[at[each, draft.parent[:, node] + 1]]
        output[here, draft.tokens[:, node].clamp(0, vocab - 1)] += 1
    return output, prompt


def _forbid_ends(logits: torch.Tensor, knobs: SamplingTensors, depth: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """No ending where fewer than min_tokens would have been emitted before it; logits [T, V] by places [B, M]."""
    logits = functional.pad(logits, (0, 0, 0, 1))
    for b, row in enumerate(knobs.rows):
        ends = sorted(token for token in row.request.end_ids if token < logits.shape[-1])
        early = row.num_output_tokens + depth[b] < row.request.params.min_tokens
        if ends:
            nodes = at[b, :, None]
            logits[nodes, ends] = logits[nodes, ends].masked_fill(early[:, None], -torch.inf)
    return logits[:-1]


def _bias(rows: Sequence[SequenceState], vocab: int, device: torch.device) -> torch.Tensor | None:
    if not any(row.request.params.logit_bias for row in rows):
        return None
    bias = torch.zeros(len(rows), vocab, device=device)
    for b, row in enumerate(rows):
        for token, value in row.request.params.logit_bias.items():
            bias[b, token] = value
    return bias
