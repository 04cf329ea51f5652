"""Compute the target distribution p from logits: apply bias, penalties, temperature, then filters.

Each step gives the result of the logits processor of the same name in transformers. The penalties
of a draft token count the tokens on its path. Greedy decoding is a one-hot p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from outrider.core import tree
from outrider.core.draws import DrawParams
from outrider.core.noise import PositionNoise
from outrider.core.types import Draft, Packed, SequenceState
from outrider.verify.logprobs import Logprobs, logprobs
from outrider.verify.verdict import tokens_before

_ALL = slice(None)  # logits [B, M, V] hold all sequences in order


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTensors:
    """The sampling parameters of a batch as tensors. They are rebuilt when the batch changes."""

    seqs: tuple[SequenceState, ...]
    draw_params: torch.Tensor  # [B, 1, 4] float32: the fields of `DrawParams`
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
    any_temperature: bool  # other than 0 and 1
    max_top_k: int  # the largest top_k of the batch
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    any_minimum: bool  # min_tokens
    sampled: tuple[bool, ...]  # [B] temperature above 0

    @property
    def plain_greedy(self) -> bool:
        """Whether every sequence takes the likeliest token of unmodified logits."""
        return self.all_greedy and self.bias is None and not self.any_penalty and not self.any_minimum

    @property
    def unmodified(self) -> bool:
        """Whether no bias, penalty or min_tokens changes the logits."""
        return self.bias is None and not self.any_penalty and not self.any_minimum

    @classmethod
    def of(cls, seqs: Sequence[SequenceState], vocab: int, device: torch.device) -> SamplingTensors:
        """Build the tensors for sequences [B] whose logits have `vocab` ids."""
        params = [seq.request.params for seq in seqs]
        draw_params = [draw_params_of(seq, vocab) for seq in seqs]
        temperature, top_k, top_p, min_p = zip(*draw_params, strict=True)
        penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        repetition, presence, frequency = zip(*penalties, strict=True)

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)[:, None, None]

        return cls(
            seqs=tuple(seqs),
            draw_params=torch.tensor(draw_params, device=device)[:, None],
            temperature=column([each or 1.0 for each in temperature]),
            greedy=column([each == 0 for each in temperature], torch.bool),
            top_k=column(top_k, torch.int64),
            top_p=column(top_p),
            min_p=column(min_p),
            repetition=column(repetition),
            presence=column(presence),
            frequency=column(frequency),
            bias=_bias(seqs, vocab, device),
            seed=torch.tensor([seq.request.seed for seq in seqs], device=device),
            all_greedy=not any(temperature),
            any_temperature=not {0, 1}.issuperset(temperature),
            max_top_k=max([min(p.top_k, vocab) for p in params if p.top_k], default=1),
            any_top_k=min(top_k) < vocab,
            any_top_p=min(top_p) < 1,
            any_min_p=max(min_p) > 0,
            any_penalty=not {1}.issuperset(repetition) or any(presence) or any(frequency),
            any_minimum=any(p.min_tokens for p in params),
            sampled=tuple(each > 0 for each in temperature),
        )


class BatchSampling:
    """The sampling parameters and the noise of the current batch. Most rounds run the sequences of the round before."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        """Prepare for logits of `vocab` ids on a device."""
        self._vocab = vocab
        self._device = device
        self._sampling: SamplingTensors | None = None  # of the last batch
        self._noise: PositionNoise | None = None  # of the same sequences

    def of(self, seqs: tuple[SequenceState, ...]) -> SamplingTensors:
        """Return the sampling parameters of a batch. They are rebuilt only if its sequences have changed."""
        if self._sampling is None or self._sampling.seqs != seqs:
            self._sampling = SamplingTensors.of(seqs, self._vocab, self._device)
            self._noise = PositionNoise(self._sampling.seed, self._sampling.seed)
        return self._sampling

    def noise(self, seqs: tuple[SequenceState, ...]) -> PositionNoise:
        """Return the noise of this round for the sequences that `of` was called with."""
        assert self._noise is not None
        return self._noise.at(tree.upload([len(seq.token_ids) for seq in seqs], self._device))


def draw_params_of(seq: SequenceState, vocab: int) -> DrawParams:
    """Return the sampling parameters of a sequence for the native kernels. A top_k that is off becomes `vocab`."""
    params = seq.request.params
    return DrawParams(
        temperature=params.temperature, top_k=min(params.top_k or vocab, vocab), top_p=params.top_p, min_p=params.min_p
    )


def target_probs(logits: torch.Tensor, sampling: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    """Apply temperature, top-k, top-p and min-p to logits [T, M, V]; row t belongs to sequence `of[t]`."""
    if sampling.all_greedy:
        return _one_hot(logits)
    scaled = logits / sampling.temperature[of] if sampling.any_temperature else logits
    probs = _filter(scaled, sampling, of).softmax(-1)
    return torch.where(sampling.greedy[of], _one_hot(logits), probs) if not all(sampling.sampled) else probs


@dataclass(frozen=True, slots=True)
class SamplingKernels:
    """The functions that read logits. The native kernels implement each in one call."""

    probs: Callable[[torch.Tensor, SamplingTensors, torch.Tensor | slice], torch.Tensor] = target_probs
    # Applies bias, penalties and min_tokens to logits [T, V]. Indices [B, M] are those of the nodes of a draft, the
    # root first, or of its last node (M = 1). None: operations of torch do it.
    adjust: Callable[[torch.Tensor, SamplingTensors, Draft, torch.Tensor], torch.Tensor] | None = None
    logprobs: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], Logprobs] = logprobs


TORCH = SamplingKernels()


def apply_sampling(
    logits: torch.Tensor,
    sampling: SamplingTensors,
    draft: Draft,
    *,
    last: bool = False,
    kernels: SamplingKernels = TORCH,
) -> torch.Tensor:
    """Compute the target distribution at each node of `draft`, the root first.

    Args:
        logits: [B, 1 + N, V] float; [B, 1, V] with `last`. They must pass `has_finite_max`.
        sampling: the parameters of the same sequences.
        draft: the draft. The penalties of a node count the tokens on its path.
        last: `logits` has only the last node.
        kernels: compute the distributions.

    Returns:
        p, with the shape of `logits`. It sums to 1 over V.
    """
    if kernels.adjust and not sampling.unmodified:
        flat = logits.flatten(0, 1)
        at = torch.arange(len(flat), device=flat.device).view(logits.shape[:2])
        return kernels.probs(kernels.adjust(flat, sampling, draft, at).view_as(logits), sampling, _ALL)
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None]
    if sampling.any_penalty:
        at = _node_indices(tokens_before(draft))
        vocab = logits.shape[-1]
        output, prompt = _token_counts(sampling.seqs, draft, at, (at.numel(), vocab))
        output = output.view(*at.shape, vocab)
        logits = _penalize(logits, sampling, _ALL, output[:, -1:] if last else output, prompt)
    if sampling.any_minimum:
        depth = tokens_before(draft)[:, -1:] if last else tokens_before(draft)
        logits = _forbid_ends(logits.flatten(0, 1), sampling, depth, _node_indices(depth)).view_as(logits)
    return kernels.probs(logits, sampling, _ALL)


def apply_sampling_packed(
    logits: Packed, sampling: SamplingTensors, draft: Draft, *, kernels: SamplingKernels = TORCH
) -> Packed:
    """Do what `apply_sampling` does, for packed logits without padding."""
    values = logits.values[:, None]  # as if they were T sequences of one node
    of = _sequence_of(logits)
    if kernels.adjust and not sampling.unmodified:
        adjusted = kernels.adjust(logits.values, sampling, draft, logits.at)
        return replace(logits, values=kernels.probs(adjusted[:, None], sampling, of)[:, 0])
    if sampling.bias is not None:
        values = values + sampling.bias[of][:, None]
    if sampling.any_penalty or sampling.any_minimum:
        # Padding writes to one extra row at the end, which is dropped.
        nodes = torch.where(tree.valid_nodes(draft), logits.at[:, 1:], len(values))
        at = torch.cat([logits.at[:, :1], nodes], 1)
        if sampling.any_penalty:
            output, prompt = _token_counts(sampling.seqs, draft, at, (1 + len(values), values.shape[-1]))
            values = _penalize(values, sampling, of, output[:-1, None], prompt)
        if sampling.any_minimum:
            values = _forbid_ends(values[:, 0], sampling, tokens_before(draft), at)[:, None]
    return replace(logits, values=kernels.probs(values, sampling, of)[:, 0])


def has_finite_max(logits: torch.Tensor) -> torch.Tensor:
    """Return where logits [..., V] define a distribution: [...] bool. NaN, +inf and all -inf do not."""
    return logits.amax(-1).isfinite()


def _node_indices(nodes: torch.Tensor) -> torch.Tensor:
    """Return the indices of nodes [B, M] in a tensor without gaps."""
    return torch.arange(nodes.numel(), device=nodes.device).view_as(nodes)


def _sequence_of(packed: Packed) -> torch.Tensor:
    """Return [T], the sequence of each packed node. Padding points to its own sequence."""
    rows = torch.arange(len(packed.at), device=packed.at.device)[:, None].expand_as(packed.at)
    return rows.new_empty(len(packed.values)).scatter_(0, packed.at.flatten(), rows.flatten())


def _one_hot(logits: torch.Tensor) -> torch.Tensor:
    """Return the one-hot distribution of the likeliest token."""
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


def _filter(logits: torch.Tensor, sampling: SamplingTensors, of: torch.Tensor | slice) -> torch.Tensor:
    """Apply top-k, top-p and min-p in this order. Ties with the last kept token are kept."""
    if sampling.any_top_k:
        best = logits.topk(sampling.max_top_k, -1).values
        top_k = sampling.top_k[of]
        kth = best.gather(-1, (top_k - 1).clamp(max=sampling.max_top_k - 1).expand(*best.shape[:-1], 1))
        logits = logits.masked_fill((logits < kth) & (top_k < logits.shape[-1]), -torch.inf)
    if sampling.any_top_p:
        ordered, index = logits.sort(-1, descending=True)
        mass = ordered.softmax(-1)
        top_p = sampling.top_p[of]
        removed = (mass.cumsum(-1) - mass >= top_p) & (top_p < 1)
        removed[..., 0] = False
        logits = torch.empty_like(logits).scatter_(-1, index, ordered.masked_fill(removed, -torch.inf))
    if sampling.any_min_p:
        mass = logits.softmax(-1)
        logits = logits.masked_fill(mass < sampling.min_p[of] * mass.amax(-1, keepdim=True), -torch.inf)
    return logits


def _penalize(
    logits: torch.Tensor,
    sampling: SamplingTensors,
    of: torch.Tensor | slice,
    output: torch.Tensor,
    prompt: torch.Tensor,
) -> torch.Tensor:
    """Apply the penalties. `output` has token counts, `prompt` whether a token is in the prompt."""
    seen = prompt[of] | (output > 0)
    repetition = sampling.repetition[of]
    scaled = torch.where(logits < 0, logits * repetition, logits / repetition)
    logits = torch.where(seen, scaled, logits)
    return logits - sampling.frequency[of] * output - sampling.presence[of] * (output > 0)


def _token_counts(
    seqs: Sequence[SequenceState], draft: Draft, at: torch.Tensor, size: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count tokens for the penalties.

    Returns:
        The counts in the output up to each node, [T, V] at indices `at` [B, 1 + N], and the tokens
        of each prompt, [B, 1, V] bool.
    """
    vocab = size[1]
    output = torch.zeros(size, device=at.device)
    prompt = torch.zeros(len(seqs), 1, vocab, dtype=torch.bool, device=at.device)
    for b, seq in enumerate(seqs):
        split = len(seq.request.prompt_token_ids)
        token_ids = torch.tensor(seq.token_ids, device=at.device)
        output[at[b, :1]] = token_ids[split:].bincount(minlength=vocab)[:vocab].to(output)
        prompt[b, 0, token_ids[:split]] = True
    batch_index = torch.arange(len(seqs), device=at.device)
    for node in range(draft.size):
        index = at[:, node + 1]
        output[index] = output[at[batch_index, draft.parent[:, node] + 1]]
        output[index, draft.tokens[:, node].clamp(0, vocab - 1)] += 1
    return output, prompt


def _forbid_ends(
    logits: torch.Tensor, sampling: SamplingTensors, depth: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """Forbid end tokens before min_tokens tokens. Logits are [T, V] at indices `at` [B, M]."""
    logits = functional.pad(logits, (0, 0, 0, 1))
    for b, seq in enumerate(sampling.seqs):
        ends = sorted(token for token in seq.request.end_ids if token < logits.shape[-1])
        too_early = seq.num_output_tokens + depth[b] < seq.request.params.min_tokens
        if ends:
            nodes = at[b, :, None]
            logits[nodes, ends] = logits[nodes, ends].masked_fill(too_early[:, None], -torch.inf)
    return logits[:-1]


def _bias(seqs: Sequence[SequenceState], vocab: int, device: torch.device) -> torch.Tensor | None:
    """Return the logit bias [B, V], or None if no sequence has one."""
    if not any(seq.request.params.logit_bias for seq in seqs):
        return None
    bias = torch.zeros(len(seqs), vocab, device=device)
    for b, seq in enumerate(seqs):
        for token, value in seq.request.params.logit_bias.items():
            bias[b, token] = value
    return bias
