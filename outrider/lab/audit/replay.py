"""The replay test: compare speculation with plain decoding token by token, and explain differences."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from outrider.core.params import SamplingParams
from outrider.core.types import Request
from outrider.lab.audit.pair import Pair, first_difference
from outrider.verify.rules import EXACT, Verifier

# A pass over several tokens or sequences adds in another order than a pass over one token, so it rounds differently: by
# up to about 1e-4 logits in deep models in float32. Outputs may differ only where two tokens are that close. Kernels
# without batch effects always add in the same order, so there no difference is allowed.
LOGITS = 1e-3  # largest gap in logits that rounding explains, for greedy outputs
PROBABILITY = 1e-4  # largest gap in probability that rounding explains, for sampled outputs

_TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration that runs all prompts."""

    temperature: float
    verifier: str
    k: int
    batched: bool  # all prompts in a batch instead of one prompt at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch(Case):
    """A difference from plain decoding."""

    prompt: int  # from 0
    position: int  # of the output token, from 0
    plain_token: int
    speculative_token: int
    gap: float  # in logits for greedy outputs, in probability for sampled outputs
    rounding: bool  # whether rounding explains the gap


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult(Case):
    """The result of one case."""

    mismatches: int
    tau: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of the replay test, as in the JSON document."""

    passed: bool
    dtype: str
    kernels: str
    prompts: int
    texts: int
    tokens: int
    mismatches: int  # texts that differ from plain decoding
    unexplained: int  # those that differ by more than rounding
    rounding_logits: float
    rounding_probability: float
    details: list[Mismatch]
    cases: list[CaseResult]


def cases(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int]) -> Iterator[Case]:
    """Yield all cases: greedy with every exact verifier, sampled with `walk`."""
    for rule in EXACT.values():
        # The largest k comes first, because it shows whether the proposer drafts trees.
        for depth in sorted({*depths, k}, reverse=True):
            if pair.trees and not rule.trees:
                continue
            ways = (True, False) if depth == k and rule.name in ("walk", verifier.name) else (True,)
            temperatures = _TEMPERATURES if rule.name == "walk" else _TEMPERATURES[:1]
            for batched, temperature in product(ways, temperatures):
                yield Case(temperature=temperature, verifier=rule.name, k=depth, batched=batched)


def replay(pair: Pair, verifier: Verifier, *, k: int, depths: Sequence[int], tokens: int, seed: int) -> ReplayResult:
    """Return the differences of every case from plain decoding, token by token.

    Args:
        pair: in float32, or on kernels without batch effects.
        verifier: the verifier that users run. It also runs one prompt at a time.
        k: the draft length that users run.
        depths: other draft lengths to run.
        tokens: output tokens per prompt.
        seed: the seed of the sampled outputs.
    """
    requests = {
        temperature: pair.requests(SamplingParams(max_tokens=tokens, seed=seed, temperature=temperature))
        for temperature in _TEMPERATURES
    }
    plain = {temperature: pair.plain(group, alone=True).tokens for temperature, group in requests.items()}
    results: list[CaseResult] = []
    mismatches: list[Mismatch] = []
    for case in cases(pair, verifier, k=k, depths=depths):
        group = requests[case.temperature]
        outputs = pair.speculative(group, EXACT[case.verifier], k=case.k, alone=not case.batched)
        texts = zip(group, plain[case.temperature], outputs.tokens, strict=True)
        compared = (_compare(pair, case, request, expected, actual) for request, expected, actual in texts)
        new = list(filter(None, compared))
        mismatches += new
        results.append(CaseResult(**asdict(case), mismatches=len(new), tau=outputs.stats.tau))
    texts_compared = len(results) * len(pair.prompts)
    unexplained = sum(not mismatch.rounding for mismatch in mismatches)
    return ReplayResult(
        passed=not unexplained,
        dtype=str(pair.dtype).removeprefix("torch."),
        kernels=pair.kernels,
        prompts=len(pair.prompts),
        texts=texts_compared,
        tokens=texts_compared * tokens,
        mismatches=len(mismatches),
        unexplained=unexplained,
        rounding_logits=LOGITS,
        rounding_probability=PROBABILITY,
        details=mismatches,
        cases=results,
    )


def _compare(
    pair: Pair, case: Case, request: Request, plain: Sequence[int], speculative: Sequence[int]
) -> Mismatch | None:
    """Return the first difference between two outputs, with its gap; None if they are equal."""
    at = first_difference(plain, speculative)
    if at is None:
        return None
    gap = _gap(pair, request, plain[:at], (plain[at], speculative[at]))
    return Mismatch(
        **asdict(case),
        prompt=request.id,
        position=at,
        plain_token=plain[at],
        speculative_token=speculative[at],
        gap=gap,
        rounding=not pair.steady and gap < (PROBABILITY if case.temperature else LOGITS),
    )


def _gap(pair: Pair, request: Request, emitted: Sequence[int], tokens: tuple[int, int]) -> float:
    """Return the gap between two tokens: in logits if greedy, else their distance from the uniform number."""
    prefix = (*request.prompt_token_ids, *emitted)
    logits = pair.logits(prefix)
    if not request.params.temperature:
        return abs(float(logits[tokens[0]] - logits[tokens[1]]))
    p = pair.target_distribution(logits, request.params).double()
    cdf = p.cumsum(-1)
    uniform = pair.uniform(request.seed, len(prefix)) * float(cdf[-1])
    # A token is sampled if the uniform number is between `begin` and `end`.
    gaps = []
    for token in tokens:
        end = float(cdf[token])
        begin = float(cdf[token] - p[token])
        gaps.append(max(begin - uniform, uniform - end, 0.0))
    return max(gaps)
