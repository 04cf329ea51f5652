"""Add the log-probabilities of emitted tokens to the requests that ask for them."""

from outrider.core.types import Packed, Round, TokenLogprobs
from outrider.verify.sampling import SamplingKernels


def add_logprobs(round: Round, kernels: SamplingKernels) -> None:
    """Append the log-probabilities of a round to its sequences, from the model's own softmax."""
    wanted = [
        b for b, seq in enumerate(round.batch.seqs) if seq.request.params.logprobs is not None and round.emitted[b]
    ]
    if not wanted:
        return
    logits = round.scores.packed or Packed.of(round.scores.logits)
    row_of = logits.at.tolist()
    rows: list[int] = []
    tokens: list[int] = []
    for b in wanted:
        rows += [row_of[b][1 + node] for node in (-1, *round.path[b])]
        tokens += round.emitted[b]
    max_top = max(round.batch.seqs[b].request.params.logprobs or 0 for b in wanted)
    found = zip(*kernels.logprobs(logits.values, rows, tokens, max_top), strict=True)
    for b in wanted:
        seq = round.batch.seqs[b]
        num_top = seq.request.params.logprobs
        for token, sampled in zip(round.emitted[b], round.sampled_logprob[b], strict=False):
            logprob, ids, values = next(found)
            top = tuple(zip(ids[:num_top], values[:num_top], strict=True))
            seq.logprobs.append(TokenLogprobs(token=token, logprob=logprob, sampled_logprob=sampled, top=top))
