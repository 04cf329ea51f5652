"""Acceptance as `outrider bench` measured it, from the document that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import OutriderError
from outrider.plan.speedup import expected_tau
from outrider.project.equations import Acceptance

_BENCH, OVERALL = "outrider bench", "overall"
_HOST = ("ngram", "suffix", "recycle", "lookahead", "retrieval")  # whose guesses cost the host's time alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was accepted, and where."""

    acceptance: Acceptance
    tau: float
    says: str  # for people
    exact: bool
    proposer: str  # an expression

    def other(self, proposer: str) -> str | None:
        """What is odd about projecting this proposer with these rates; None where nothing is."""
        models = any(name not in _HOST for name in _leaves(self.proposer))
        if models != (proposer != "ngram"):
            fitting = "draft:DIR, draft:SIZE, head:SHARE or block:SHARE" if models else "ngram"
            return (
                f"the rates are those of {self.proposer}, and the cost of guessing is that of {proposer}; give"
                f" --proposer {fitting} for what was measured"
            )
        return None


def read_bench(file: str, *, category: str | None = None) -> Measured:
    """The acceptance of one category, or of all.

    Args:
        file: what `outrider bench` printed: the whole of it, or its last line.
        category: of its prompts; None is all of them.

    Raises:
        OutriderError: the file cannot be read, is no such output, or measured no such category.
    """
    document = _document(file)
    results, name = document["results"], category or OVERALL
    if name not in results:
        raise OutriderError(f"{file} measured no category {name!r}; use one of {', '.join(results)}")
    try:
        figures = results[name]["speculative"]
        acceptance, tau = _acceptance(figures), float(figures["tau"])
        asked, exact, proposer = document["arguments"], bool(document["exact"]), str(document["proposer"])
        says = (
            f"{name} of {Path(file).name}: {Path(asked['target'] or 'the embedded target').name} with"
            f" {proposer}, k {asked['k']}, temperature {asked['temperature']:g}, measured tau {tau:.2f}"
        )
    except OutriderError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise OutriderError(
            f"{file} holds no sound figures ({error!r}); run outrider bench again, and keep its last line"
        ) from None
    return Measured(acceptance=acceptance, tau=tau, says=says, exact=exact, proposer=proposer)


def _leaves(proposer: str) -> list[str]:
    """Names of those that guess, in an expression; merge and the like stand before a bracket."""
    return [part.partition(":")[0].strip() for part in re.split(r"\w+\(|[,)]", proposer) if part.strip()]


def _document(file: str) -> dict[str, Any]:
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OutriderError(f"{file} cannot be read ({reason}); give the output of outrider bench") from None
    try:
        document = json.loads(lines[-1] if lines else "")
    except ValueError:
        raise OutriderError(
            f"the last line of {file} is no JSON document; write one with: outrider bench > {file}"
        ) from None
    if not isinstance(document, dict) or document.get("benchmark") != _BENCH or "results" not in document:
        raise OutriderError(f"{file} is no output of outrider bench; write one with: outrider bench > {file}")
    return document


def _acceptance(figures: Mapping[str, Any]) -> Acceptance:
    """Rates that give the measured tau.

    Rates were measured where there was a guess. Where a proposer found none the pass emitted one token, which tau knows
    and rates do not: the first rate takes it over. So do completions that ended inside an accepted run.
    """
    rates = [float(rate) for rate in figures["acceptance_by_position"]]
    kept = expected_tau(rates) - 1
    if not kept:
        raise OutriderError("no guess was kept in this benchmark, so nothing can be projected from it; use --alpha")
    first = min(rates[0] * (float(figures["tau"]) - 1) / kept, 1.0)
    nodes = float(figures["draft_tokens"]) / float(figures["passes"]) / len(rates)
    return Acceptance(rates=(first, *rates[1:]), nodes=nodes)
