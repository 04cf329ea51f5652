"""The public names for proposers and verification rules of your own.

A proposer is a class with the members of `Proposer`. Its constructor takes a `ProposerSetup`. The
guide "Write your own proposer" builds one step by step, and `outrider.testing` checks it.
"""

from outrider.core.proposer import Proposer, ProposerSetup
from outrider.core.tree import chain, empty, one_hot_tree
from outrider.core.types import Batch, Draft, DraftKind, Draw, Needs, Packed, Request, Round, Scores, SequenceState
from outrider.verify.lossy import LOSSY
from outrider.verify.rules import EXACT, Verifier

__all__ = [
    "Batch",
    "Draft",
    "DraftKind",
    "Draw",
    "EXACT",
    "LOSSY",
    "Needs",
    "Packed",
    "Proposer",
    "ProposerSetup",
    "Request",
    "Round",
    "Scores",
    "SequenceState",
    "Verifier",
    "chain",
    "empty",
    "one_hot_tree",
]
