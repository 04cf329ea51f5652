"""What a user did wrong, in words that name the fix."""

from __future__ import annotations

# What a model's code raises where it is run in a way that its architecture does not allow.
MODEL_ERRORS = (TypeError, ValueError, AttributeError, LookupError, RuntimeError, NotImplementedError)


class OutriderError(ValueError):
    """A mistake that the caller can mend; the message says how."""


class UnsupportedModel(OutriderError):
    """The checkpoint is sound, but its architecture cannot be run exactly here; the message says why."""
