"""Decisions of a fit, as functions of sizes and measured figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from outrider.drafting.plan.pass_cost import CostModel
from outrider.drafting.plan.speedup import expected_tau
from outrider.drafting.propose.expression import command_line_form
from outrider.drafting.propose.registry import SAMPLING_PROPOSERS, parse
from outrider.lab.fit.settings import AUTO_HEAD, LEAST_SAMPLES
from outrider.lab.tune.candidate import Candidate, fastest_first, group
from outrider.lab.tune.figures import Case

_SMALL = 1024  # width of a target up to which a head of half the width is trained
_EAGLE_LAYERS = 4  # the fewest layers that EAGLE kinds read
_LARGE_VOCABULARY = 32_768  # above it the output layer dominates the time of a head
_DRAFT_SHARE, _DRAFT_VOCABULARY = 3, 32_000  # a head drafts a third of a large vocabulary, and at most so many tokens
_FINALISTS = 3  # untrained proposers that are measured again
_WITH_MODEL = SAMPLING_PROPOSERS | {"draft-text", "lookahead"}  # proposers that run a model
_CYCLES = 16  # generation cycles in the training time, if the answers alone took it
_BATCH, _STEPS = 16, 8  # at most: sequences of a step, and steps of a generation cycle
_EVALUATION_SHARE = 8  # of the training time, for one evaluation
_EVALUATION_TEXTS = 16  # 8 prompts at two temperatures
_LEAST_EVALUATED, _MOST_EVALUATED = 16, 128  # tokens of an output of an evaluation
_LEAST_REPLAYED, _MOST_REPLAYED = 4, 16  # tokens of a text that the certificate compares
_REPLAYED_TEXTS = 288  # 12 configurations of 12 prompts, and 36 texts four times as long
_DISTRIBUTION_TESTS, _SAMPLE_TOKENS = 3, 3  # statistical tests of a certificate; tokens of a sample besides k
_LEAST_ANSWERS = 8  # of a generation cycle, however slow the target is


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """The sizes of a target that decide about its head."""

    hidden: int
    layers: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The head to train, and the portions of the training."""

    kind: str
    draft_vocab_size: int  # 0: all tokens
    batch_size: int
    steps_per_generation: int


class CertificatePlan(NamedTuple):
    """How much a certificate tests."""

    samples: int  # of each statistical test
    tokens: int  # of the texts that are compared


class Gain(NamedTuple):
    """An expected speedup over plain decoding, and the draft length that reaches it."""

    speedup: float
    k: int


def plan_training(
    head: str, size: TargetSize, *, minutes: float, prompts: int, max_tokens: int, tokens_per_s: float
) -> TrainingPlan:
    """Return the kind of head to train, and the size of a generation cycle.

    A cycle takes about a sixteenth of the time or less, so that a slow target gets several cycles too.

    Args:
        head: the kind, or auto.
        minutes: the training time.
        prompts: number of prompts to train on.
        max_tokens: most tokens of an answer.
        tokens_per_s: speed of plain decoding.
    """
    answers = int(tokens_per_s * 60 * minutes / _CYCLES / max_tokens)
    answers = min(max(answers, _LEAST_ANSWERS), prompts, _BATCH * _STEPS)
    batch_size = min(answers, _BATCH)
    return TrainingPlan(
        kind=head_kind(size) if head == AUTO_HEAD else head,
        draft_vocab_size=min(size.vocab // _DRAFT_SHARE, _DRAFT_VOCABULARY) if size.vocab > _LARGE_VOCABULARY else 0,
        batch_size=batch_size,
        steps_per_generation=answers // batch_size,
    )


def evaluation_tokens(tokens_per_s: float, *, minutes: float) -> int:
    """Return the output tokens of an evaluation during a training. It takes about an eighth of the training at most."""
    fitting = int(60 * minutes / _EVALUATION_SHARE * tokens_per_s / _EVALUATION_TEXTS)
    return min(max(fitting, _LEAST_EVALUATED), _MOST_EVALUATED)


def plan_certificate(samples: int, *, k: int, tokens_per_s: float, seconds: float) -> CertificatePlan | None:
    """Return how much a certificate tests in the time. None: the smallest certificate takes longer.

    Args:
        samples: the most samples of each statistical test.
        k: the draft length.
        tokens_per_s: speed of plain decoding.
    """
    tokens = seconds * tokens_per_s  # in this time
    length = min(max(int(tokens / 2 / _REPLAYED_TEXTS), _LEAST_REPLAYED), _MOST_REPLAYED)
    sample = _DISTRIBUTION_TESTS * (k + _SAMPLE_TOKENS)
    fitting = int((tokens - length * _REPLAYED_TEXTS) / sample)
    if _LEAST_REPLAYED * _REPLAYED_TEXTS + LEAST_SAMPLES * sample > tokens:
        return None
    return CertificatePlan(min(max(fitting, LEAST_SAMPLES), samples), length)


def head_kind(size: TargetSize) -> str:
    """Return the kind of head that suits a target."""
    if size.layers < _EAGLE_LAYERS:
        return "mtp"
    return "slim" if size.hidden <= _SMALL else "eagle31"


def expected_gain(costs: CostModel, acceptance: Sequence[float], *, batch: int, cached: int) -> Gain:
    """Return the highest expected speedup of chains, E[tau] (plain round) / (round with k draft tokens).

    Args:
        costs: measured costs of the target and of the head.
        acceptance: by position.
        batch: sequences at once.
        cached: mean cached tokens of a sequence.

    Returns:
        A speedup of 1 with k 0 if no draft length pays.
    """
    plain = costs.verify(batch, 0, cached=cached)
    best = Gain(1.0, 0)
    for k in range(1, len(acceptance) + 1):
        took = costs.verify(batch, k, cached=cached) + costs.propose(batch, k, cached=cached)
        best = max(best, Gain(expected_tau(acceptance[:k]) * plain / took, k))
    return best


def candidates(cases: Sequence[Case]) -> list[Candidate]:
    """Return each proposer and draft length that was measured."""
    return group((case, case.overall) for case in cases)


def draft_quantizes(proposers: Sequence[str], cases: Sequence[Case]) -> dict[str, tuple[str | None, ...]]:
    """Return the weights of the drafts of proposers whose best candidate has other ones than those of the settings."""
    best = {candidate.proposer: candidate.draft_quantize for candidate in ranked(cases)}
    return {proposer: (best[proposer],) for proposer in proposers if best.get(proposer) is not None}


def ranked(cases: Sequence[Case]) -> list[Candidate]:
    """Return the best draft length and draft of each proposer, over all temperatures. The best proposer comes first."""
    best: dict[str, Candidate] = {}
    for candidate in fastest_first(candidates(cases)):
        best.setdefault(candidate.proposer, candidate)
    return list(best.values())


def finalists(
    cases: Sequence[Case], head: str | None, *, models: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, ...]:
    """Return the proposers of the second measurement. Of several files of one draft model, it has the fastest one.

    Args:
        cases: the cases of the first measurement.
        head: folder of the trained head; None if there is none.
        models: by proposer: the proposer that stands for all files of its draft model.
    """
    fastest: dict[str, str] = {}
    for candidate in ranked(cases):
        fastest.setdefault(models.get(candidate.proposer, candidate.proposer), candidate.proposer)
    order = list(fastest.values())
    chosen = order[:_FINALISTS]
    # Lookups are much alike. One proposer with a model is always measured again.
    if not any(map(_has_model, chosen)):
        chosen += list(filter(_has_model, order))[:1]
    if head is not None:
        draft = command_line_form(f'draft:"{head}"')
        chosen.append(draft)
        lookups = list(filter(is_lookup, order))
        chosen += [f"best({proposer},{draft})" for proposer in lookups[:1]]
    return tuple(chosen)


def is_lookup(proposer: str) -> bool:
    """Return whether a proposer can be combined with a head: it has no model, and is no combination."""
    expression = parse(proposer)
    return not expression.parts and expression.name not in _WITH_MODEL


def _has_model(proposer: str) -> bool:
    return any(leaf.name in _WITH_MODEL for leaf in parse(proposer).leaves())
