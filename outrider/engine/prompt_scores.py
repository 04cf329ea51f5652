"""The log-probabilities of the tokens of a prompt."""

from collections.abc import Sequence

import torch

from outrider.core import tree
from outrider.core.target import Target
from outrider.core.types import Batch, Draft, DraftBudget, Round, Scores, SequenceState, TokenLogprobs
from outrider.engine.engine import Engine
from outrider.errors import OutriderError
from outrider.verify.logprobs import Logprobs

_CHUNK = 32  # tokens of a pass


@torch.inference_mode()
def score_prompt(engine: Engine, target: Target, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of each token but the first, after those before it, and of the `top` likeliest.

    It runs between two rounds. The tokens of a pass are the draft of a sequence that accepts all of
    them. Running requests are prefilled again afterwards.

    Raises:
        OutriderError: the engine has several ranks.
    """
    if engine.ranks:
        raise OutriderError("log-probabilities of the prompt need one rank; serve without --tp, or leave echo out")
    slot = engine.idle_slot()
    seq = SequenceState.of(tokens[:1], slot)
    target.cache.admit(slot, seq.token_ids)
    entries: list[TokenLogprobs] = []
    try:
        for begin in range(1, len(tokens), _CHUNK):
            chunk = tuple(tokens[begin : begin + _CHUNK])
            last = (tokens[begin - 1],)
            batch = Batch(seqs=(seq,), start=(begin - 1,), feed=(last,), budget=DraftBudget((len(chunk),)))
            draft = tree.chain(torch.tensor([chunk], device=target.device), (len(chunk),))
            scores = target.score(batch, draft)
            entries += _entries(engine.sampling.logprobs(scores.logits[0], range(len(chunk)), chunk, top), chunk)
            target.cache.commit(_accepting(batch, draft, scores, chunk))
            seq.token_ids += chunk
    finally:
        target.cache.release(slot)
    return tuple(entries)


def _accepting(batch: Batch, draft: Draft, scores: Scores, chunk: tuple[int, ...]) -> Round:
    """Return the round that emits the whole draft. Its last token is the bonus token, which the next pass feeds."""
    path = tuple(range(len(chunk) - 1))
    zeros = (0.0,) * len(chunk)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=(path,),
        emitted=(chunk,),
        sampled_logprob=(zeros,),
        failed=(False,),
    )


def _entries(found: Logprobs, tokens: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token=token, logprob=logprob, sampled_logprob=logprob, top=tuple(zip(ids, top, strict=True)))
        for token, logprob, ids, top in zip(tokens, *found, strict=True)
    ]
