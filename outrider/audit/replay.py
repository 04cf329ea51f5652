"""The replay test: speculation gives the tokens of plain decoding. Differences are counted and explained."""

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
LOGITS = 1e-3  # largest gap in logits that rounding explains, for greedy texts
PROBABILITY = 1e-4  # largest gap in probability that rounding explains, for sampled texts

_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration that runs all prompts."""

    sampled: bool
    verifier: Verifier
    k: int
    alone: bool  # one prompt at a time instead of a batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A difference from the plain text."""

    temperature: float
    verifier: str
    k: int
    batched: bool
    prompt: int  # from 0
    position: int  # of the output token, from 0
    plain_token: int
    speculative_token: int
    gap: float  # in logits for greedy texts, in probability for sampled ones
    rounding: bool  # whether rounding explains the gap


def cases(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int]) -> Iterator[Case]:
    """Return all cases: greedy with every exact verifier, sampled with `walk`."""
    for rule in EXACT.values():
        # The largest k comes first, because it shows whether the proposer drafts trees.
        for depth in sorted({*depths, k}, reverse=True):
            if pair.trees and not rule.trees:
                continue
            alone = (False, True) if depth == k and rule.name in ("walk", verifier.name) else (False,)
            sampled = (False, True) if rule.name == "walk" else (False,)
            yield from (Case(sampled=s, verifier=rule, k=depth, alone=a) for a in alone for s in sampled)


def replay(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int], tokens: int, seed: int) -> dict[str, Any]:
    """Compare every case with plain decoding, token by token.

    Args:
        pair: in float32, or on kernels without batch effects.
        verifier: the verifier that users run. It also runs one prompt at a time.
        k: the draft length that users run.
        depths: other draft lengths to run.
        tokens: output tokens per text.
        seed: the seed of the sampled texts.
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
    """Return the first difference from the plain text, with its gap; None if they are equal."""
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
    """Return the gap between two tokens: in logits if greedy, else the distance from the uniform number."""
    text = (*request.prompt_token_ids, *emitted)
    logits = pair.logits(text)
    if not request.params.temperature:
        return abs(float(logits[tokens[0]] - logits[tokens[1]]))
    law = pair.target_distribution(logits, request.params).double()
    end = law.cumsum(-1)
    drawn = pair.uniform(request.seed, len(text)) * float(end[-1])
    return max(max(float(end[t] - law[t]) - drawn, drawn - float(end[t]), 0.0) for t in tokens)
