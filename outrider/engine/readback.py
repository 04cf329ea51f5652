"""Copy the result of a round from the device to the host, in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from outrider.core import devices
from outrider.core.types import Batch, Draft, Round, Scores, Verdict
from outrider.verify.rules import verify_greedy
from outrider.verify.sampling import has_finite_max

if TYPE_CHECKING:
    from outrider.engine.constraints import Masks


def read_greedy(batch: Batch, draft: Draft, scores: Scores, masks: Masks | None) -> Round:
    """Return the round in which every sequence takes the likeliest token.

    All exact rules give the same result for a one-hot target distribution, so no probabilities are computed.
    """
    best: torch.Tensor | Sequence[Sequence[int]] | None
    if masks is not None:
        best = masks.best(scores)
    elif scores.host is not None:
        best = scores.host
    elif scores.best is not None:
        best = scores.best
    else:
        best = torch.where(has_finite_max(scores.logits), scores.logits.argmax(-1), -1)
    emits = batch.emits  # while the device still works
    verified = verify_greedy(draft, best)
    accepted = [result if emitting else ((), ()) for emitting, result in zip(emits, verified, strict=True)]
    path, all_emitted = zip(*accepted, strict=True)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=path,
        emitted=all_emitted,
        sampled_logprob=tuple([(0.0,) * len(emitted) for emitted in all_emitted]),
        failed=tuple([not emitted for _, emitted in verified]),
    )


def read_verdict(batch: Batch, draft: Draft, scores: Scores, verdict: Verdict) -> Round:
    """Return the round of a verdict: accepted paths, emitted tokens and their log-probabilities on the host."""
    read = _read_host if devices.is_cpu(draft.tokens.device) else _read_device
    paths: list[tuple[int, ...]] = []
    all_emitted: list[tuple[int, ...]] = []
    all_logprobs: list[tuple[float, ...]] = []
    failed: list[bool] = []
    columns = zip(*read(draft, verdict, scores), strict=True)
    for (accepted, bonus, finite, nodes, tokens, logprobs), emits in zip(columns, batch.emits, strict=True):
        path: tuple[int, ...] = ()
        emitted: tuple[int, ...] = ()
        if emits and finite:
            path = tuple(nodes[:accepted])
            emitted = (*(tokens[node] for node in path), bonus)
        paths.append(path)
        all_emitted.append(emitted)
        all_logprobs.append(tuple(logprobs[: len(emitted)]))
        failed.append(not finite)
    return Round(
        batch=batch,
        draft=draft,
        scores=scores,
        path=tuple(paths),
        emitted=tuple(all_emitted),
        sampled_logprob=tuple(all_logprobs),
        failed=tuple(failed),
    )


def _read_host(draft: Draft, verdict: Verdict, scores: Scores) -> tuple[list[Any], ...]:
    """Return lists by sequence: accepted count, bonus token, finite logits, path, draft tokens, log-probabilities."""
    if scores.host is None:
        finite = _finite(scores).tolist()
    else:
        finite = [min(ids) >= 0 for ids in scores.host]
    return (
        verdict.accepted.tolist(),
        verdict.bonus.tolist(),
        finite,
        verdict.path.tolist(),
        draft.host_tokens(),
        verdict.logprob.tolist(),
    )


def _read_device(draft: Draft, verdict: Verdict, scores: Scores) -> tuple[list[Any], ...]:
    """Do what `_read_host` does, with one copy from the device."""
    # Ids and counts are far below 2**53, so float64 represents them exactly.
    single = torch.stack([verdict.accepted, verdict.bonus, _finite(scores)], 1)
    parts = (single, verdict.path, draft.tokens, verdict.logprob)
    copied = torch.cat([part.double() for part in parts], 1).tolist()
    ends = (3, 3 + draft.size, 3 + 2 * draft.size)
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [])
    for values in copied:
        ids = list(map(int, values[: ends[2]]))
        row = (*ids[: ends[0]], ids[ends[0] : ends[1]], ids[ends[1] :], values[ends[2] :])
        for column, value in zip(columns, row, strict=True):
            column.append(value)
    return columns


def _finite(scores: Scores) -> torch.Tensor:
    """Return [B] bool: whether the logits of a sequence are finite at all nodes."""
    finite = has_finite_max(scores.logits) if scores.best is None else scores.best >= 0
    return finite.all(1)
