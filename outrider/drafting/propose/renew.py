"""Make a proposer again without the outputs that it remembers, to measure prompts again."""

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.drafting.propose.combine import Combination
from outrider.drafting.propose.registry import NAMED, Expression, Maker, combine, make, own_proposer, parse


def without_outputs(proposer: Proposer, spec: str | Maker, setup: ProposerSetup) -> Proposer:
    """Return a proposer of the same kind that knows no output of a finished request.

    Parts without memory of outputs are shared with `proposer`, so no draft model is loaded again.
    Only one of the two may have running sequences.

    Args:
        proposer: the proposer. It keeps its memory.
        spec: what it was made from.
        setup: the setup that it was made with.

    Returns:
        `proposer` itself if it has no memory of outputs.
    """
    if not isinstance(spec, str):
        return own_proposer(spec, setup)
    return _renewed(proposer, parse(spec), setup)


def remembers_outputs(expression: Expression) -> bool:
    """Return whether a proposer drafts from the outputs of finished requests. A user's own proposer may do so."""
    if expression.parts:
        return any(map(remembers_outputs, expression.parts))
    if expression.name == "suffix":
        return bool(expression.argument)
    return expression.name == "group" or expression.name not in NAMED


def _renewed(proposer: Proposer, expression: Expression, setup: ProposerSetup) -> Proposer:
    if not remembers_outputs(expression):
        return proposer
    if not expression.parts:
        return make(expression, setup)
    assert isinstance(proposer, Combination)
    pairs = zip(proposer.parts, expression.parts, strict=True)
    return combine(expression.name, setup, [_renewed(part, each, setup) for part, each in pairs])
