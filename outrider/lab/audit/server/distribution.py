"""The sampling tests: counts of a server's first tokens against the model's distribution, with room for rounding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.params import SamplingParams
from outrider.errors import OutriderError, either
from outrider.lab.audit.distribution import SIGNIFICANCE
from outrider.lab.audit.prompts import Prompt
from outrider.lab.audit.server.client import Completions
from outrider.lab.audit.server.hypotheses import EXACT, Hypothesis
from outrider.lab.audit.server.model import Model, Texts, Tokens
from outrider.lab.audit.server.outcomes import OTHER, Outcome, Tree, edge, grow
from outrider.lab.audit.statistics import GTest, g_test, noncentral_tail

_CANDIDATES = 3  # prompts that are considered for each test
_EDGE = 6.0  # gap at the edge of top_k or top_p that a test needs, in standard deviations of the rounding
_ENOUGH = 0.1  # total variation distance that a test finds anyway, so that more of it does not count
_MIN_EDGE = 1e-4  # the same in logits


@dataclass(frozen=True, slots=True, kw_only=True)
class TestCase:
    """A setting of the sampling parameters, and how much of an output is counted."""

    key: str  # its name in --tests
    name: str
    params: SamplingParams
    depth: int  # tokens
    width: int  # likeliest tokens that are distinguished


CASES = (
    TestCase(key="first", name="first token, temperature 1", params=SamplingParams(temperature=1.0), depth=1, width=16),
    TestCase(key="sampled", name="3 tokens, temperature 1", params=SamplingParams(temperature=1.0), depth=3, width=4),
    TestCase(key="cooler", name="3 tokens, temperature 0.6", params=SamplingParams(temperature=0.6), depth=3, width=4),
    TestCase(key="top-k", name="3 tokens, top_k 3", params=SamplingParams(temperature=1.0, top_k=3), depth=3, width=4),
    TestCase(
        key="top-p",
        name="3 tokens, temperature 0.7, top_p 0.8",
        params=SamplingParams(temperature=0.7, top_p=0.8),
        depth=3,
        width=4,
    ),
    TestCase(
        key="penalties",
        name="3 tokens, penalties",
        params=SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=1.0),
        depth=3,
        width=4,
    ),
)


def cases_of(tests: str | None) -> tuple[TestCase, ...]:
    """Return the tests of a list such as "first,top-p"; all for None.

    Raises:
        OutriderError: a test has no such name.
    """
    if tests is None:
        return CASES
    wanted = [name.strip() for name in tests.split(",") if name.strip()]
    known = [case.key for case in CASES]
    if unknown := [name for name in wanted if name not in known] or ([] if wanted else [tests]):
        raise OutriderError(f"--tests has {unknown[0]!r}; use {either(known)}, or several of them")
    return tuple(case for case in CASES if case.key in wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The counts of one test, and what each hypothesis says about them."""

    case: TestCase
    tree: Tree
    samples: int
    counts: Mapping[Outcome, int]
    tolerance: float  # chi-square distance of two distributions that rounding explains

    def compare(self, hypothesis: Hypothesis) -> GTest:
        """Return the test of the counts against the distribution of a hypothesis."""
        distribution = self.tree.distribution(hypothesis, self.case.params)
        return compare(self.counts, distribution, self.samples, self.tolerance)

    def log_likelihood(self, hypothesis: Hypothesis) -> float:
        """Return the log-likelihood of the counts, with a small probability for impossible outcomes."""
        distribution = self.tree.distribution(hypothesis, self.case.params)
        return sum(
            count * math.log(max(distribution.get(outcome, 0.0), 1e-9)) for outcome, count in self.counts.items()
        )


def compare(
    counts: Mapping[Outcome, int], distribution: Mapping[Outcome, float], samples: int, tolerance: float
) -> GTest:
    """Return the test of counts against the worst distribution within `tolerance` of a distribution.

    A distribution at chi-square distance d from the true one makes G noncentral chi-square with noncentrality n d.
    """
    outcomes = list(distribution)
    unknown = sum(count for outcome, count in counts.items() if outcome not in distribution)
    observed = [counts.get(outcome, 0) for outcome in outcomes]
    result = g_test([*observed, unknown], [*(distribution[outcome] for outcome in outcomes), 0.0])
    if not tolerance or not math.isfinite(result.statistic):
        return result
    p_value = noncentral_tail(result.statistic, result.dof, samples * tolerance) if result.dof else 1.0
    return GTest(statistic=result.statistic, dof=result.dof, p_value=p_value)


def distance(distribution: Mapping[Outcome, float], other: Mapping[Outcome, float]) -> float:
    """Return the total variation distance of two distributions."""
    outcomes = {*distribution, *other}
    return 0.5 * sum(abs(distribution.get(each, 0.0) - other.get(each, 0.0)) for each in outcomes)


class Designer:
    """Chooses for each test the prompt on which the known defects change the distribution most."""

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        texts: Texts | None,
        prompts: Sequence[tuple[Prompt, Tokens]],
        defects: Sequence[Hypothesis],
        *,
        rounding: float,
    ) -> None:
        """Remember the models and prompts. `rounding` is the standard deviation of the server's logits."""
        self._target = target
        self._draft = draft
        self._texts = texts
        self._prompts = prompts[:_CANDIDATES]
        # One variant of each defect is enough to choose a prompt.
        self._defects = tuple({defect.cause: defect for defect in reversed(defects)}.values())
        self._rounding = rounding
        self._trees: dict[tuple[int, int, int], Tree] = {}

    def choose(self, case: TestCase) -> tuple[Prompt, Tree] | None:
        """Return the prompt and the tree of a test, or None if rounding decides on all prompts what a filter keeps."""
        least = max(_MIN_EDGE, _EDGE * self._rounding / case.params.temperature)
        trees = [(prompt, self._tree(number, case)) for number, (prompt, _) in enumerate(self._prompts)]
        usable = [(prompt, tree) for prompt, tree in trees if edge(tree, case.params) >= least]
        return max(usable, key=lambda each: self._power(each[1], case), default=None)

    def _power(self, tree: Tree, case: TestCase) -> float:
        tree.prepare((EXACT, *self._defects), case.params)
        distribution = tree.distribution(EXACT, case.params)
        return sum(
            min(distance(distribution, tree.distribution(defect, case.params)), _ENOUGH) for defect in self._defects
        )

    def _tree(self, number: int, case: TestCase) -> Tree:
        key = (number, case.depth, case.width)
        if key not in self._trees:
            tokens = self._prompts[number][1]
            self._trees[key] = grow(
                self._target, tokens, depth=case.depth, width=case.width, draft=self._draft, texts=self._texts
            )
        return self._trees[key]


async def run_case(
    completions: Completions, case: TestCase, plan: tuple[Prompt, Tree], *, samples: int, seed: int, rounding: float
) -> Sampled:
    """Return the counts of completions for one test. `plan` is the prompt, and the tree of its outcomes."""
    prompt, tree = plan
    answers = await completions.sample(
        prompt, tree.prompt, case.params, max_tokens=case.depth, samples=samples, seed=seed
    )
    # A change of the logits with standard deviation s changes the distribution of a token by at most s^2 in chi-square.
    tolerance = case.depth * (rounding / case.params.temperature) ** 2
    return Sampled(case=case, tree=tree, samples=samples, counts=tree.counts(answers), tolerance=tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTest:
    """The result of one test, as in the JSON document."""

    name: str
    samples: int
    outcomes: int  # those of a probability above 0
    distinguished: float  # probability of the outcomes that are told apart
    ambiguity: float  # probability of tokenizations that are not distinguished
    statistic: float | None  # None: an impossible outcome was observed
    dof: int
    p_value: float
    rounding_chi2: float  # chi-square distance that rounding explains
    passed: bool


def judge(sampled: Sampled, *, level: float) -> SamplingTest:
    """Return the test of the counts against the model's own distribution. It fails if its p-value is below `level`."""
    result = sampled.compare(EXACT)
    distribution = sampled.tree.distribution(EXACT, sampled.case.params)
    known = sum(prob for outcome, prob in distribution.items() if outcome[-1] != OTHER)
    return SamplingTest(
        name=sampled.case.name,
        samples=sampled.samples,
        outcomes=sum(prob > 0 for prob in distribution.values()),
        distinguished=known,
        ambiguity=sampled.tree.ambiguity,
        statistic=result.statistic if math.isfinite(result.statistic) else None,
        dof=result.dof,
        p_value=result.p_value,
        rounding_chi2=sampled.tolerance,
        passed=result.p_value >= level,
    )


def level_of(tests: int) -> float:
    """Return the significance level of each of several tests (Bonferroni)."""
    return SIGNIFICANCE / max(tests, 1)
