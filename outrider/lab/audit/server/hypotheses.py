"""Hypotheses about the distribution of a server's output: no change, or one of the defects that engines have had.

A hypothesis gives the distribution of the next token after every beginning, so that whole distributions can be
compared. A server with speculation is a chain of states: how many draft tokens of the current round were accepted.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from outrider.core.params import SamplingParams
from outrider.lab.audit.server.model import Tokens, distribution

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

_STALE = "penalties do not count the draft tokens of the same round"  # a cause
_PAIRS = 64  # likeliest tokens whose pairs with all others are computed

FIRST = -1  # state before the first output token, which most engines sample in the prefill without a draft
State = int  # otherwise: accepted draft tokens of the current round


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position of an output: what the models know, and what the request asked for."""

    logits: torch.Tensor  # [V] of the target
    draft_logits: torch.Tensor | None  # [V]; None: the draft is unknown
    params: SamplingParams
    prompt: Tokens
    output: Tokens  # tokens before the position
    memo: dict[Any, Any] = field(default_factory=dict)  # what was computed already

    def target(self, *, stale: int = 0, **changes: Any) -> torch.Tensor:
        """Return the distribution that the request asked for.

        Args:
            stale: number of the latest output tokens that the penalties do not count.
            changes: sampling parameters that the server uses in place of the requested ones.
        """
        counted = self.output[: len(self.output) - stale]
        return self._distribution(self.logits, counted, changes)

    def draft(self, **changes: Any) -> torch.Tensor:
        """Return the same distribution of the draft."""
        assert self.draft_logits is not None
        return self._distribution(self.draft_logits, self.output, changes)

    def _distribution(self, logits: torch.Tensor, counted: Tokens, changes: Mapping[str, Any]) -> torch.Tensor:
        params = replace(self.params, **changes) if changes else self.params
        key = (logits is self.logits, self.prompt, counted, sampling_key(params))
        if key not in self.memo:
            self.memo[key] = distribution(logits, params, prompt=self.prompt, output=counted)
        p: torch.Tensor = self.memo[key]
        return p


def sampling_key(params: SamplingParams) -> tuple[float, ...]:
    """Return the parameters that change a distribution, as a key."""
    return tuple(getattr(params, name) for name in _SAMPLING)


Step = Callable[[Position, State], Mapping[State, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """One way in which a server may sample."""

    cause: str  # what is wrong, as a sentence without its full stop; "" if nothing is
    start: State
    step: Step  # the probability [V] of each next token, by the state after it


EXACT = Hypothesis(cause="", start=0, step=lambda position, state: {0: position.target()})


def hypotheses(*, draft: bool, k: int) -> list[Hypothesis]:
    """Return all known defects. Those with the same cause differ in details that a user cannot see.

    Args:
        draft: whether the draft model is known.
        k: draft tokens per round.
    """
    found = list(_of_the_sampler())
    for start in (FIRST, 0):
        found += _of_the_verifier(start)
        if draft:
            for length in sorted({k, 2}):
                found += _with_draft(start, length)
    return found


def _of_the_sampler() -> Iterator[Hypothesis]:
    """Yield defects that do not depend on speculation."""
    changes: dict[str, Any]
    for cause, changes in (
        ("the temperature is ignored: every token is the likeliest one", {"temperature": 0.0}),
        (
            "temperature and penalties are ignored: every token is the likeliest one",
            {"temperature": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        ),
        ("the temperature is ignored: tokens are sampled at temperature 1", {"temperature": 1.0}),
        ("top_k is ignored", {"top_k": 0}),
        ("top_p is ignored", {"top_p": 1.0}),
        ("top_k and top_p are ignored", {"top_k": 0, "top_p": 1.0}),
        ("presence and frequency penalties are ignored", {"presence_penalty": 0.0, "frequency_penalty": 0.0}),
    ):
        yield Hypothesis(cause=cause, start=0, step=_always(changes))
    for cause, defaults in (
        ("a default of the server keeps only the 50 likeliest tokens (transformers)", {"top_k": 50}),
        (
            "defaults of the server filter: top_k 40, top_p 0.95, min_p 0.05 (llama.cpp)",
            {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
        ),
    ):
        yield Hypothesis(cause=cause, start=0, step=_by_default(defaults))
    yield Hypothesis(
        cause="presence and frequency penalties count the prompt as well, which OpenAI's do not",
        start=0,
        step=lambda position, state: {
            0: replace(position, prompt=(), output=position.prompt + position.output).target()
        },
    )
    yield Hypothesis(
        cause="top_k and top_p are applied before the temperature, and not after it",
        start=0,
        step=lambda position, state: {0: _filtered_first(position)},
    )


def _of_the_verifier(start: State) -> Iterator[Hypothesis]:
    """Yield defects of the verification that can be computed without the draft."""
    if start == FIRST:  # otherwise every token is the likeliest one
        yield Hypothesis(
            cause="draft tokens are verified greedily at a temperature above 0",
            start=start,
            step=_after_first(lambda position: {0: position.target(temperature=0.0)}),
        )
    # Without the draft it is unknown which draft tokens are accepted. Here all of them are.
    yield Hypothesis(
        cause=_STALE,
        start=start,
        step=_after_first(lambda position: {0: position.target(stale=max(len(position.output) - (start == FIRST), 0))}),
    )


def _with_draft(start: State, k: int) -> Iterator[Hypothesis]:
    """Yield defects of the verification of drafts of k tokens from a known draft model."""

    def chain(accept: _Accept) -> Step:
        def step(position: Position, state: State) -> Mapping[State, torch.Tensor]:
            if state == FIRST:
                return {0: position.target()}
            # Most defects verify in the same way wherever the position is in its round.
            key = (accept, sampling_key(position.params), state if accept is _stale_penalties else 0)
            if key not in position.memo:
                position.memo[key] = accept(position, state)
            verdict = position.memo[key]
            return {0: verdict.bonus} if state == k else {state + 1: verdict.accepted, 0: verdict.rejected}

        return step

    for cause, accept in (
        ("draft tokens are not verified", _unverified),
        ("the temperature is ignored for the draft: it samples at temperature 1", _hot_draft),
        ("the draft takes its likeliest token, and the verifier takes it for a sample", _greedy_draft),
        ("the verifier compares with the draft's distribution before temperature and filters", _raw_draft),
        ("top_k and top_p are applied after the ratio of target and draft, and not before it", _late_filters),
        ("a rejected draft token is replaced by a sample of p, and not of the residual (p - q)+", _plain_residual),
        ("the ratio has the probability of another token than the draft token", _other_ratio),
        (_STALE, _stale_penalties),
    ):
        yield Hypothesis(cause=cause, start=start, step=chain(accept))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verified:
    """The probabilities of the outcomes of one draft token."""

    accepted: torch.Tensor  # [V] probability that the draft token is this one and is accepted
    rejected: torch.Tensor  # [V] probability that the draft token is rejected and replaced by this one
    bonus: torch.Tensor  # [V] distribution of the token after a whole accepted draft


_Accept = Callable[[Position, State], _Verified]


def _verify(p: torch.Tensor, drawn: torch.Tensor, stated: torch.Tensor) -> _Verified:
    """Return what follows if a token of `drawn` is verified as one of `stated` (Leviathan et al. 2023, algorithm 1)."""
    accepted = drawn * torch.where(stated > 0, p / stated, torch.inf).clamp(max=1)
    accepted = torch.where(drawn > 0, accepted, 0.0)
    return _Verified(accepted=accepted, rejected=_rest(accepted, (p - stated).clamp(min=0), p), bonus=p)


def _rest(accepted: torch.Tensor, residual: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return what replaces rejected tokens: `residual`, or p where nothing is left."""
    total = residual.sum()
    return (1 - accepted.sum()).clamp(min=0) * (residual / total if total > 0 else p)


def _unverified(position: Position, state: State) -> _Verified:
    q = position.draft()
    return _Verified(accepted=q, rejected=torch.zeros_like(q), bonus=position.target())


def _hot_draft(position: Position, state: State) -> _Verified:
    return _verify(position.target(), position.draft(temperature=1.0), position.draft())


def _greedy_draft(position: Position, state: State) -> _Verified:
    return _verify(position.target(), position.draft(temperature=0.0), position.draft())


def _raw_draft(position: Position, state: State) -> _Verified:
    raw = position.draft(temperature=1.0, top_k=0, top_p=1.0)
    return _verify(position.target(), position.draft(), raw)


def _late_filters(position: Position, state: State) -> _Verified:
    p = position.target(top_k=0, top_p=1.0)
    q = position.draft(top_k=0, top_p=1.0)
    accepted = torch.minimum(p, q)
    residual = torch.where(position.target() > 0, (p - q).clamp(min=0), 0.0)
    return _Verified(accepted=accepted, rejected=_rest(accepted, residual, position.target()), bonus=position.target())


def _plain_residual(position: Position, state: State) -> _Verified:
    p = position.target()
    verified = _verify(p, position.draft(), position.draft())
    return replace(verified, rejected=_rest(verified.accepted, p, p))


def _other_ratio(position: Position, state: State) -> _Verified:
    """Return what OpenVINO GenAI 2026 does: it accepts x with probability min(1, q(x) / p(y)) for a sample y of p."""
    p = position.target()
    q = position.draft()
    likely = p.topk(min(_PAIRS, len(p))).indices  # of noticeable probability, so that the table stays small
    likely = likely[p[likely] > 0]
    chance = (p[likely, None] * (q[None, :] / p[likely, None]).clamp(max=1)).sum(0)
    accepted = q * chance.clamp(max=1)
    return _Verified(accepted=accepted, rejected=_rest(accepted, p, p), bonus=p)


def _stale_penalties(position: Position, state: State) -> _Verified:
    p = position.target(stale=max(state, 0))
    q = position.draft()
    return replace(_verify(p, q, q), bonus=p)


def _always(changes: Mapping[str, Any]) -> Step:
    def step(position: Position, state: State) -> Mapping[State, torch.Tensor]:
        return {0: position.target(**changes)}

    return step


def _by_default(defaults: Mapping[str, Any]) -> Step:
    """Return a step that applies the filters of the server where the request has none."""

    def step(position: Position, state: State) -> Mapping[State, torch.Tensor]:
        off = SamplingParams()
        asked = position.params
        changes = {name: value for name, value in defaults.items() if getattr(asked, name) == getattr(off, name)}
        return {0: position.target(**changes)}

    return step


def _after_first(step: Callable[[Position], Mapping[State, torch.Tensor]]) -> Step:
    """Return a step that samples the first token from p, if the hypothesis starts there."""

    def wrapped(position: Position, state: State) -> Mapping[State, torch.Tensor]:
        return {0: position.target()} if state == FIRST else step(position)

    return wrapped


def _filtered_first(position: Position) -> torch.Tensor:
    kept = position.target(temperature=1.0) > 0
    p = torch.where(kept, position.target(top_k=0, top_p=1.0), 0.0)
    return p / p.sum()
