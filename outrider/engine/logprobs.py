"""Compute the log-probabilities of emitted tokens, for requests that ask for them."""

import torch

from outrider.core.types import Round, TokenLogprobs


def add_logprobs(round: Round) -> None:
    """Append the log-probabilities of a round to its sequences, from the model's own softmax."""
    wanted = [
        b for b, seq in enumerate(round.batch.seqs) if seq.request.params.logprobs is not None and round.emitted[b]
    ]
    if not wanted:
        return
    rows: list[tuple[int, int]] = []  # (sequence, node) of each token
    tokens: list[int] = []
    for b in wanted:
        rows += [(b, 1 + node) for node in (-1, *round.path[b])]
        tokens += round.emitted[b]
    logits = round.scores.logits  # [B, 1 + N, V]
    at = torch.tensor(rows, device=logits.device)
    logprobs = logits[at[:, 0], at[:, 1]].log_softmax(-1)  # [T, V]
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    max_top = min(max(round.batch.seqs[b].request.params.logprobs or 0 for b in wanted), logprobs.shape[-1])
    best = logprobs.topk(max_top) if max_top else None
    top_ids = best.indices.tolist() if best else [[]] * len(tokens)
    top_values = best.values.tolist() if best else [[]] * len(tokens)
    i = 0
    for b in wanted:
        seq = round.batch.seqs[b]
        num_top = seq.request.params.logprobs
        for token, sampled_logprob in zip(round.emitted[b], round.sampled_logprob[b], strict=False):
            top = tuple(zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True))
            seq.logprobs.append(TokenLogprobs(token=token, logprob=chosen[i], sampled_logprob=sampled_logprob, top=top))
            i += 1
