"""What stands at the head of every config of speculators."""

from __future__ import annotations

from outrider.heads.formats.base import Config, TargetInfo

_VERSION = "0.7.0"  # whose config is written
_GUESSES = 3  # a round, as a proposal to engines, where a draft can make any number


def speculators(kind: str, architecture: str, partner: TargetInfo | None, guesses: int = _GUESSES) -> Config:
    """For a draft of this kind, and the class that reads it there."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": guesses}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": partner.name if partner else None, "architectures": []},
        },
    }
