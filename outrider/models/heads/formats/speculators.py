"""Write the common part of the configs of speculators."""

from outrider.models.heads.formats.base import Config, TargetInfo

_VERSION = "0.7.0"  # of speculators
_DRAFT_TOKENS = 3  # suggested to engines for draft heads that can predict any number of tokens


def speculators(kind: str, architecture: str, target: TargetInfo | None, draft_tokens: int = _DRAFT_TOKENS) -> Config:
    """Return the common part of a config.

    Args:
        kind: the kind of draft head, as speculators names it.
        architecture: the class that loads it in speculators.
        draft_tokens: draft tokens in each round.
    """
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name if target else None, "architectures": []},
        },
    }
