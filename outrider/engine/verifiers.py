"""Find a verifier by name, or the best one for a proposer."""

import torch

from outrider.core.packages import added, load_added
from outrider.core.target import Target, WeightSharer
from outrider.core.types import Draw
from outrider.drafting.propose.registry import (
    CHAINS,
    COMBINATIONS,
    NAMED,
    SAMPLING_PROPOSERS,
    Maker,
    check_proposer,
    parse,
)
from outrider.errors import OutriderError, either
from outrider.verify.lossy import LOSSY
from outrider.verify.relaxed.registry import RELAXED, is_relaxed, relaxed_verifier
from outrider.verify.rules import EXACT, TargetFacts, Verifier


def find_verifier(name: str | None, proposer: str | Maker) -> Verifier:
    """Return a verifier by its name, or the default for a proposer.

    Args:
        name: the name of an exact or lossy rule, or the expression of a relaxed one; None: the rule
            that accepts most of the proposer's draft tokens.

    Raises:
        OutriderError: the name or the proposer is unknown, a relaxed rule has invalid options, or
            the rule verifies chains only and the proposer drafts trees.
    """
    check_proposer(proposer)
    known = {**EXACT, **LOSSY}
    if name is None:
        return known[_default_name(proposer)]
    if isinstance(name, str) and is_relaxed(name):
        verifier = relaxed_verifier(name)
    elif isinstance(name, str) and name in known:
        verifier = known[name]
    elif isinstance(name, str) and (own := load_added("verifiers", name)):
        verifier = own
    else:
        names = either([*known, *RELAXED, *added("verifiers")])
        raise OutriderError(f"verifier {name!r} is unknown; use {names}")
    tree_proposers = tree_makers(proposer)
    if not verifier.trees and tree_proposers:
        names = either(other.name for other in EXACT.values() if other.trees)
        raise OutriderError(
            f"verifier {name} verifies chains only, and {' and '.join(tree_proposers)} drafts trees; use {names}"
        )
    return verifier


def verifier_for(verifier: Verifier, target: Target, *, vocab: int, device: torch.device) -> Verifier:
    """Return a verifier whose tables are made for a target of `vocab` token ids.

    Raises:
        OutriderError: a table does not fit the target, or the target has no embedding to make one from.
    """

    def embedding() -> torch.Tensor:
        if not isinstance(target, WeightSharer):
            raise OutriderError(f"verifier {verifier.name} cannot read the embedding of this target; give table=FILE")
        return target.share_weights().embedding

    return verifier.for_target(TargetFacts(vocab=vocab, device=device, embedding=embedding))


def tree_makers(proposer: str | Maker) -> list[str]:
    """Return the names in a proposer expression that draft trees. A class of the user is not checked."""
    names = parse(proposer).names() if isinstance(proposer, str) else ()
    return sorted({name for name in names if name in {*NAMED, *COMBINATIONS} - CHAINS})


def fitting_verifiers(proposer: str | Maker, draw: Draw) -> tuple[str, ...]:
    """Return the names of the exact rules that are valid for the drafts of a proposer.

    Rules for chains need a proposer that drafts chains. Draft tokens of `Draw.RACE` need a rule
    that compares them with the target's own sample: the race noise of a position is the same in the
    next round, so any other rule would condition it on a rejection.

    Args:
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
