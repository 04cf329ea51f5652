"""Read the measured acceptance from the output of `outrider bench`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.text import read_text
from outrider.drafting.plan.speedup import expected_tau
from outrider.errors import OutriderError, either
from outrider.models.loader.embedded import model_name
from outrider.scale.estimate.pair import Acceptance

_BENCH = "outrider bench"
OVERALL = "overall"
_LOOKUPS = ("ngram", "suffix", "recycle", "lookahead", "retrieval")  # proposers that take host time only


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The measured acceptance, and where it comes from."""

    acceptance: Acceptance
    tau: float
    description: str  # of the benchmark, for people
    exact: bool
    proposer: str  # an expression

    def mismatch(self, proposer: str) -> str | None:
        """Return a warning if `proposer` has another kind of cost than the measured one; None: it has the same."""
        uses_model = any(name not in _LOOKUPS for name in _leaves(self.proposer))
        if uses_model != (proposer != "ngram"):
            fitting = "draft:DIR, draft:SIZE, head:SHARE or block:SHARE" if uses_model else "ngram"
            return (
                f"the acceptance was measured with {self.proposer}, and the cost is that of"
                f" {proposer}; use --proposer {fitting} for the measured proposer"
            )
        return None


def read_bench(file: str, *, category: str | None = None) -> Measured:
    """Return the acceptance of one category, or of all prompts.

    Args:
        file: a file with the output of `outrider bench`: all of it, or its last line.
        category: a category of the prompts; None: all prompts.

    Raises:
        OutriderError: the file cannot be read, is not the output of a benchmark, or does not have the category.
    """
    document = _document(file)
    results = document["results"]
    name = category or OVERALL
    if name not in results:
        raise OutriderError(f"{file} has no category {name!r}; use {either(results)}")
    try:
        figures = results[name]["speculative"]
        acceptance = _acceptance(figures)
        tau = float(figures["tau"])
        arguments = document["arguments"]
        exact = bool(document["exact"])
        proposer = str(document["proposer"])
        target = model_name(arguments["target"]) if arguments["target"] else "the embedded target"
        description = (
            f"{name} of {Path(file).name}: {target} with {proposer},"
            f" k {arguments['k']}, temperature {arguments['temperature']:g}, measured tau {tau:.2f}"
        )
    except OutriderError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise OutriderError(
            f"the figures in {file} are damaged ({error!r}); run outrider bench again and give its output"
        ) from None
    return Measured(acceptance=acceptance, tau=tau, description=description, exact=exact, proposer=proposer)


def _leaves(proposer: str) -> list[str]:
    """Return the proposers in an expression, without combinations such as merge(...)."""
    return [part.partition(":")[0].strip() for part in re.split(r"\w+\(|[,)]", proposer) if part.strip()]


def _document(file: str) -> dict[str, Any]:
    """Return the JSON document in the last line of a file."""
    lines = read_text(file, file, fix="give the output of outrider bench").strip().splitlines()
    try:
        document = json.loads(lines[-1] if lines else "")
    except ValueError:
        raise OutriderError(
            f"the last line of {file} is not a JSON document; write one with: outrider bench > {file}"
        ) from None
    if not isinstance(document, dict) or document.get("benchmark") != _BENCH or "results" not in document:
        raise OutriderError(f"{file} is not the output of outrider bench; write it with: outrider bench > {file}")
    return document


def _acceptance(figures: Mapping[str, Any]) -> Acceptance:
    """Return rates that give the measured tau.

    The measured rates cover only passes with draft tokens. A pass without a draft emits one token,
    which lowers tau but not the rates. A completion that ends within an accepted path lowers tau as
    well. Both are included in the first rate.
    """
    rates = list(map(float, figures["acceptance_by_position"]))
    accepted = expected_tau(rates) - 1
    if not accepted:
        raise OutriderError("no draft token was accepted in this benchmark; give the acceptance with --alpha")
    first = min(rates[0] * (float(figures["tau"]) - 1) / accepted, 1.0)
    nodes = float(figures["draft_tokens"]) / float(figures["passes"]) / len(rates)
    return Acceptance(rates=(first, *rates[1:]), nodes=nodes)
