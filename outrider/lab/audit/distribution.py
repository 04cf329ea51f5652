"""The distribution test: compare counts of the first sampled tokens with their exact joint distribution."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.core.params import SamplingParams
from outrider.lab.audit.pair import Pair
from outrider.lab.audit.statistics import g_test
from outrider.verify.rules import EXACT, Verifier

SIGNIFICANCE = 1e-4  # probability that an exact pair fails an audit, over all of its tests

_DEPTH = 3  # number of tokens whose joint distribution is tested
_WIDTH = 4  # likeliest tokens that are distinguished at each position
_CANDIDATES = 6  # prompts considered
_EDGE = 1e-3  # smallest gap in logits between the last token of top-k and the next
_OTHER = -1

Outcome = tuple[int, ...]  # the first tokens, up to the first one that is not among the likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The target's logits after a prompt and after each likely beginning of the output."""

    prompt: int  # index of the prompt
    logits: Mapping[Outcome, torch.Tensor]  # [V] by beginning, of 0 to _DEPTH - 1 tokens
    likely: Mapping[Outcome, tuple[int, ...]]  # the _WIDTH likeliest tokens, best first
    edge: float  # smallest gap in logits at the edge of top-k


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTest:
    """The result of one sampling test, as in the JSON document."""

    verifier: str
    prompt: int
    top_k: int
    k: int
    outcomes: int  # those of a probability above 0
    entropy: float  # in nats
    statistic: float | None  # None: an outcome of probability 0 was observed
    dof: int
    p_value: float
    draft_tokens: int
    acceptance: float
    tau: float
    passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionResult:
    """The result of the distribution test, as in the JSON document."""

    passed: bool
    significance: float  # smallest p-value that passes
    samples: int  # of each test
    tests: list[SamplingTest]


def check_distribution(pair: Pair, verifier: Verifier, *, k: int, samples: int, seed: int) -> DistributionResult:
    """Return the results of the tests of `verifier`, of `walk`, and of a rule that uses the proposer's q.

    The tests run at temperature 1 with the full vocabulary. All unlikely tokens are one outcome. `verifier` also runs
    on another prompt with top-k, where target and draft keep different tokens.

    Args:
        pair: in float32, or on kernels without batch effects. It has run before, so `pair.trees` is known.
        verifier: the verifier that users run.
        k: draft length; at least 2, so that draft tokens and bonus tokens are tested.
        samples: samples per test.
    """
    k = max(k, 2)
    tests = []
    candidates = _strongest_tests(pair, verifier, k=k)
    plan = plan_tests(pair, verifier)
    level = SIGNIFICANCE / len(plan)
    for rule, top_k in plan:
        branches = candidates[bool(top_k) % len(candidates)]
        params = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=k + _DEPTH, seed=seed)
        tests.append(_test(pair, branches, rule, params, k=k, samples=samples, level=level))
    passed = all(test.passed for test in tests)
    return DistributionResult(passed=passed, significance=level, samples=samples, tests=tests)


def plan_tests(pair: Pair, verifier: Verifier) -> list[tuple[Verifier, int]]:
    """Return verifier and top-k of each test, ordered so that each kind of draft is loaded once."""
    others = {"walk", "traversal" if pair.trees else "block"} - {verifier.name}
    tests = [(verifier, 0), (verifier, _WIDTH), *((EXACT[name], 0) for name in sorted(others))]
    return sorted(tests, key=lambda test: test[0].draw)


def joint_distribution(pair: Pair, branches: Branches, params: SamplingParams) -> dict[Outcome, float]:
    """Return the probability of every outcome, by the chain rule in float64."""
    outcomes: dict[Outcome, float] = {}
    prefixes: dict[Outcome, float] = {(): 1.0}  # probability of each beginning
    for beginning, logits in branches.logits.items():
        p = pair.target_distribution(logits, params).double()
        p = p / p.sum()
        likely = torch.tensor(branches.likely[beginning], device=p.device)
        longer = prefixes if len(beginning) < _DEPTH - 1 else outcomes
        for token, prob in zip(likely.tolist(), p[likely].tolist(), strict=True):
            longer[*beginning, token] = prefixes[beginning] * prob
        outcomes[*beginning, _OTHER] = prefixes[beginning] * float(p.index_fill(0, likely, 0.0).sum())
    return outcomes


def outcome_of(text: Sequence[int], branches: Branches) -> Outcome:
    """Return the outcome of output tokens."""
    outcome: Outcome = ()
    for token in text[:_DEPTH]:
        if token not in branches.likely[outcome]:
            return (*outcome, _OTHER)
        outcome = (*outcome, token)
    return outcome


def _test(
    pair: Pair, branches: Branches, rule: Verifier, params: SamplingParams, *, k: int, samples: int, level: float
) -> SamplingTest:
    """Return the result of one test. It fails if its p-value is below `level`."""
    requests = pair.requests(params, [pair.prompts[branches.prompt]] * samples)
    outputs = pair.speculative(requests, rule, k=k, enough=_DEPTH)
    expected = joint_distribution(pair, branches, params)
    counts = Counter(outcome_of(tokens, branches) for tokens in outputs.tokens)
    result = g_test([counts[outcome] for outcome in expected], list(expected.values()))
    stats = outputs.stats
    return SamplingTest(
        verifier=rule.name,
        prompt=branches.prompt,
        top_k=params.top_k,
        k=k,
        outcomes=sum(prob > 0 for prob in expected.values()),
        entropy=_entropy(expected),
        statistic=result.statistic if math.isfinite(result.statistic) else None,
        dof=result.dof,
        p_value=result.p_value,
        draft_tokens=stats.draft_tokens,
        acceptance=sum(stats.accepted) / sum(stats.reached) if sum(stats.reached) else 0.0,
        tau=stats.tau,
        passed=result.p_value >= level,
    )


def _strongest_tests(pair: Pair, verifier: Verifier, *, k: int) -> list[Branches]:
    """Return prompts in the order in which they suit a test: first those with drafts, then by entropy.

    Prompts with a near-tie at the edge of top-k come last, because rounding decides which token is possible.
    """
    params = SamplingParams(temperature=1.0, max_tokens=k + 1, seed=0)

    def strength(branches: Branches) -> tuple[bool, bool, float]:
        requests = pair.requests(params, [pair.prompts[branches.prompt]])
        has_draft = pair.speculative(requests, verifier, k=k, enough=1).stats.draft_tokens > 0
        return branches.edge > _EDGE, has_draft, _entropy(joint_distribution(pair, branches, params))

    candidates = [grow(pair, i) for i in range(min(len(pair.prompts), _CANDIDATES))]
    return sorted(candidates, key=strength, reverse=True)


def grow(pair: Pair, prompt: int) -> Branches:
    """Return the logits after each likely beginning of an output, each from a fresh prefill without speculation."""
    logits: dict[Outcome, torch.Tensor] = {}
    likely: dict[Outcome, tuple[int, ...]] = {}
    waiting: list[Outcome] = [()]
    edge = math.inf
    while waiting:
        beginning = waiting.pop(0)
        scores = pair.logits((*pair.prompts[prompt], *beginning))
        best = scores.topk(min(_WIDTH + 1, len(scores)))
        logits[beginning] = scores
        likely[beginning] = tuple(best.indices[:_WIDTH].tolist())
        if len(scores) > _WIDTH:
            edge = min(edge, float(best.values[_WIDTH - 1] - best.values[-1]))
        if len(beginning) < _DEPTH - 1:
            waiting += [(*beginning, token) for token in likely[beginning]]
    return Branches(prompt=prompt, logits=logits, likely=likely, edge=edge)


def _entropy(distribution: Mapping[Outcome, float]) -> float:
    """Return the entropy in nats."""
    return -sum(prob * math.log(prob) for prob in distribution.values() if prob > 0)
