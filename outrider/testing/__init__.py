"""The public conformance suite for proposers, caches and verifiers."""

from outrider.testing.bounds import check_bound
from outrider.testing.drive import ConformanceError, random_tree
from outrider.testing.enumeration import Instance, prove
from outrider.testing.suite import check_cache, check_proposer, check_verifier, toy_setup
from outrider.testing.toy_target import ToyTarget, joint_distribution

__all__ = [
    "ConformanceError",
    "Instance",
    "ToyTarget",
    "check_bound",
    "check_cache",
    "check_proposer",
    "check_verifier",
    "joint_distribution",
    "prove",
    "random_tree",
    "toy_setup",
]
