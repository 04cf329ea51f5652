"""Speculation gives the very tokens of plain decoding. Each text that differs is counted and explained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outrider.audit.pair import Pair, first_difference
from outrider.core.params import SamplingParams
from outrider.core.types import Request
from outrider.verify.rules import EXACT, Verifier

# A pass over several tokens, or over several rows, adds up in another order than a pass over one, and so rounds
# otherwise, by up to about 1e-4 logits in deep models in float32. A text may part from the plain one where two tokens
# are as close as that, and nowhere else; on kernels that add up in one order whatever is in the pass, not even there.
LOGITS = 1e-3  # between the two tokens of a greedy text
PROBABILITY = 1e-4  # between the number that was drawn and the interval of the other token

_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to answer all prompts."""

    sampled: bool
    verifier: Verifier
    k: int
    alone: bool  # one prompt at a time; otherwise all together


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Where a text left the plain one."""

    temperature: float
    verifier: str
    k: int
    batched: bool
    prompt: int  # counted from 0
    position: int  # of the emitted token, counted from 0
    plain_token: int
    speculative_token: int
    gap: float  # logits of a greedy text, probability of a sampled one
    rounding: bool  # the gap is small enough for rounding to explain it


def cases(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int]) -> Iterator[Case]:
    """All to be run: greedy through every exact verifier, sampled through `walk`, which any proposer replays."""
    for rule in EXACT.values():
        # Trees show themselves only where there is room for them, so the largest k comes first.
        for depth in sorted({*depths, k}, reverse=True):
            if pair.trees and not rule.trees:
                continue
            alone = (False, True) if depth == k and rule.name in ("walk", verifier.name) else (False,)
            sampled = (False, True) if rule.name == "walk" else (False,)
            yield from (Case(sampled=s, verifier=rule, k=depth, alone=a) for a in alone for s in sampled)


def replay(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int], tokens: int, seed: int) -> dict[str, Any]:
    """Compare every case with plain decoding, token by token.

    Args:
        pair: in float32, or steady.
        verifier: the one that users will run, tried one prompt at a time as well.
        k: the guesses per round that users will run.
        depths: other numbers of guesses to try.
        tokens: length of each text.
        seed: of the sampled texts.
    """
    wanted = {
        sampled: pair.requests(SamplingParams(max_tokens=tokens, seed=seed, temperature=_TEMPERATURE * sampled))
        for sampled in (False, True)
    }
    plain = {sampled: pair.plain(requests, alone=True).tokens for sampled, requests in wanted.items()}
    rows: list[dict[str, Any]] = []
    found: list[Mismatch] = []
    for case in cases(pair, verifier, k=k, depths=depths):
        requests = wanted[case.sampled]
        texts = pair.speculative(requests, case.verifier, k=case.k, alone=case.alone)
        new = [m for i, text in enumerate(texts.tokens) if (m := _compare(pair, case, requests[i], plain, text))]
        found += new
        rows.append(_row(case, mismatches=len(new), tau=texts.stats.tau))
    texts_compared = len(rows) * len(pair.prompts)
    unexplained = sum(not mismatch.rounding for mismatch in found)
    return {
        "passed": not unexplained,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "kernels": pair.kernels,
        "prompts": len(pair.prompts),
        "texts": texts_compared,
        "tokens": texts_compared * tokens,
        "mismatches": len(found),
        "unexplained": unexplained,
        "rounding_logits": LOGITS,
        "rounding_probability": PROBABILITY,
        "details": [asdict(mismatch) for mismatch in found],
        "cases": rows,
    }


def _row(case: Case, *, mismatches: int, tau: float) -> dict[str, Any]:
    return {
        "temperature": _TEMPERATURE * case.sampled,
        "verifier": case.verifier.name,
        "k": case.k,
        "batched": not case.alone,
        "mismatches": mismatches,
        "tau": tau,
    }


def _compare(
    pair: Pair, case: Case, request: Request, plain: dict[bool, tuple[tuple[int, ...], ...]], text: Sequence[int]
) -> Mismatch | None:
    """Where `text` parts from the plain answer to `request`, and how close the two tokens are there."""
    own = plain[case.sampled][request.id]
    at = first_difference(own, text)
    if at is None:
        return None
    gap = _gap(pair, request, own[:at], (own[at], text[at]))
    return Mismatch(
        temperature=request.params.temperature,
        verifier=case.verifier.name,
        k=case.k,
        batched=not case.alone,
        prompt=request.id,
        position=at,
        plain_token=own[at],
        speculative_token=text[at],
        gap=gap,
        rounding=not pair.steady and gap < (PROBABILITY if case.sampled else LOGITS),
    )


def _gap(pair: Pair, request: Request, emitted: Sequence[int], tokens: tuple[int, int]) -> float:
    """Logits between two tokens, or how far from the draw the interval of the further one begins."""
    text = (*request.prompt_token_ids, *emitted)
    logits = pair.logits(text)
    if not request.params.temperature:
        return abs(float(logits[tokens[0]] - logits[tokens[1]]))
    law = pair.target_distribution(logits, request.params).double()
    end = law.cumsum(-1)
    drawn = pair.uniform(request.seed, len(text)) * float(end[-1])
    return max(max(float(end[t] - law[t]) - drawn, drawn - float(end[t]), 0.0) for t in tokens)
