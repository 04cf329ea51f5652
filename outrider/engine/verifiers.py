"""Find a verifier by name, or the best one for a proposer."""

from __future__ import annotations

from outrider.core.types import Draw
from outrider.errors import OutriderError
from outrider.propose.registry import CHAINS, COMBINATIONS, NAMED, SAMPLING_PROPOSERS, Maker, check_proposer, parse
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT, Verifier


def find_verifier(name: str | None, proposer: str | Maker) -> Verifier:
    """Return a verifier by its name, or the default for a proposer.

    Args:
        name: the name of an exact or lossy rule; None: the rule that accepts most of the proposer's draft tokens.
        proposer: the proposer.

    Raises:
        OutriderError: the name or the proposer is unknown, or the rule verifies chains only and the proposer drafts
            trees.
    """
    check_proposer(proposer)
    known = {**EXACT, **LOSSY}
    if name is None:
        return known[_default_name(proposer)]
    if not isinstance(name, str) or name not in known:
        raise OutriderError(f"verifier {name!r} is unknown; use one of {', '.join(known)}")
    verifier = known[name]
    tree_proposers = tree_makers(proposer)
    if not verifier.trees and tree_proposers:
        names = ", ".join(other.name for other in EXACT.values() if other.trees)
        raise OutriderError(
            f"verifier {name} verifies chains only, and {' and '.join(tree_proposers)} drafts trees; use one of {names}"
        )
    return verifier


def tree_makers(proposer: str | Maker) -> list[str]:
    """Return the names in a proposer expression that draft trees. A class of the user is not checked."""
    names = parse(proposer).names() if isinstance(proposer, str) else ()
    return sorted({name for name in names if name in {*NAMED, *COMBINATIONS} - CHAINS})


def fitting_verifiers(proposer: str | Maker, draw: Draw) -> tuple[str, ...]:
    """Return the names of the exact rules that are valid for the drafts of a proposer.

    Rules for chains need a proposer that drafts chains. Draft tokens of `Draw.RACE` need a rule that compares them with
    the target's own sample: the race noise of a position is the same in the next round, so any other rule would
    condition it on a rejection.

    Args:
        proposer: the proposer.
        draw: how the proposer chooses draft tokens.
    """
    chains = isinstance(proposer, str) and CHAINS.issuperset(parse(proposer).names())
    return tuple(
        name
        for name, verifier in EXACT.items()
        if (verifier.trees or chains) and (draw is not Draw.RACE or verifier.draw is not Draw.SAMPLE)
    )


def _default_name(proposer: str | Maker) -> str:
    """Return the name of the rule that accepts most draft tokens of a proposer."""
    if not isinstance(proposer, str):
        return "walk"
    expression = parse(proposer)
    if SAMPLING_PROPOSERS.isdisjoint(expression.names()):
        return "walk"
    return "block" if CHAINS.issuperset(expression.names()) else "traversal"
