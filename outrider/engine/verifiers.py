"""Verifiers by their names, and those that fit how a proposer guesses."""

from __future__ import annotations

from outrider.core.types import Draw
from outrider.errors import OutriderError
from outrider.propose.registry import CHAINS, COMBINATIONS, DRAWN, NAMED, Maker, check_proposer, parse
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT, Verifier


def find_verifier(name: str | None, proposer: str | Maker, *, chains: bool = False) -> Verifier:
    """A verifier by its name, or the one that fits how the proposer guesses.

    Args:
        name: of an exact rule or a lossy one; None is the fitting one.
        proposer: who guesses.
        chains: whether the target makes chains of all guesses, as a recurrent one does.

    Raises:
        OutriderError: one of the two is not known, or the rule takes no trees, which this proposer makes.
    """
    check_proposer(proposer)
    known = {**EXACT, **LOSSY}
    if name is None:
        return known[_fitting(proposer)]
    if not isinstance(name, str) or name not in known:
        raise OutriderError(f"verifier {name!r} is unknown; use one of {', '.join(known)}")
    rule = known[name]
    if not rule.trees and not chains and (growers := tree_makers(proposer)):
        fit = ", ".join(other for other, each in EXACT.items() if each.trees)
        raise OutriderError(
            f"verifier {name} takes chains of guesses only, and there are trees from {' and '.join(growers)}; use one"
            f" of {fit}"
        )
    return rule


def tree_makers(proposer: str | Maker) -> list[str]:
    """Names in an expression that make trees; of a proposer of the user's own that shows when it guesses."""
    names = parse(proposer).names() if isinstance(proposer, str) else ()
    return sorted({name for name in names if name in {*NAMED, *COMBINATIONS} - CHAINS})


def fitting_verifiers(proposer: str | Maker, draw: Draw, *, chains: bool) -> tuple[str, ...]:
    """Exact rules that may judge what such a proposer makes when its guesses are to be made by `draw`.

    Rules for chains take no trees. What the position's race has drawn may only be judged by who looks at the target's
    own draw alone: the race is the same in the next round, and any other rule would have let it into what it rejects.
    """
    chains |= isinstance(proposer, str) and CHAINS.issuperset(parse(proposer).names())
    return tuple(
        name
        for name, rule in EXACT.items()
        if (rule.trees or chains) and (draw is not Draw.RACE or rule.draw is not Draw.SAMPLE)
    )


def _fitting(proposer: str | Maker) -> str:
    """The verifier that keeps most of what such a proposer guesses."""
    if not isinstance(proposer, str):
        return "walk"
    expression = parse(proposer)
    if DRAWN.isdisjoint(expression.names()):
        return "walk"
    return "block" if CHAINS.issuperset(expression.names()) else "traversal"
