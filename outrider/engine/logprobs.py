"""Compute the log-probabilities of emitted tokens, for requests that ask for them."""

from __future__ import annotations

import torch

from outrider.core.types import Round, TokenLogprobs


def add_logprobs(round: Round) -> None:
    """Append the log-probabilities of a round to its sequences, from the model's own softmax."""
    for b, seq in enumerate(round.batch.seqs):
        num_top = seq.request.params.logprobs
        if num_top is not None and round.emitted[b]:
            seq.logprobs += _token_logprobs(round, b, num_top)


def _token_logprobs(round: Round, b: int, num_top: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the emitted tokens of sequence b, with the `num_top` likeliest tokens of each."""
    emitted = round.emitted[b]
    nodes = [0, *(node + 1 for node in round.path[b])]
    logprobs = round.scores.logits[b, nodes].log_softmax(-1)
    best = logprobs.topk(min(num_top, logprobs.shape[-1]))
    ids = torch.tensor(emitted, device=logprobs.device)
    chosen = logprobs.gather(1, ids[:, None])[:, 0].tolist()
    top_ids = best.indices.tolist()
    top_values = best.values.tolist()
    return [
        TokenLogprobs(
            token=token,
            logprob=chosen[i],
            sampled_logprob=round.sampled_logprob[b][i],
            top=tuple(zip(top_ids[i], top_values[i], strict=True)),
        )
        for i, token in enumerate(emitted)
    ]
